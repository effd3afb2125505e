"""What a controller is said to do is what it did: lives, decisions and the page, on one short real episode."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import behaviour
from esper.lifecycle import Stage
from results.lives import KEPT, PRUNED, UNDECIDED, Decision, Episode, Life, Play, play


def episode(number: int, *lives: Life, accuracy: float = 90.0, answer: str = "norm@1") -> Episode:
    """Six epochs, three slots; one stage band per life is enough for a picture."""
    stages = [(Stage.TRAINING, Stage.BLENDING, Stage.DORMANT)] * 6
    kind = "series nothing" if answer == "none" else "series scale @1"
    decisions = [Decision(life.born, "germinate", life.place, "validation accuracy 50.0 %") for life in lives]
    decisions += [
        Decision(
            life.ended, "prune" if life.fate == PRUNED else "fossilize", life.place, "its shadow promises -0.3 points"
        )
        for life in lives
        if life.ended is not None
    ]
    facts = {"kind": kind, "answer": answer, "horizon": 6, "slots": 3, "budget": 900, "most_seeds": 2}
    return Episode(
        number,
        **facts,
        host_parameters=500,
        test_accuracy=accuracy,
        curve=[50.0] * 6,
        stages=stages,
        decisions=decisions,
        lives=list(lives),
    )


def kept(place: int = 1) -> Life:
    return Life(place, "norm", 1, 2, 1, 1, shadow=4.0, contribution=8.0, fate=KEPT, ended=5, ended_in=Stage.HOLDING)


def pruned() -> Life:
    return Life(0, "conv", 0, 3, shadow=-0.3, fate=PRUNED, ended=3, ended_in=Stage.TRAINING)


def test_what_acts_in_the_final_network() -> None:
    held = Life(2, "lora", 2, fate=UNDECIDED, ended_in=Stage.HOLDING)
    young = Life(2, "mlp", 5, fate=UNDECIDED, ended_in=Stage.TRAINING)
    assert episode(0, kept(), pruned(), held, young).kept == ["lora@2", "norm@1"]
    assert episode(0, answer="none").meant == []
    assert episode(0, answer="norm@1+conv@0").meant == ["conv@0", "norm@1"]


def test_the_page_tells_what_was_done(tmp_path: Path) -> None:
    learned = {0: episode(0, kept()), 1: episode(1, pruned(), kept()), 2: episode(2, answer="none", accuracy=40.0)}
    none = {number: episode(number, accuracy=50.0) for number in learned}
    text = behaviour.page(learned, none, "python benchmarks/behaviour.py", tmp_path)
    assert "It plants 1.0 seeds an episode and ends with 0.7; 33 % of the networks end ungrown" in text
    assert "Test accuracy is +23.3 points" in text  # +40, +40, −10
    assert "| kept exactly what was meant | 100 % | 100 % |" in text
    assert "1 seeds are pruned while they incubate, after 3.0 epochs, when their shadow promises −0.3 points" in text
    assert "- After epoch 3: prunes conv@0; its shadow promises −0.3 points." in text
    assert "- It waits throughout." in text
    for picture in ("choices", "timing", "example_1", "example_2", "example_3"):
        assert (tmp_path / "images" / f"behaviour_{picture}.png").exists()


@pytest.mark.parametrize("controller", ["none", "heuristic"])
def test_a_real_episode_is_noted_as_it_went(controller: str) -> None:
    (found,) = play(Play(controller, (1,), "mixed/vector channel"))
    assert len(found.curve) == len(found.stages) == found.horizon
    assert [d.what for d in found.decisions if d.op == "germinate"] == [life.place for life in found.lives]
    if controller == "none":
        assert found.size == 1.0
        assert not found.decisions
        return
    assert found.lives
    assert found.kept == sorted(life.place for life in found.lives if life.fate != PRUNED)
    for life in found.lives:
        assert life.incubated >= 2  # the lifecycle's least
        assert life.born < (life.ended or found.horizon)

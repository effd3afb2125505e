"""What a controller is said to do is what it did: seeds, decisions and the page, on one short real episode."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import behaviour
from behaviour import Episode, SeedLife, play
from esper.actions import Op
from esper.lifecycle import Contrast, Stage


@pytest.fixture(scope="module")
def grown() -> Episode:
    return play("heuristic", "mixed/vector channel", (1,))[1]


def points(value: float) -> Contrast:
    return Contrast(value, 0.0, 0.5)


def kept() -> SeedLife:
    epochs = Counter({Stage.TRAINING: 2, Stage.BLENDING: 1, Stage.HOLDING: 1})
    return SeedLife(1, "norm", 1, epochs, points(4.0), points(8.0), Op.FOSSILIZE, Stage.HOLDING)


def pruned() -> SeedLife:
    return SeedLife(0, "conv", 0, Counter({Stage.TRAINING: 3}), points(-0.3), None, Op.PRUNE, Stage.TRAINING)


def episode(real: Episode, *seeds: SeedLife, accuracy: float = 90.0, answer: str = "norm@1") -> Episode:
    """A real episode with other seeds, another test accuracy, and another need."""
    facts = {**real.draw.facts, "answer": answer, "kind": "series nothing" if answer == "none" else "series scale @1"}
    decisions = [f"After epoch {seed.born}: plants {seed.place}; validation accuracy 50.0 %." for seed in seeds]
    return replace(
        real,
        draw=replace(real.draw, facts=facts),
        test_accuracy=accuracy,
        seeds=list(seeds),
        decisions=decisions,
    )


def test_what_acts_in_the_final_network(grown: Episode) -> None:
    held = SeedLife(2, "lora", 2, ended_in=Stage.HOLDING)
    young = SeedLife(2, "mlp", 5, ended_in=Stage.TRAINING)
    assert episode(grown, kept(), pruned(), held, young).kept == ["lora@2", "norm@1"]
    assert episode(grown, answer="none").meant == []
    assert episode(grown, answer="norm@1+conv@0").meant == ["conv@0", "norm@1"]


def test_the_page_says_what_was_done(grown: Episode, tmp_path: Path) -> None:
    learned = {0: episode(grown, kept()), 1: episode(grown, pruned(), kept())}
    learned[2] = episode(grown, answer="none", accuracy=40.0)
    none = {number: episode(grown, accuracy=50.0) for number in learned}
    text = behaviour.page(learned, none, "python benchmarks/behaviour.py", tmp_path)
    assert "It plants 1.0 seeds an episode and ends with 0.7; 33 % of the networks end ungrown" in text
    assert "Test accuracy is +23.3 points" in text  # +40, +40, −10
    assert "| kept exactly what was meant | 100 % | 100 % |" in text
    assert "1 seeds are pruned while they incubate, after 3.0 epochs, when their shadow promises −0.3 points" in text
    assert "- After epoch 0: plants conv@0; validation accuracy 50.0 %." in text
    assert "- It waits throughout." in text
    for picture in ("choices", "timing", "example_1", "example_2", "example_3"):
        assert (tmp_path / "images" / f"behaviour_{picture}.png").exists()


def test_a_real_episode_is_noted_as_it_went(grown: Episode) -> None:
    assert len(grown.history.records) == grown.draw.horizon
    planted = [decision.split()[4].rstrip(";") for decision in grown.decisions if "plants" in decision]
    assert planted
    assert planted == [seed.place for seed in grown.seeds]
    assert [story.born for story in grown.history.seeds()] == [seed.born for seed in grown.seeds]
    assert grown.kept == sorted(seed.place for seed in grown.seeds if seed.fate is not Op.PRUNE)
    for seed in grown.seeds:
        assert seed.epochs[Stage.TRAINING] >= 2  # the lifecycle's least
        assert seed.epochs.total() <= grown.draw.horizon - seed.born


def test_without_growth_there_is_nothing_to_note() -> None:
    found = play("none", "mixed/vector channel", (1,))[1]
    assert found.size == 1.0
    assert not found.decisions
    assert not found.seeds

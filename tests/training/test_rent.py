"""Rent, the price of size: what it may be, who reads it, and the score that it enters.

Covers: R149
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.actions import Action, Op
from esper.engine.learner import Learner
from esper.env.rent import RENT_RATE, score
from esper.env.situation import Situation, observe
from esper.lifecycle import Contrast, Rules, Stage
from esper.policy.heuristic import Heuristic, HeuristicSettings
from esper.policy.schedule import FixedSchedule, Planting
from esper.tasks import load_task
from esper.training.own.grow import grow_task
from esper.training.own.run import settle
from small_worlds import BUILT_IN, EAGER, force, learner_for, run_epoch

QUICK = Rules(training_epochs=1, blending_epochs=1, prune_age=1, shadow_benefit=-100.0, contribution=-100.0)


def rings(count: int, seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
    return x, (x.norm(dim=1) * 1.5).long().clamp(max=2)


def small_grow(**changes: object) -> esper.Grown:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 3))
    plant = FixedSchedule("test", [Planting(1, 0, {"dense": "mlp"})])
    settings: dict[str, object] = {"slots": ["1"], "controller": plant, "epochs": 6, "rules": QUICK, "device": "cpu"}
    return esper.grow(net, rings(128, 0), rings(64, 1), **{**settings, **changes})  # type: ignore[arg-type]


# -- what it may be ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rent", [-1.0, math.nan, math.inf, True, "5"])
def test_a_rent_that_is_no_price_is_refused(rent: object) -> None:
    with pytest.raises(ValueError, match="rent must be a finite number of at least 0"):
        small_grow(rent=rent)
    with pytest.raises(ValueError, match="rent must be a finite number of at least 0"):
        grow_task(load_task("digits"), controller="none", epochs=1, rent=rent)  # type: ignore[arg-type]


# -- the score ---------------------------------------------------------------------------------------------------------


def test_the_score_is_accuracy_minus_the_rent_of_what_was_exported(tmp_path: Path) -> None:
    grown = small_grow(rent=0.25, test_data=rings(64, 2), control=True)
    assert grown.parameters > grown.history.host_parameters
    assert grown.test is not None
    assert grown.control is not None
    assert grown.rent == 0.25
    host = grown.history.host_parameters
    assert grown.score == score(grown.test.accuracy, grown.parameters, host, 0.25)
    assert grown.score < grown.test.accuracy
    assert grown.control_score == grown.control.accuracy  # a host pays no rent
    grown.save(tmp_path)
    assert json.loads((tmp_path / "history.json").read_text())["rent"] == 0.25


def test_without_test_data_the_score_is_that_of_the_validation_data() -> None:
    grown = small_grow()
    assert grown.rent == RENT_RATE
    assert grown.score == score(grown.validation.accuracy, grown.parameters, grown.history.host_parameters)
    assert grown.control_score is None


# -- who reads it ------------------------------------------------------------------------------------------------------


class Noting:
    """Waits, and keeps what it was shown."""

    name = "noting"

    def __init__(self) -> None:
        self.seen: list[Situation] = []

    def reset(self, seeds: object) -> None:
        self.seen.clear()

    def decide(self, situations: list[Situation]) -> list[Action]:
        self.seen += situations
        return [Action(reason="it only looks")] * len(situations)


def test_controllers_see_the_rent() -> None:
    noting = Noting()
    small_grow(controller=noting, epochs=2, rent=1.5)
    assert [situation.rent for situation in noting.seen] == [1.5, 1.5]
    assert observe(learner_for(BUILT_IN["mlp"]), 3, []).rent == RENT_RATE


def held(contribution: float, least: float = 0.0) -> Learner:
    """A host with an mlp that works at full strength and was measured to give so many points."""
    learner = learner_for(BUILT_IN["mlp"], rules=replace(EAGER, contribution=least))
    run_epoch(learner, Action(Op.GERMINATE, 0, "mlp", "linear", "test"))
    while learner.model.slots[0].life.stage is not Stage.HOLDING:
        run_epoch(learner)
    force(learner.model.slots[0], contribution=Contrast(contribution, 0.0, 0.1))
    return learner


def sizes(learner: Learner) -> float:
    seed = learner.model.slots[0].seed
    assert seed is not None
    return seed.size / learner.model.host_parameters


def test_the_heuristic_asks_for_the_extra_rent_only() -> None:
    """keep_above is 0.5 at the default rent; ten points more per host-size raise it by 10 · seed / host."""
    learner = held(0.0)
    share = sizes(learner)
    heuristic = Heuristic(HeuristicSettings(keep_above=0.5))
    heuristic.reset([0])

    def keeps(points: float, rent: float) -> bool:
        force(learner.model.slots[0], contribution=Contrast(points, 0.0, 0.1))
        (action,) = heuristic.decide([observe(learner, 30, [], rent=rent)])
        return action.op is Op.FOSSILIZE

    dear, cheap = RENT_RATE + 10.0, 0.0
    assert [keeps(0.49, RENT_RATE), keeps(0.51, RENT_RATE)] == [False, True]
    assert [keeps(0.49 + 10 * share, dear), keeps(0.51 + 10 * share, dear)] == [False, True]
    least = max(0.0, 0.5 - RENT_RATE * share)
    assert keeps(least + 0.01, cheap)
    assert not keeps(-0.01, cheap)


def test_at_the_default_rent_a_negative_threshold_stays_what_it_is() -> None:
    learner = held(0.0, least=EAGER.contribution)
    force(learner.model.slots[0], contribution=Contrast(-0.2, 0.0, 0.1))
    heuristic = Heuristic(HeuristicSettings(keep_above=-0.5))
    heuristic.reset([0])
    assert heuristic.decide([observe(learner, 30, [])])[0].op is Op.FOSSILIZE


def test_what_does_not_earn_the_extra_rent_is_pruned_at_the_end() -> None:
    learner = held(1.0)
    share = sizes(learner)
    (kept,) = settle(held(1.0))
    assert kept.target is Stage.FOSSILIZED
    (kept,) = settle(held(1.0), RENT_RATE + 0.9 / share)
    assert kept.target is Stage.FOSSILIZED
    (pruned,) = settle(learner, RENT_RATE + 1.1 / share)
    assert pruned.target is Stage.PRUNED
    assert pruned.reason == "the run ended, and it contributes +1.0 points, less than the 1.1 of its extra rent"


def test_a_policy_of_schema_1_cannot_read_it_and_that_is_said() -> None:
    old = Path(__file__).parents[1] / "agent" / "schema_1.safetensors"
    with pytest.warns(esper.GrowthWarning, match="trained with a rent of 5"):
        grown = small_grow(controller=old, epochs=8, rent=50.0)
    assert any("trained with a rent of 5" in remark for remark in grown.remarks)
    for settings in ({"controller": "heuristic", "rent": 50.0}, {"controller": "small", "rent": 50.0}):
        assert not any("trained with a rent" in remark for remark in small_grow(epochs=8, **settings).remarks)

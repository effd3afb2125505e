"""Whole episodes of random legal play: the stacked environment says what the plain one says, in float64.

All kinds of the generated families are played, with every blueprint, blend and ending of a seed's life.

Covers: R143
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import pytest
import torch
from side_by_side import DEVICES, EVERYTHING, ON_CUDA, OPEN, Differences, Small, Turns, compare_episodes, with_nan

from esper.actions import BLENDS, Op
from esper.engine.stacked.blueprints import BATCHED
from esper.env.growth_env import GrowthEnv
from esper.env.stacked_env import StackedEnv
from esper.growth.blueprints import Layout
from esper.lifecycle import Rules
from esper.tasks.disguised import Disguised
from esper.tasks.family import Draw, Family
from esper.tasks.mixed import KINDS, Mixed
from esper.tasks.varied import Varied

LIMIT = 1e-8
"""Free-running, of losses near 1. Training losses and gradients agree to 1e-12. Validation losses of hosts with a batch
norm agree to 1e-9: the bias of a seed before a norm has a gradient that is zero but for rounding, which Adam divides by
its own size plus 1e-8; what it makes of it shows in the running mean alone."""
ONE_ULP = {"observation.overall": 1.2e-7, "observation.slots": 1.2e-7, "observation.costs": 1.2e-7, "reward": 1.2e-7}
"""Of numbers that are float32 in the end."""
SORT_OF: dict[Layout, tuple[str, str]] = {
    "conv1d": ("series", "series"),
    "conv2d": ("image", "image"),
    "dense": ("vector", "vector"),
    "sequence": ("token", "sequence"),
}
"""What the layout is called in `mixed`, and in `varied`."""
DRAWS = range(24)
"""At least 8 of each family, and no layout has more kinds."""
EVENTS = (
    "PRUNE TRAINING",
    "PRUNE BLENDING",
    "PRUNE HOLDING",
    "FOSSILIZE HOLDING",
    "several incubating",
    "several acting",
    "incubating before acting",
    "acting before incubating",
    "part of a seed",
)


def kinds_of(layout: Layout) -> list[str]:
    return [kind for kind in KINDS if kind.startswith(SORT_OF[layout][0])]


def family_of(layout: Layout) -> Family:
    kinds = kinds_of(layout)
    return Turns(Mixed(kinds=kinds), Disguised(kinds=kinds), Varied(sorts=[SORT_OF[layout][1]]))


def broken(number: int, draw: Draw) -> Draw:
    """Every fourth draw has a training example that is not a number; another fourth learns much too fast."""
    if number % 4 == 0:
        return with_nan(draw)
    return replace(draw, task=replace(draw.task, learning_rate=100.0)) if number % 4 == 2 else draw


def check(found: Differences, device: str, looser: Mapping[str, float] | None = None) -> None:
    found.check(LIMIT if device == "cpu" else ON_CUDA, {**ONE_ULP, **(looser or {})})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", SORT_OF)
def test_whole_episodes_are_those_of_the_plain_environment(layout: Layout, device: str) -> None:
    found, seen = compare_episodes(Small(family_of(layout)), DRAWS, rules=OPEN, device=device)
    check(found, device)
    assert seen.kinds == {*kinds_of(layout), SORT_OF[layout][1]}
    seeds = product([layout], BATCHED[layout], BLENDS, ("incubating", "acting"))
    assert not (missing := set(seeds) - seen.seeds), sorted(missing)
    assert all(seen.events[event] >= 3 for event in EVENTS), seen.events


@pytest.mark.parametrize("device", DEVICES)
def test_the_governor_undoes_the_same_epochs(device: str) -> None:
    found, seen = compare_episodes(Small(EVERYTHING, change=broken), DRAWS, rules=OPEN, device=device)
    assert seen.events["undone"] >= 8, seen.events
    # At a rate of 100, rounding grows within an epoch, and losses reach 1e10: of these the verdict must agree.
    check(found, device, {"fault_seen": math.inf, "host_gradient": 1e-5, "seed_gradient": 1e-5})


@pytest.mark.parametrize("device", DEVICES)
def test_networks_that_make_different_numbers_of_updates_share_a_stack(device: str) -> None:
    """Those that make fewer stand still for the rest of an epoch: weights, moments, step counts and statistics."""
    family = Small(EVERYTHING, updates=lambda number: 1 + number % 4, horizon=10)
    found, _ = compare_episodes(family, range(24, 48), rules=OPEN, seed=1, device=device)
    check(found, device)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", SORT_OF)
def test_longer_episodes_of_other_draws_under_the_rules_as_they_are(layout: Layout, device: str) -> None:
    family = Small(family_of(layout), updates=lambda number: 5 + number % 3, train=400, val=200, horizon=20)
    found, _ = compare_episodes(family, range(24, 48), rules=Rules(), seed=2, device=device)
    check(found, device)


def test_heads_that_an_operation_does_not_use_are_not_reported() -> None:
    """Counts by slot and blueprint (`training/bulk.py`) would tell them apart."""
    env = StackedEnv(Small(EVERYTHING), 2)
    env.reset([0, 1])
    facts = env.step(torch.tensor([[1, 2, 1, Op.WAIT], [-1, 0, 2, Op.GERMINATE]])).facts
    assert facts is not None
    epoch = facts.epoch
    assert (epoch.slot[0], epoch.blueprint[0], epoch.blend[0]) == (0, 0, 0)
    assert (epoch.op.tolist(), epoch.changed.tolist()) == (
        [Op.WAIT, Op.GERMINATE],
        [False, False],
    )  # there is no slot -1


def test_too_few_slots_are_refused_as_the_plain_environment_does() -> None:
    for kind in (GrowthEnv, StackedEnv):
        with pytest.raises(ValueError, match="room for 1: raise `slots`"):
            kind(Small(EVERYTHING), 2, slots=1).reset([0, 1])

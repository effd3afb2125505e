"""Recorded plays as a test wants them: states by hand, and portfolios that follow a rule."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from esper.actions import BLENDS, HEAD_NAMES, Op
from esper.env.observation import NOT_MEASURED, OVERALL_FIELDS, SLOT_FIELDS, squash
from esper.env.spaces import ActionMasks, Observation
from esper.growth.blueprints import blueprint_names
from esper.offline.episodes import Episodes

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "recipe"))
from forecasts import SEEN
from portfolio import NONE

SLOTS = 3
LINEAR = BLENDS.index("linear")
BOTH = (Op.PRUNE, Op.FOSSILIZE)
GOOD, BETTER = ("norm", 1), ("mlp", 0)
"""Seeds and their slots."""


@dataclass(frozen=True)
class Seed:
    """A seed as an observation shows it."""

    blueprint: str
    slot: int
    age: int = 5
    gain: float | None = None
    """Points of its contribution, if it was measured."""
    promise: float | None = None
    """Points of its shadow, if that was."""
    may: tuple[Op, ...] = ()
    size: float = 0.0
    """Its parameters over the host's."""


@dataclass(frozen=True)
class State:
    """One step: epochs left, what is planted, and whether anything can be planted beside it."""

    left: int
    seeds: tuple[Seed, ...] = ()
    room: bool = True
    accuracy: float = 50.0
    tried_before: bool = False
    """Whether a seed was there that is gone."""


def episode(*states: State, number: int = 4, by: str = "someone", earned: float = 0.0) -> Episodes:
    steps, kinds, field = len(states), len(blueprint_names()), list(SLOT_FIELDS).index
    overall = torch.zeros(1, steps, len(OVERALL_FIELDS))
    overall[..., list(OVERALL_FIELDS).index("seeds_left")] = 1.0
    slots = torch.zeros(1, steps, SLOTS, len(SLOT_FIELDS))
    slots[..., field("contribution_points")] = slots[..., field("shadow_points")] = NOT_MEASURED
    slots[..., field("layout_dense")] = 1.0
    planted = torch.zeros(1, steps, SLOTS, dtype=torch.int64)
    can = torch.zeros(1, steps, len(Op), SLOTS, dtype=torch.bool)
    growable = torch.zeros(1, steps, SLOTS, kinds, dtype=torch.bool)
    for step, state in enumerate(states):
        overall[0, step, list(OVERALL_FIELDS).index("epochs_left")] = state.left / 50
        overall[0, step, list(OVERALL_FIELDS).index("val_accuracy_0_ago")] = state.accuracy / 100
        slots[0, step, SLOTS - 1, field("seeds_before")] = state.tried_before / 4
        taken = {seed.slot for seed in state.seeds}
        for slot in set(range(SLOTS)) - taken if state.room else ():
            growable[0, step, slot] = can[0, step, Op.GERMINATE, slot] = True
        for seed in state.seeds:
            shown = slots[0, step, seed.slot]
            planted[0, step, seed.slot] = blueprint_names().index(seed.blueprint) + 1
            shown[field("age")] = seed.age / 20
            shown[field("parameters")] = squash(seed.size, 20.0)
            if seed.gain is not None:
                shown[field("contribution_points")] = squash(seed.gain, 50.0)
            if seed.promise is not None:
                shown[field("shadow_points")] = squash(seed.promise, 50.0)
            for op in seed.may:
                can[0, step, op, seed.slot] = True
    op = can.any(-1)
    op[..., Op.WAIT] = True
    blend = growable.any(-1, keepdim=True).expand(1, steps, SLOTS, len(BLENDS)).clone()
    reward = torch.zeros(1, steps)
    reward[0, 0] = earned
    done = torch.arange(steps)[None] == steps - 1
    nothing = torch.zeros(1, steps, len(HEAD_NAMES), dtype=torch.int64)
    costs, present = torch.zeros(1, steps, SLOTS, kinds), torch.ones(1, steps, SLOTS, dtype=torch.bool)
    return Episodes(
        Observation(overall, slots, planted, costs, present),
        ActionMasks(op, can, growable, blend),
        label=nothing,
        taken=nothing.clone(),
        reward=reward,
        terminated=done,
        lengths=torch.tensor([steps]),
        draw=torch.tensor([number]),
        controller=torch.tensor([0]),
        controllers=(by,),
    )


def ended_with(*seeds: Seed, number: int, by: str, earned: float) -> Episodes:
    return episode(State(2), State(1, seeds, accuracy=earned), number=number, by=by, earned=earned)


Told = tuple[str, int] | tuple[str, int, str] | str


def told(label: torch.Tensor) -> Told:
    """A decision, readably."""
    slot, blueprint, blend, op = label.tolist()
    if op == Op.WAIT:
        return "wait"
    if op == Op.GERMINATE:
        assert blend == LINEAR
        return "plant", slot, blueprint_names()[blueprint]
    return Op(op).name.lower(), slot


def kind_number(blueprint: str) -> int:
    return blueprint_names().index(blueprint)


def portfolio_of(rule: Callable[[float, str], float], count: int = 120) -> list[Episodes]:
    """Problems whose accuracy at first says what a plan gains."""
    found = []
    for number in range(count):
        look = 10.0 + 80.0 * (number % 2)
        start = [State(20 - step, accuracy=look) for step in range(SEEN)]
        for plan in (NONE, "mlp@*", "norm@0"):
            seeds = (Seed(plan.split("@")[0], 0),) if plan != NONE else ()
            rest = [State(10 - step, seeds, accuracy=look) for step in range(3)]
            name, earned = (NONE, 50.0) if plan == NONE else (f"dense {plan}", 50.0 + rule(look, plan))
            found.append(episode(*start, *rest, number=number, by=name, earned=earned))
    return found


def gain_of(look: float, plan: str) -> float:
    return {(10.0, "mlp@*"): 20.0, (10.0, "norm@0"): 5.0, (90.0, "mlp@*"): -8.0, (90.0, "norm@0"): -2.0}[look, plan]


def at_once(
    function: Callable[[Any], Any], jobs: Sequence[Any], workers: int, stop: Callable[[], bool] = lambda: False
) -> Iterator[tuple[Any, Any]]:
    """`in_processes` without processes."""
    for job in jobs:
        if stop():
            return
        yield job, function(job)

"""Static controls: what a network that does not grow makes of the same draws.

- The initial host, trained as long: that is the controller `none`.
- A grown result's final architecture, freshly initialised and trained from scratch, for equal epochs or equal FLOPs.
- Hosts of other widths. They tell how much accuracy a parameter buys without growth: the measure of capacity regret.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from esper.env.rent import RENT_RATE, score
from esper.growth.graft import graft
from esper.growth.seed import Seed
from esper.growth.tensors import count_parameters
from esper.tasks.family import Draw, Family, get_family
from esper.training.evaluation import Job
from esper.training.results import PASSES_OF_AN_UPDATE, EpisodeResult, KeptSeed, Results

STATIC, FROM_SCRATCH = "static ×", ": from scratch"
"""In the names of controls."""
WIDTH_RATIOS = (1.5, 2.5, 4.0, 8.0)
"""Parameters of the wider hosts, as multiples of the draw's own. Growth beyond the last one is judged by the last."""


@dataclass(frozen=True, slots=True)
class Static:
    """A network in place of the draw's host, fixed before training. As it stands here, it is that host."""

    grafts: tuple[KeptSeed, ...] = ()
    """Permanent parts, freshly initialised as a new seed is."""
    ratio: float = 1.0
    """All widths scaled together, to about this many times the host's parameters."""
    epochs: int | None = None
    """None is as long as the draw says."""


Plan = dict[int, Static]
"""By draw."""


class StaticFamily:
    """The draws of another family, with other networks in them."""

    def __init__(self, base: Family | str, plan: Mapping[int, Static]) -> None:
        self.name = "static"
        self.base, self.plan = base, plan

    def draw(self, number: int, *, held_out: bool = False) -> Draw:
        base = get_family(self.base) if isinstance(self.base, str) else self.base
        return altered(base.draw(number, held_out=held_out), self.plan[number])


def altered(draw: Draw, static: Static) -> Draw:
    make_host: Callable[[], nn.Module] = draw.task.make_host
    if static.ratio != 1.0:
        make_host = wider(make_host, static.ratio)
    slots = [path for path in draw.task.slots if not any(path.startswith(f"{o}.") for o in draw.task.slots)]
    task = replace(draw.task, make_host=partial(_with_grafts, make_host, static.grafts), slots=tuple(slots))
    return replace(draw, task=task, horizon=static.epochs or draw.horizon, budget=None, max_seeds=None)


def _with_grafts(make_host: Callable[[], nn.Module], kept: Sequence[KeptSeed]) -> nn.Module:
    """The host first, so that its weights are those of every other run on this draw."""
    host = make_host()
    graft(host, [(seed.path, Seed(seed.blueprint, seed.shape, seed.blend).body, 1.0, {}) for seed in kept])
    return host


def wider(make_host: Callable[[], nn.Module], ratio: float) -> Callable[[], nn.Module]:
    """The host with all its widths scaled by one factor, to the size nearest to `ratio` times its own."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        host = make_host()
    kind, config = type(host), dict(getattr(host, "config", {}))
    if "widths" not in config:
        raise ValueError(f"a {kind.__name__} has no widths that could be scaled")
    widths = [int(width) for width in config["widths"]]
    wanted = ratio * count_parameters(host)
    # One factor reaches a ratio somewhere between itself squared and itself; steps of 2 % are finer than whole widths.
    factors = np.geomspace(1.0, max(2.0, ratio), num=1 + math.ceil(math.log(max(2.0, ratio)) / 0.02))
    choices = sorted({tuple(max(1, round(width * factor)) for width in widths) for factor in factors})
    best = min(choices, key=lambda choice: abs(_size(kind, config, choice) - wanted))
    return partial(kind, **{**config, "widths": list(best)})


def _size(kind: type[nn.Module], config: dict[str, Any], widths: tuple[int, ...]) -> int:
    with torch.device("meta"):
        return count_parameters(kind(**{**config, "widths": list(widths)}))


# -- which controls to run -------------------------------------------------------------------------------------------


def from_scratch(grown: Mapping[int, EpisodeResult], equal: Literal["epochs", "flops"]) -> Plan:
    """Each result's final architecture, for as many epochs as its draw has, or as its training's FLOPs pay for."""
    return {
        number: Static(grafts=result.kept, epochs=None if equal == "epochs" else _affordable(result))
        for number, result in grown.items()
    }


def _affordable(result: EpisodeResult) -> int | None:
    """Epochs of the final network at the cost of the whole growth, to the nearest one."""
    per_epoch = PASSES_OF_AN_UPDATE * result.flops * result.examples // result.epochs
    epochs = max(1, round(result.training_flops / per_epoch))
    return None if epochs == result.horizon else epochs


def static_widths(reference: Mapping[int, EpisodeResult], largest: float) -> dict[str, Plan]:
    """Wider hosts, up to the first ratio that covers `largest`, for the draws whose host has widths."""
    covered = [ratio for ratio in WIDTH_RATIOS if ratio < largest]
    ratios = WIDTH_RATIOS[: len(covered) + 1] if largest > 1.0 else ()
    scalable = [number for number, result in reference.items() if result.host_widths is not None]
    return {f"{STATIC}{ratio:g}": {n: Static(ratio=ratio) for n in scalable} for ratio in ratios}


def control_jobs(
    family: Family | str, plans: Mapping[str, Plan], known: Mapping[tuple[int, Static], EpisodeResult]
) -> list[Job]:
    """What the plans need beyond what is known; a network that two plans share is trained once."""
    wanted: dict[Static, list[int]] = {}
    for plan in plans.values():
        for number, static in plan.items():
            if (number, static) not in known and number not in wanted.setdefault(static, []):
                wanted[static].append(number)
    pairs = sorted((number, i, static) for i, (static, numbers) in enumerate(wanted.items()) for number in numbers)
    return [
        Job(_label(static), StaticFamily(family, {number: static}), "none", (number,)) for number, _, static in pairs
    ]


def _label(static: Static) -> str:
    grafts = "+".join(f"{seed.blueprint}/{seed.blend}@{seed.path}" for seed in static.grafts)
    return f"{grafts or 'host'} ×{static.ratio:g} for {static.epochs or 'all'} epochs"


def gather_controls(
    plans: Mapping[str, Plan],
    found: Results,
    known: Mapping[tuple[int, Static], EpisodeResult],
    reference: Mapping[int, EpisodeResult],
    rent: float = RENT_RATE,
) -> Results:
    """The plans' results, as far as they are there, judged against the draw's own host."""
    gathered: Results = {}
    for name, plan in plans.items():
        gathered[name] = {}
        for number, static in plan.items():
            result = known.get((number, static)) or found.get(_label(static), {}).get(number)
            if result is not None:
                gathered[name][number] = judged_against(result, reference[number], static, rent)
    return gathered


def judged_against(
    result: EpisodeResult, host: EpisodeResult, static: Static, rent: float = RENT_RATE
) -> EpisodeResult:
    """A static network's result with the rent that a grown one of its size would pay."""
    return replace(
        result,
        host_parameters=host.host_parameters,
        host_flops=host.host_flops,
        horizon=host.horizon,
        score=score(result.test_accuracy, result.parameters, host.host_parameters, rent),
        kept=static.grafts,
    )


# -- capacity regret --------------------------------------------------------------------------------------------------


def capacity_regret(result: EpisodeResult, widths: Sequence[EpisodeResult]) -> float | None:
    """Points of test accuracy below the best static width of the same size; None with fewer than two widths.

    The static hosts of one draw, sorted by size, each counted as the best one up to its size, are joined by straight
    lines over the logarithm of the parameters. Below the smallest and above the largest, the line is level.
    """
    if len(widths) < 2:
        return None
    points = sorted((width.parameters, width.test_accuracy) for width in widths)
    sizes = np.log([size for size, _ in points])
    best = np.maximum.accumulate([accuracy for _, accuracy in points])
    return float(np.interp(math.log(result.parameters), sizes, best)) - result.test_accuracy

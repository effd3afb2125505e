"""`disguised`: the problems of `mixed` without the widths that name the need.

In `mixed`, widths go with needs: a series that lacks a norm has a stage of 10 channels, one that lacks a filter a stage
of 8. A controller can learn to know the kinds by such marks, and that knowledge is worth nothing elsewhere. Here all
hosts of a layout have widths from the same ranges, whatever they lack, and some have a stage more before or after; in
most draws a share of the examples is easy, which lifts the accuracy without growth by an amount that says nothing; and
half of the hosts learn at half the speed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from esper.growth.blueprints import Layout
from esper.tasks import mixed, needs
from esper.tasks.mixed import Mixed, Problem
from esper.tasks.needs import Inputs, Labels

NARROW: dict[Layout, tuple[int, int]] = {"conv1d": (6, 10), "conv2d": (6, 10), "dense": (8, 14), "sequence": (7, 11)}
WIDE: dict[Layout, tuple[int, int]] = {"conv1d": (16, 20), "conv2d": (16, 20), "dense": (16, 24), "sequence": (14, 20)}
"""Channels of a stage, the least and the most."""
ALSO_NARROW = 0.2
"""How often a stage is narrow where nothing is meant to be grown."""
HARD_ONLY, EASY = 0.4, (0.15, 0.6)
"""How often no example is easy, and the share of easy ones otherwise."""
MORE_STAGES = ((0, 0), (1, 0), (0, 1))
"""Before and after those of the problem."""
SLOWER = (1.0, 0.5)
"""Factors of the learning rate."""


class Disguised(Mixed):
    """As `mixed`, each problem in a disguise."""

    name = "disguised"
    slots = mixed.SLOTS + 1

    def problem(self, kind: str, rng: np.random.Generator) -> Problem:
        return disguise(super().problem(kind, rng), rng)


def disguise(problem: Problem, rng: np.random.Generator) -> Problem:
    """The same need, at the same place of a host that looks like any other of its layout."""
    before, after = MORE_STAGES[rng.integers(len(MORE_STAGES))]
    stages = len(problem.widths)
    # One stage is narrow in every host, so that one without says nothing either.
    narrow_at = {slot for _, slot in problem.answer} or {int(rng.integers(stages))}
    narrow = [place in narrow_at or rng.random() < ALSO_NARROW for place in range(-before, stages + after)]
    ranges = [(NARROW if small else WIDE)[problem.layout] for small in narrow]
    widths = tuple(int(rng.integers(least, most + 1)) for least, most in ranges)
    easy = 0.0 if rng.random() < HARD_ONLY else float(rng.uniform(*EASY))
    return replace(
        problem,
        answer=tuple((blueprint, before + slot) for blueprint, slot in problem.answer),
        inputs=partial(_with_hints, problem.inputs, easy, 1 if problem.layout.startswith("conv") else -1),
        widths=widths,
        host=_rebuilt(problem.host, widths, before, after),
        learning_rate=problem.learning_rate * SLOWER[rng.integers(len(SLOWER))],
    )


def _with_hints(
    inputs: Callable[[Labels, np.random.Generator], Inputs],
    easy: float,
    axis: int,
    labels: Labels,
    rng: np.random.Generator,
) -> Inputs:
    return needs.with_hints(inputs(labels, rng), labels, rng, share=easy, axis=axis)


PER_STAGE: dict[str, Any] = {"kernels": 1, "pools": 1, "attends": False}
"""Settings of a host that have a value per stage, and what a further stage has; it bends if its neighbour does."""
INPUTS = ("in_channels", "features")


def _rebuilt(
    host: Callable[[], nn.Module], widths: tuple[int, ...], before: int, after: int
) -> Callable[[], nn.Module]:
    """A host with other widths, more stages, and inputs for the hints."""
    if not isinstance(host, partial):
        raise TypeError(f"a host of `mixed` is a class with its settings, not {host!r}")
    settings = dict(host.keywords)
    for name, further in PER_STAGE.items():
        if name in settings:
            settings[name] = [further] * before + settings[name] + [further] * after
    if "bends" in settings:
        settings["bends"] = settings["bends"][:1] * before + settings["bends"] + settings["bends"][-1:] * after
    for name in INPUTS:
        if name in settings:
            settings[name] += needs.HINTS
    return partial(host.func, **{**settings, "widths": list(widths)})

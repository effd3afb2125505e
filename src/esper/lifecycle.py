"""The life of a seed as data: stages, legal transitions, the gates between them, the ramp. Pure Python, no torch.

    DORMANT -> GERMINATED -> TRAINING -> BLENDING -> HOLDING -> FOSSILIZED
                   \\____________\\___________\\__________\\--> PRUNED -> EMBARGOED -> RESETTING -> DORMANT

`esper.slot_columns` applies these tables to many slots at once; `esper.growth` makes the networks follow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class Stage(IntEnum):
    """Where a slot is in the life of its seed."""

    DORMANT = 0
    """Empty, ready for a seed."""
    GERMINATED = 1
    """The seed exists; it starts to learn with the next epoch."""
    TRAINING = 2
    """The seed learns on a shadow pass that the host cannot feel."""
    BLENDING = 3
    """Alpha moves: up while the seed is mixed in, down while it is taken out."""
    HOLDING = 4
    """The seed works at full strength and can still be removed."""
    FOSSILIZED = 5
    """The seed is part of the network for good."""
    PRUNED = 6
    """The seed was removed."""
    EMBARGOED = 7
    """The slot rests, so that growing and pruning cannot cycle quickly."""
    RESETTING = 8
    """The last epoch before the slot is empty again."""


LIVE = frozenset({Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING})
"""A seed that is neither kept nor removed yet."""

IN_FORWARD = frozenset({Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED})
"""The seed takes part in the host's output."""

TRANSITIONS: Mapping[Stage, frozenset[Stage]] = MappingProxyType(
    {
        Stage.DORMANT: frozenset({Stage.GERMINATED}),
        Stage.GERMINATED: frozenset({Stage.TRAINING, Stage.PRUNED}),
        Stage.TRAINING: frozenset({Stage.BLENDING, Stage.PRUNED}),
        Stage.BLENDING: frozenset({Stage.HOLDING, Stage.PRUNED}),
        Stage.HOLDING: frozenset({Stage.FOSSILIZED, Stage.BLENDING, Stage.PRUNED}),  # BLENDING: to ramp out
        Stage.FOSSILIZED: frozenset(),
        Stage.PRUNED: frozenset({Stage.EMBARGOED}),
        Stage.EMBARGOED: frozenset({Stage.RESETTING}),
        Stage.RESETTING: frozenset({Stage.DORMANT}),
    }
)


class IllegalTransitionError(RuntimeError):
    """A stage change that the lifecycle does not allow."""


@dataclass(frozen=True, slots=True)
class Transition:
    """One stage change of one seed, with its reason."""

    epoch: int
    slot: str
    seed: int
    source: Stage
    target: Stage
    reason: str


@dataclass(frozen=True, slots=True)
class Contrast:
    """The network with a seed against the network without it, on the same validation examples."""

    accuracy: float
    """Percentage points gained by having the seed."""
    loss: float
    """Loss saved by having the seed (positive is good)."""
    error: float = 0.0
    """Standard error of `accuracy`, paired per example; infinite if it could not be estimated."""


@dataclass(frozen=True, slots=True)
class Rules:
    """When a seed may move on. The defaults are for some tens of epochs; `docs/lifecycle.md` has the measurements."""

    training_epochs: int = 2
    """Least incubation before blending."""
    gradient_activity: float = 1e-6
    """Least root-mean-square gradient per parameter during incubation: a dead seed never blends."""
    shadow_benefit: float = 0.0
    """Least shadow benefit, in accuracy points, of a seed that may blend."""
    blending_epochs: int = 3
    """Length of the ramp from alpha 0 to 1."""
    contribution: float = 0.0
    """Least measured accuracy points for fossilizing; the seed must contribute more than this."""
    prune_age: int = 3
    """Epochs that a seed has before it may be pruned."""
    ramp_out_epochs: int = 2
    """Length of the ramp back to alpha 0 when a working seed is pruned."""
    embargo_epochs: int = 2
    """Rest of a slot after pruning."""

    def __post_init__(self) -> None:
        for name in ("training_epochs", "blending_epochs", "prune_age", "ramp_out_epochs", "embargo_epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Criterion:
    """One condition of a gate: a column of `esper.slot_columns.SlotColumns` against a limit."""

    name: str
    column: str
    limit: str | float
    """A field of `Rules`, or a number."""
    above: bool = False
    """The value must lie above the limit; else at it is enough."""

    def describe(self, value: float, limit: float) -> str:
        """What was seen, for people; NaN is what was not measured."""
        if math.isnan(value):
            return f"{self.name} not measured (not enough)"
        seen = f"{value:+z.2f} (over {limit:g})" if self.above else f"{value:.3g} (at least {limit:g})"
        enough = value > limit if self.above else value >= limit
        return f"{self.name} {seen}{'' if enough else ' (not enough)'}"


GATES: Mapping[Stage, tuple[Criterion, ...]] = MappingProxyType(
    {
        Stage.BLENDING: (
            Criterion("incubated epochs", "dwell", "training_epochs"),
            Criterion("gradient", "gradient", "gradient_activity"),
            Criterion("shadow benefit", "shadow_points", "shadow_benefit"),
        ),
        Stage.HOLDING: (Criterion("alpha", "alpha", 1.0),),
        Stage.FOSSILIZED: (Criterion("contribution", "contribution_points", "contribution", above=True),),
    }
)
"""What a seed must have shown to enter a stage. What was not measured passes no gate (R138)."""

ENTERED_BY_ITSELF: Mapping[Stage, str] = MappingProxyType(
    {
        Stage.TRAINING: "germinated: starts to learn behind the gate",
        Stage.EMBARGOED: "the slot rests",
        Stage.RESETTING: "the embargo is over",
        Stage.DORMANT: "ready for another seed",
    }
)
"""Reasons of the changes that need neither a decision nor a gate."""

RAMP_STEEPNESS = 12.0
"""Of the sigmoid ramp: alpha would start and end within 1/400 of 0 and 1, and is stretched to reach them."""

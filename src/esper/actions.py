"""What a controller can do, and which parts of a decision each operation uses. Pure Python, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import SupportsIndex

from esper.lifecycle import Transition


class Op(IntEnum):
    """The operation of one decision."""

    WAIT = 0
    GERMINATE = 1
    PRUNE = 2
    FOSSILIZE = 3


BLENDS = ("linear", "sigmoid", "gated")
"""How a seed is mixed in: two shapes of the alpha ramp, and a learned gate per example (with a linear ramp)."""

HEAD_NAMES = ("slot", "blueprint", "blend", "op")
"""The order of the heads of a factored action, everywhere: tensors, logs, checkpoints."""

HEADS_USED: Mapping[Op, frozenset[str]] = MappingProxyType(
    {
        Op.WAIT: frozenset({"op"}),
        Op.GERMINATE: frozenset({"op", "slot", "blueprint", "blend"}),
        Op.PRUNE: frozenset({"op", "slot"}),
        Op.FOSSILIZE: frozenset({"op", "slot"}),
    }
)
"""Causal relevance: a head that its operation does not use has no log-probability, entropy, advantage or KL."""


@dataclass(frozen=True, slots=True)
class Action:
    """One decision. `slot` is an index into the model's slots, which are in the order of the forward pass."""

    op: Op = Op.WAIT
    slot: int | None = None
    blueprint: str | None = None
    blend: str | None = None
    reason: str = field(default="", compare=False)
    probability: float | None = field(default=None, compare=False)
    """What a learned policy gave this decision as a whole; None for rules."""

    def __post_init__(self) -> None:
        if self.op not in HEADS_USED:
            raise ValueError(f"unknown operation {self.op!r}: choose one of {', '.join(f'Op.{op.name}' for op in Op)}")
        for head in ("slot", "blueprint", "blend"):
            given, used = getattr(self, head) is not None, head in HEADS_USED[self.op]
            if given != used:
                raise ValueError(f"{self.op.name} {'needs a' if used else 'takes no'} {head}")
        if self.slot is not None and (not isinstance(self.slot, SupportsIndex) or self.slot < 0):  # numpy's, too
            raise ValueError(f"slots count from 0, not {self.slot!r}")
        if self.blend is not None and self.blend not in BLENDS:
            raise ValueError(f"unknown blend {self.blend!r}: choose one of {', '.join(BLENDS)}")


WAIT = Action()


@dataclass(frozen=True, slots=True)
class Effect:
    """What an action really did. An action without effect says why; it is never silence."""

    action: Action
    changed: bool
    message: str
    transitions: tuple[Transition, ...] = ()
    settings: str = ""
    """Of a germination: whose learning rate and other settings of the optimizer the seed was given."""

"""Suspicions about seeds, from what was measured. They run in every mode, and report each suspicion when it begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from esper.slot_views import Slots

SuspicionKind = Literal["ransomware", "reward_hacking"]
SUSPICION_KINDS: tuple[SuspicionKind, ...] = get_args(SuspicionKind)

RANSOM_CONTRIBUTION = 1.0
"""Least points that the network would lose without the seed."""
RANSOM_FALL = 1.0
"""Points that the network is worse than before the seed; smaller falls are the noise of training."""
SURE_ERRORS = 2.0
"""A contribution must be this many standard errors above 0 before a seed is suspected."""
RATIO_LIMIT = 5.0
"""Claims up to this multiple of the improvement are usual: leave-one-out overstates by nature (measured: up to 4.6)."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A seed that looks better than what it did (R115)."""

    kind: SuspicionKind
    epoch: int
    slot: int
    path: str
    seed: int
    blueprint: str | None
    contribution: float
    """Points that leaving the seed out would cost."""
    improvement: float
    """Points that the network gained since the seed was planted."""

    def __str__(self) -> str:
        what = (
            "the host came to depend on it while getting worse"
            if self.kind == "ransomware"
            else "it claims far more than the network improved"
        )
        return (
            f"{self.kind} at {self.path}: without seed {self.seed} ({self.blueprint}) the network loses "
            f"{self.contribution:.1f} points, but it changed by {self.improvement:+z.1f} since that was planted: {what}"
        )


def suspicions(
    begun: Tensor, contribution: Tensor, improvement: Tensor, epoch: int, slots: Slots, names: Sequence[str]
) -> tuple[Suspicion, ...]:
    """The suspicions about one network that begin, for people: `begun` [S, kinds], the others [S]."""
    found = []
    for slot, kind in begun.nonzero().tolist():
        blueprint = int(slots.columns.blueprint[0, slot])
        seed = slots.lives[slot].seed
        points = float(contribution[slot]), float(improvement[slot])
        found.append(Suspicion(SUSPICION_KINDS[kind], epoch, slot, slots.names[slot], seed, names[blueprint], *points))
    return tuple(found)


def suspicious(contribution: Tensor, improvement: Tensor, ratio: Tensor, accuracy: Tensor, error: Tensor) -> Tensor:
    """[N, S, kinds] bool, in the order of `SUSPICION_KINDS`; all [N, S]. `accuracy`, `error`: of the contrast."""
    sure = accuracy >= SURE_ERRORS * error
    ransom = sure & (contribution >= RANSOM_CONTRIBUTION) & (improvement < -RANSOM_FALL)
    return torch.stack((ransom, sure & (ratio >= RATIO_LIMIT)), -1)

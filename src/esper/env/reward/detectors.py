"""Suspicions about seeds, from what was measured. They run in every mode, and report each suspicion when it begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from esper.env.reward.costs import RATIO_LIMIT
from esper.env.reward.traces import SeedTrace
from esper.env.situation import SlotView

Kind = Literal["ransomware", "reward_hacking"]

RANSOM_CONTRIBUTION = 1.0
"""Least points that the network would lose without the seed."""
RANSOM_FALL = 1.0
"""Points that the network is worse than before the seed; smaller falls are the noise of training."""
SURE_ERRORS = 2.0
"""A contribution must be this many standard errors above 0 to accuse anyone."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A seed that looks better than what it did (R115)."""

    kind: Kind
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
            f"{self.contribution:.1f} points, but it changed by {self.improvement:+.1f} since that was planted: {what}"
        )


def detect(
    epoch: int, slot: SlotView, trace: SeedTrace, contribution: float, improvement: float, ratio: float, *, sure: bool
) -> list[Finding]:
    """What is suspicious now and was not before; the trace remembers."""
    found: set[Kind] = set()
    if sure and contribution >= RANSOM_CONTRIBUTION and improvement < -RANSOM_FALL:
        found.add("ransomware")
    if sure and ratio >= RATIO_LIMIT:
        found.add("reward_hacking")
    new = sorted(found - trace.findings)
    trace.findings = frozenset(found)
    return [
        Finding(kind, epoch, slot.index, slot.path, trace.seed, slot.blueprint, contribution, improvement)
        for kind in new
    ]

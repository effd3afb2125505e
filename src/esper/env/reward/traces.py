"""What must be remembered of each living seed to judge it: who it is, and how good the network was before it."""

from __future__ import annotations

from dataclasses import dataclass, field

from esper.engine.eager import EpochRecord
from esper.env.situation import Situation
from esper.lifecycle import Stage


@dataclass(slots=True)
class SeedTrace:
    """One seed from germination to removal."""

    seed: int
    """Its number in the model, as transitions and events name it."""
    level_at_birth: float
    """How good the network was when the seed was planted, in points."""
    epochs_held: int = 0
    """Epochs in HOLDING before it was fossilized."""
    ratio_charged: float = 0.0
    """Paid so far for claims; a seed pays for the worst one only."""
    indecision_charged: float = 0.0
    """Paid so far for being held."""
    findings: frozenset[str] = field(default_factory=frozenset)
    """Suspicions that hold now, so that each is reported once."""


def follow(traces: dict[int, SeedTrace], before: Situation, record: EpochRecord, level_before: float) -> None:
    """Bring the traces (by slot) up to date with the epoch's transitions."""
    if not record.transitions:  # most epochs
        return
    index_of = {slot.path: slot.index for slot in before.slots}
    for transition in record.transitions:
        index = index_of[transition.slot]
        if transition.target is Stage.GERMINATED:
            traces[index] = SeedTrace(transition.seed, level_before)
        elif transition.target is Stage.FOSSILIZED and index in traces:
            traces[index].epochs_held = before.slots[index].dwell
        elif transition.target is Stage.PRUNED:
            traces.pop(index, None)

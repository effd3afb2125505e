"""The objective, stated once: the score of the network that an episode ends with. `esper compare` uses it too.

That network is the host and every seed that acts in it, finished or not: what a person would take home. A seed that
was never decided on is no way around FOSSILIZE: at the end it forfeits what it claims, see `costs.unfinished_cost`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from esper.engine.eager import EpochRecord
from esper.engine.measure import Evaluation
from esper.env.rent import RENT_RATE
from esper.env.situation import Situation

SCORE_LIMIT = 100.0
"""Rewards and potentials clamp a score to ± this: a network a hundred times its host is no better than chance."""


@dataclass(frozen=True, slots=True)
class Result:
    """The network that an episode ends with."""

    accuracy: float
    """In percent."""
    parameters: int
    """Of the host and the seeds that act."""


def rent(parameters: int, host_parameters: int, rate: float = RENT_RATE) -> float:
    """Points that the parameters beyond the host's must earn."""
    return rate * (parameters / host_parameters - 1.0)


def score(accuracy: float, parameters: int, host_parameters: int, rent_rate: float = RENT_RATE) -> float:
    """Accuracy minus rent, in percentage points: what every controller is judged by."""
    return accuracy - rent(parameters, host_parameters, rent_rate)


def bounded(points: float) -> float:
    return max(-SCORE_LIMIT, min(SCORE_LIMIT, points))


def final_result(before: Situation, record: EpochRecord, after: Situation, kept: Evaluation | None = None) -> Result:
    """The network that the last epoch measured, or the one that was measured after it (`kept`, which `after` shows)."""
    if kept is not None:
        return Result(_finite(kept.accuracy), after.parameters)
    if record.verdict is not None:  # the epoch was undone: what was measured is the restored network
        return Result(_finite(record.measured.accuracy), after.parameters)
    # Incubating seeds do not act: they neither help nor pay. Sizes are from before the epoch, because a seed that was
    # ramped out at its end is gone by now, but it acted.
    acting = (slot.parameters for slot in before.slots if record.alphas[slot.index] > 0.0)
    return Result(_finite(record.measured.accuracy), before.host_parameters + sum(acting))


def _finite(accuracy: float) -> float:
    """A network without a finite accuracy knows nothing."""
    return accuracy if math.isfinite(accuracy) else 0.0

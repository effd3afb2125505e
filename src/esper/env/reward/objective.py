"""The objective, stated once: the score of what is kept. Reward and comparison both use `score`.

Kept are the host and its fossilized seeds. A seed that is unfinished when the episode ends is not part of the
result: it pays no rent, and the accuracy that counts is that of the network without it.
"""

from __future__ import annotations

import math

from esper.engine.eager import EpochRecord
from esper.engine.measure import Evaluation
from esper.env.reward.config import RENT_RATE
from esper.env.situation import Situation
from esper.lifecycle import Stage

SCORE_LIMIT = 100.0
"""Rewards and potentials clamp a score to ± this: a network a hundred times its host is no better than chance."""


class MissingMeasurementError(ValueError):
    """The kept network was not measured, and its accuracy does not follow from what was."""


def rent(parameters: int, host_parameters: int, rate: float = RENT_RATE) -> float:
    """Points that the parameters beyond the host's must earn."""
    return rate * (parameters / host_parameters - 1.0)


def score(accuracy: float, parameters: int, host_parameters: int, rent_rate: float = RENT_RATE) -> float:
    """Accuracy minus rent, in percentage points: what every controller is judged by."""
    return accuracy - rent(parameters, host_parameters, rent_rate)


def bounded(points: float) -> float:
    return max(-SCORE_LIMIT, min(SCORE_LIMIT, points))


def kept_parameters(situation: Situation) -> int:
    """Parameters of the host and its fossilized seeds."""
    seeds = (slot.parameters for slot in situation.slots if slot.stage is Stage.FOSSILIZED)
    return situation.host_parameters + sum(seeds)


def slots_not_kept(record: EpochRecord, after: Situation) -> tuple[int, ...]:
    """Slots whose seed acted in the measured network but is not kept: to be off when the result is measured."""
    return tuple(
        slot.index for slot in after.slots if record.alphas[slot.index] > 0.0 and slot.stage is not Stage.FOSSILIZED
    )


def kept_accuracy(record: EpochRecord, after: Situation, kept: Evaluation | None, *, broken: bool) -> float:
    """Accuracy of the kept network: `kept` if given, else from the last epoch's measurements where they suffice."""
    if kept is not None:
        return _finite(kept.accuracy)
    accuracy = _finite(record.measured.accuracy)
    loose = slots_not_kept(record, after)
    if not loose or broken:  # a broken network is worth what it shows, not what it might be without some seed
        return accuracy
    contribution = record.measured.contributions.get(loose[0])
    if len(loose) == 1 and contribution is not None:
        return accuracy - _finite(contribution.accuracy)
    paths = ", ".join(after.slots[index].path for index in loose)
    raise MissingMeasurementError(
        f"the episode ends with unfinished seeds at {paths}: measure the network without them and pass it as `kept`"
    )


def _finite(points: float) -> float:
    """A network without a finite accuracy knows nothing."""
    return points if math.isfinite(points) else 0.0

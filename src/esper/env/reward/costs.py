"""Declared costs: amounts of at least 0 that are subtracted. They are small beside the objective, and none can pay.

Costs of a seed's state are charged by high-water mark: only what exceeds the most charged so far. So waiting in a bad
state is not charged again and again, and what one seed can cost in its whole life has a bound.
"""

from __future__ import annotations

from esper.actions import Effect, Op
from esper.engine.eager import EpochRecord
from esper.env.reward.config import RewardConfig
from esper.env.reward.level import Meter
from esper.env.reward.objective import rent
from esper.env.reward.traces import SeedTrace
from esper.env.situation import Situation, SlotView
from esper.lifecycle import Stage

PRUNE_CAP = 3.0
"""Most that a pruning costs, in multiples of `prune_cost` (R123)."""
PRUNE_POINTS = 5.0
"""Points of worth beyond its rent that add one `prune_cost`."""
INDECISION_GRACE = 3
"""Epochs of holding that are free: long enough to be watched, see `legitimacy_epochs`."""
INDECISION_CAP = 6.0
"""Most that a held seed pays in all, in multiples of `indecision_cost` (R117)."""
LEAST_CLAIM = 1.0
"""Contributions below this many points are no claim."""
RATIO_LIMIT = 5.0
"""Claims up to this multiple of the improvement are usual: leave-one-out overstates by nature (measured: up to 4.6)."""
LEAST_DIVISOR = 1e-8
"""Whatever the threshold: far below one example of any validation set, far above rounding (R104)."""


def claim(config: RewardConfig, contribution: float | None) -> float:
    """The part of a contribution that counts. Limited: when a host has adapted, leaving its seed out ruins it, and
    the difference (80 points where growing gained 6) says little about what the seed gave."""
    return min(config.claim_limit, max(0.0, contribution or 0.0))


def action_cost(config: RewardConfig, effect: Effect) -> float:
    """What acting costs. An action without effect costs nothing: nothing happened."""
    return config.action_costs[effect.action.op] if effect.changed else 0.0


def prune_cost(config: RewardConfig, meter: Meter, before: Situation, effect: Effect) -> float:
    """For removing a seed that was worth more than its rent, as far as was known then."""
    action = effect.action
    if not effect.changed or action.op is not Op.PRUNE or action.slot is None:
        return 0.0
    slot = before.slots[action.slot]
    seed_rent = rent(before.host_parameters + slot.parameters, before.host_parameters, config.rent_rate)
    worth = meter.worth(slot) - seed_rent
    return config.prune_cost * min(PRUNE_CAP, 1.0 + worth / PRUNE_POINTS) if worth > 0.0 else 0.0


def indecision_cost(config: RewardConfig, slot: SlotView, trace: SeedTrace) -> float:
    """For one more epoch of holding: linear after the grace period, then capped."""
    if slot.stage is not Stage.HOLDING:
        return 0.0
    due = config.indecision_cost * min(INDECISION_CAP, max(0.0, slot.dwell - INDECISION_GRACE))
    charge = max(0.0, due - trace.indecision_charged)
    trace.indecision_charged += charge
    return charge


def unfinished_cost(config: RewardConfig, record: EpochRecord, after: Situation) -> float:
    """At the end, what each seed forfeits that acted without being kept: who plants must also decide."""
    accuracy = Meter("contribution")  # the end is judged by the score, whatever the shaping looked at
    loose = (s for s in after.slots if record.alphas[s.index] > 0.0 and s.stage is not Stage.FOSSILIZED)
    return sum(claim(config, accuracy.value(slot.contribution)) for slot in loose)


def claim_ratio(config: RewardConfig, contribution: float, improvement: float) -> float:
    """How many times the network's improvement since germination the seed claims; 0 when it claims nothing."""
    if contribution < LEAST_CLAIM:
        return 0.0
    return contribution / max(improvement, config.ratio_threshold, LEAST_DIVISOR)


def ratio_cost(config: RewardConfig, ratio: float, trace: SeedTrace) -> float:
    """For claiming more than `RATIO_LIMIT` times the improvement: in full at twice the limit."""
    due = config.ratio_cost * min(1.0, max(0.0, ratio / RATIO_LIMIT - 1.0))
    charge = max(0.0, due - trace.ratio_charged)
    trace.ratio_charged += charge
    return charge

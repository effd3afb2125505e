"""Potentials: what a situation promises before the end. Paid as γΦ(s′) − Φ(s), so no path can earn from them.

Whatever stands here moves credit in time and never changes what is optimal; it may therefore be generous. Φ of the
end is 0. Everything is bounded, and everything is a function of the situation and of the seeds' pasts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from esper.env.reward.config import RewardConfig
from esper.env.reward.costs import claim
from esper.env.reward.level import Meter
from esper.env.reward.objective import bounded, rent
from esper.env.reward.traces import SeedTrace
from esper.env.situation import Situation, SlotView
from esper.lifecycle import LIVE, Stage

PROGRESS: Mapping[Stage, float] = {
    Stage.GERMINATED: 0.1,
    Stage.TRAINING: 0.2,
    Stage.BLENDING: 0.4,
    Stage.HOLDING: 0.6,
    Stage.FOSSILIZED: 1.0,
}
"""Share of a seed's way that it has behind it on entering a stage."""
_FOLLOWING = dict(pairwise(PROGRESS.values()))
"""The share after each."""
DWELL_SHARE = 0.5
"""Part of the way to the next stage that is counted for staying in this one."""
DWELL_EPOCHS = 4
"""Epochs after which staying counts no more."""


@dataclass(frozen=True, slots=True)
class Potential:
    """Φ of one situation, in its three parts."""

    score: float = 0.0
    progress: float = 0.0
    credit: float = 0.0

    @property
    def total(self) -> float:
        return self.score + self.progress + self.credit


def potential(
    config: RewardConfig, meter: Meter, situation: Situation, level: float, traces: Mapping[int, SeedTrace]
) -> Potential:
    """Φ in the configured mode; `level` is how good the network is, in points."""
    if config.mode in ("sparse", "minimal"):
        return Potential()
    # Seeds pay rent from germination on: the decision that makes the network larger feels it at once.
    score = bounded(level - rent(situation.parameters, situation.host_parameters, config.rent_rate))
    if config.mode == "simplified":
        return Potential(score)
    # An empty or resting slot promises nothing.
    seeds = [(slot, traces.get(slot.index)) for slot in situation.slots if slot.stage in PROGRESS]
    ways = (progress(slot, legitimacy(config, trace)) for slot, trace in seeds)
    credits = (credit(config, meter, slot, discount(config, trace, level)) for slot, trace in seeds)
    return Potential(score, progress=config.progress_weight * sum(ways, 0.0), credit=sum(credits, 0.0))


def progress(slot: SlotView, legitimacy: float = 1.0) -> float:
    """In [0, 1]: how far the seed is. A stage's real dwell counts, in the past situation as in the present (R114)."""
    if slot.retiring or slot.stage not in PROGRESS:
        return 0.0
    start = PROGRESS[slot.stage]
    if slot.stage is Stage.FOSSILIZED:
        held = PROGRESS[Stage.HOLDING]
        return held + (start - held) * legitimacy
    return start + DWELL_SHARE * (_FOLLOWING[start] - start) * min(1.0, slot.dwell / DWELL_EPOCHS)


def legitimacy(config: RewardConfig, trace: SeedTrace | None) -> float:
    """In [0, 1]: was the seed watched at full strength before it was kept? Haste is believed less."""
    if config.legitimacy_epochs == 0 or trace is None:
        return 1.0
    return min(1.0, trace.epochs_held / config.legitimacy_epochs)


def discount(config: RewardConfig, trace: SeedTrace | None, level: float) -> float:
    """In (0, 1]: how far to believe a contribution. One says that all is well only if the network is no worse."""
    if trace is None:
        return 1.0
    return math.exp(config.attribution_steepness * min(0.0, level - trace.level_at_birth))


def credit(config: RewardConfig, meter: Meter, slot: SlotView, discount: float = 1.0) -> float:
    """What an unfinished seed changes about the score: a promise added, or a claim that is not safe yet.

    The level contains what a seed gives that acts. Were the episode over, its claim would be forfeited; once it is
    fossilized, it is safe. So the share of the claim that is not believed is taken out, and fossilizing puts it back.
    """
    if slot.stage not in LIVE:
        return 0.0
    contribution = meter.value(slot.contribution)
    if contribution is not None:
        believed = 0.0 if slot.retiring else config.contribution_weight * discount
        return -(1.0 - believed) * claim(config, contribution)
    # No discount here: nothing depends on an incubating seed, so its shadow cannot be a ransom.
    return 0.0 if slot.retiring else config.proxy_weight * claim(config, meter.value(slot.shadow_benefit))

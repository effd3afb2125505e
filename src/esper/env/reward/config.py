"""The settings of the reward. All amounts are validation percentage points, the unit of the objective."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from esper.actions import Op

RewardMode = Literal["shaped", "simplified", "sparse", "minimal"]
Signal = Literal["contribution", "loss"]

DISCOUNT = 0.995
"""γ, of the agent and of the shaping alike."""
PROXY_CONFIDENCE = 0.3
"""What a shadow benefit is worth beside a measured contribution: a promise, nothing depends on it yet (R122)."""

SHAPING_TERMS = ("score_shaping", "progress_shaping", "credit_shaping")
COST_TERMS = ("unfinished", "governor", "action_cost", "prune_cost", "indecision_cost", "ratio_cost")
"""Never above 0."""
TERMS = ("objective", *SHAPING_TERMS, *COST_TERMS)
"""Every term, in every mode; one that the mode does not use is 0."""
_ALWAYS = ("objective", "unfinished", "governor")
TERMS_OF_MODE: Mapping[RewardMode, tuple[str, ...]] = {
    "shaped": TERMS,
    "simplified": (*_ALWAYS, "score_shaping", "action_cost"),
    "minimal": (*_ALWAYS, "action_cost"),
    "sparse": _ALWAYS,
}

STD_SHARE = 0.1
"""Default std of a loss as a share of the way from baseline to target."""
LOSS_CLIP_STDS = 5.0
"""Losses count no further than this many stds above the baseline: one explosion must not swamp an episode."""


@dataclass(frozen=True, slots=True)
class LossScale:
    """Turns a task's losses into points: 0 at the baseline, 100 at the target (R124)."""

    baseline: float
    """Loss of a network that has learnt nothing."""
    target: float = 0.0
    """Loss of a very good network; what is better still counts the same."""
    std: float | None = None
    """Usual size of a change; bounds what one bad epoch can do. None is a tenth of the way from baseline to target."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.baseline - self.target):
            raise ValueError(f"the baseline and target losses must be finite, not {self.baseline} and {self.target}")
        if not self.baseline > self.target:
            raise ValueError(f"the baseline loss {self.baseline} must be above the target loss {self.target}")
        if self.std is not None and not self.std > 0.0:
            raise ValueError(f"the std of losses must be positive, not {self.std}")

    @classmethod
    def for_classes(cls, classes: int) -> LossScale:
        """For cross-entropy: guessing costs ln(classes), certainty nothing."""
        if classes < 2:
            raise ValueError(f"a classification needs at least 2 classes, not {classes}")
        return cls(math.log(classes))

    @property
    def worst(self) -> float:
        std = STD_SHARE * (self.baseline - self.target) if self.std is None else self.std
        return self.baseline + LOSS_CLIP_STDS * std


@dataclass(frozen=True, slots=True)
class RewardConfig:
    """What is paid for. A cost of 0 turns that cost off; no setting can turn a cost into an income."""

    mode: RewardMode = "shaped"
    """When rewards are paid: shaped and simplified after every epoch, sparse at the end; minimal at the end, less what
    each action costs."""
    signal: Signal = "contribution"
    """Base of the shaping: validation accuracy and measured contributions, or validation loss."""
    loss_scale: LossScale | None = None
    """For the loss signal: what losses are worth; None follows from the number of classes."""
    discount: float = DISCOUNT
    """γ of the shaping: the agent's own, which `check_discount` compares with it."""
    scale: float = 1.0
    """Multiplies every term, after clamping."""
    progress_weight: float = 1.0
    """Shaping: points that a seed's way through its life is worth at most."""
    contribution_weight: float = 0.5
    """Shaping: share of a measured contribution that is believed before the seed is kept."""
    claim_limit: float = 5.0
    """Most that a contribution counts for: what an unfinished seed forfeits at the end, and its shaping before."""
    attribution_steepness: float = 0.5
    """Shaping: disbelief per point that the network has lost since the seed was planted; 0 believes all."""
    legitimacy_epochs: int = 3
    """Shaping: epochs of holding that make a fossilized seed count in full; 0 counts every one in full."""
    action_cost: float = 0.05
    """Of every action that had an effect; WAIT is free."""
    prune_cost: float = 0.1
    """Of removing a seed that was worth its rent; up to three times this for one that was worth a lot."""
    indecision_cost: float = 0.05
    """Per epoch in which a seed is held without being kept or removed, after a grace period, up to a cap."""
    ratio_cost: float = 0.3
    """Most that a seed pays in its life for claiming far more than the network improved."""
    ratio_threshold: float = 1.0
    """Improvements below this count as this when a claim is compared with them."""
    governor_penalty: float = 10.0
    """What the environment charges when the governor ends an episode."""

    def __post_init__(self) -> None:
        for name, options in (("mode", get_args(RewardMode)), ("signal", get_args(Signal))):
            if getattr(self, name) not in options:
                raise ValueError(f"reward {name} must be one of {', '.join(options)}, not {getattr(self, name)!r}")
        for name in ("discount", "contribution_weight"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"reward {name} must lie in [0, 1], not {getattr(self, name)}")
        if not (math.isfinite(self.scale) and self.scale > 0.0):
            raise ValueError(f"reward scale must be positive, not {self.scale}")
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"reward {name} must be a number of at least 0, not {value}")

    @property
    def proxy_weight(self) -> float:
        """Share of a shadow benefit that is believed; derived, so that the two cannot drift apart (R122)."""
        return self.contribution_weight * PROXY_CONFIDENCE

    @property
    def action_costs(self) -> Mapping[Op, float]:
        """The one source of what interventions cost (R125)."""
        return {op: 0.0 if op is Op.WAIT else self.action_cost for op in Op}


_NOT_NEGATIVE = (
    "progress_weight",
    "claim_limit",
    "attribution_steepness",
    "legitimacy_epochs",
    "action_cost",
    "prune_cost",
    "indecision_cost",
    "ratio_cost",
    "ratio_threshold",
    "governor_penalty",
)


def check_discount(config: RewardConfig, agent_discount: float) -> None:
    """Shaping leaves the best policy alone only under the agent's own discount; call this before training (R103)."""
    if config.discount != agent_discount:
        raise ValueError(
            f"the reward shapes with discount {config.discount} but the agent discounts with {agent_discount}: "
            "set both to the same value, or the shaping changes what is optimal"
        )

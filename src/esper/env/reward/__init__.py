"""What a decision was worth: `config` has the settings, `reward` the terms; docs/rewards.md has the reasons."""

from esper.env.reward.config import DISCOUNT, TERMS, LossScale, RewardConfig, check_discount
from esper.env.reward.reward import Reward, RewardColumns
from esper.env.reward.suspicion import Suspicion

__all__ = [
    "DISCOUNT",
    "TERMS",
    "LossScale",
    "Reward",
    "RewardColumns",
    "RewardConfig",
    "Suspicion",
    "check_discount",
]

"""What a decision was worth. `RewardModel` is the whole interface; `docs/rewards.md` has the reasons and the table."""

from esper.env.reward.config import DISCOUNT, RewardConfig, check_discount
from esper.env.reward.detectors import Finding
from esper.env.reward.level import LossScale
from esper.env.reward.model import TERMS, RewardModel, RewardStep
from esper.env.reward.objective import Result, final_result, rent, score

__all__ = [
    "DISCOUNT",
    "TERMS",
    "Finding",
    "LossScale",
    "Result",
    "RewardConfig",
    "RewardModel",
    "RewardStep",
    "check_discount",
    "final_result",
    "rent",
    "score",
]

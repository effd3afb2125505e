"""What a decision was worth. `RewardModel` is the whole interface; `docs/rewards.md` has the reasons and the table."""

from esper.env.reward.config import RewardConfig, check_gamma
from esper.env.reward.detectors import Finding
from esper.env.reward.level import LossScale
from esper.env.reward.model import TERMS, RewardModel, RewardStep
from esper.env.reward.objective import Result, final_result, rent, score

__all__ = [
    "TERMS",
    "Finding",
    "LossScale",
    "Result",
    "RewardConfig",
    "RewardModel",
    "RewardStep",
    "check_gamma",
    "final_result",
    "rent",
    "score",
]

"""What a decision was worth. `RewardModel` is the whole interface; `docs/rewards.md` has the reasons and the table."""

from esper.env.reward.config import RewardConfig, check_gamma
from esper.env.reward.detectors import Finding
from esper.env.reward.level import LossScale
from esper.env.reward.model import TERMS, RewardModel, RewardStep
from esper.env.reward.objective import MissingMeasurementError, kept_parameters, rent, score, slots_not_kept

__all__ = [
    "TERMS",
    "Finding",
    "LossScale",
    "MissingMeasurementError",
    "RewardConfig",
    "RewardModel",
    "RewardStep",
    "check_gamma",
    "kept_parameters",
    "rent",
    "score",
    "slots_not_kept",
]

"""What a training run is: its problem, its agent, its length. Frozen, complete, and written into the run's folder."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from esper.agent.config import PPOConfig
from esper.config import (
    ABOVE_0,
    AT_LEAST_0,
    COUNTS,
    SHARE,
    EngineOption,
    check_number,
    check_ranges,
    read_small,
    settings_from,
)
from esper.engine.precision import Precision
from esper.env.rent import RENT_RATE
from esper.env.rents import Rent, check_rents
from esper.env.reward import DISCOUNT, RewardConfig, check_discount
from esper.tasks.draws import TRAINING_DRAWS_PER_SEED
from esper.tasks.family import BoundedFamily, family_of
from esper.telemetry.alarms import EXPLODING, VANISHING

COMMAND_ONLY = ("compare_episodes", "tensorboard", "wandb")
"""Settings that only `esper train` has a use for; other ways to train refuse them."""


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """A training run of a controller."""

    task: str = "mixed"
    """Family of problems to train on."""
    data_dir: str | None = None
    """Where the data files are, for tasks that read some."""
    text_file: str | None = None
    """The text to learn, for the task `text`."""
    envs: int = 16
    """Networks that grow side by side; one rollout is one episode of each."""
    updates: int = 60
    """Rollouts, and PPO updates, in all."""
    seed: int = 0
    """Random seed of the agent's first weights, its choices and the training problems."""
    draws: int | None = None
    """Number of training problems, which are used over and over; None: every problem is new."""
    init: str | None = None
    """Checkpoint that the policy starts from; None is a fresh one. A run's folder keeps a copy."""
    floor: float = 0.0
    """Least probability of a legal choice, in every head: what is never tried is never learnt about."""
    rent: Rent = RENT_RATE
    """Points that one more host-size of parameters must earn; "varied": from 0 to 20, another one for each draw."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """The table `[reward]`."""
    ppo: PPOConfig = field(default_factory=PPOConfig)
    """The table `[ppo]`."""
    engine: EngineOption = "auto"
    """What trains the growing networks: auto is the fastest engine that can train the whole family."""
    precision: Precision = Precision.FP32
    """Number format of the growing networks on a GPU."""
    compiled: bool = False
    """Whether the growing networks are compiled; for the agent's own network it is `compile` in `ppo`."""
    vanishing_gradient: float = VANISHING
    """Alarm where a gradient norm of the agent, in clip norms, is below this."""
    exploding_gradient: float = EXPLODING
    """Alarm where the gradient norm of the agent, in clip norms, is above this."""
    evaluate_every: int = 10
    """Updates between evaluations of the frozen policy on held-out problems; 0 is never."""
    evaluation_episodes: int = 16
    """Held-out problems per evaluation: always the same ones."""
    keep: int = 3
    """Checkpoints that are kept, besides the best one."""
    compare_episodes: int = 16
    """Held-out problems for the comparison at the end; 0 leaves it out."""
    tensorboard: bool = False
    """Whether TensorBoard files are written into the run's folder."""
    wandb: str | None = None
    """Project of Weights & Biases that gets the metrics, too."""

    def __post_init__(self) -> None:
        check_ranges(self, {**COUNTS, "floor": SHARE})
        check_rents(self.rent)
        check_number("vanishing_gradient", self.vanishing_gradient, AT_LEAST_0)
        check_number("exploding_gradient", self.exploding_gradient, ABOVE_0)
        if self.exploding_gradient <= self.vanishing_gradient:
            raise ValueError(
                f"exploding_gradient must be above vanishing_gradient, and {self.exploding_gradient:g} is not above "
                f"{self.vanishing_gradient:g}"
            )
        if self.draws is not None and self.draws < self.envs // self.ppo.siblings:
            needed = self.envs // self.ppo.siblings
            raise ValueError(f"a rollout needs at least as many problems as it plays ({needed}); draws is {self.draws}")
        if self.envs % self.ppo.siblings:
            raise ValueError(f"{self.envs} networks cannot be grouped into siblings of {self.ppo.siblings}")
        if self.reward.discount == DISCOUNT:  # not set: the reward follows the agent
            object.__setattr__(self, "reward", replace(self.reward, discount=self.ppo.discount))
        check_discount(self.reward, self.ppo.discount)

    @property
    def gradient_limits(self) -> tuple[float, float]:
        """In clip norms."""
        return self.vanishing_gradient, self.exploding_gradient

    def draw_ids(self, update: int) -> list[int]:
        """The draws of a rollout, each as often as it has siblings; `update` counts from 1."""
        siblings, pool = self.ppo.siblings, self.draws or TRAINING_DRAWS_PER_SEED
        first = (update - 1) * (self.envs // siblings)
        return [self.seed * TRAINING_DRAWS_PER_SEED + (first + i // siblings) % pool for i in range(self.envs)]

    def family(self) -> BoundedFamily:
        return family_of(self.task, data_dir=self.data_dir, text_file=self.text_file)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: object) -> TrainConfig:
        """Of what `to_json` gave; older runs lack some settings, which then have their defaults."""
        for name in ("reward", "ppo"):
            if isinstance(data, dict) and name not in data:
                raise ValueError(f"it has no setting {name!r}")
        return settings_from(_with_rent(data), cls, "its settings")


def _with_rent(data: object) -> object:
    """Of a run from when the rent was a setting of the reward: as one of the run."""
    if not (isinstance(data, dict) and isinstance(reward := data.get("reward"), dict) and "rent_rate" in reward):
        return data
    others = {name: value for name, value in reward.items() if name != "rent_rate"}
    return {"rent": reward["rent_rate"], **data, "reward": others}


PRESETS: dict[str, TrainConfig] = {
    "small": TrainConfig(
        task="6*grammar+mixed",  # half and half: a round of mixed is 24 draws, one of grammar 4
        envs=1024,
        updates=36,
        rent="varied",
        evaluate_every=0,
        compare_episodes=96,
        ppo=PPOConfig(
            siblings=4,
            minibatches=8,
            learning_rate=6e-4,
            learning_rate_end=1e-4,
            entropy_coefficient_end=0.003,
            anneal_updates=36,
        ),
    ),
    "demo": TrainConfig(
        task="mixed/vector", envs=16, updates=15, draws=48, evaluate_every=0, ppo=PPOConfig(learning_rate=1e-3)
    ),
    "mixed": TrainConfig(),
    "mnist1d": TrainConfig(task="mnist1d"),
    "cifar10": TrainConfig(task="cifar10", envs=32, updates=200),
    "text": TrainConfig(task="text", envs=8),
}


def read_train_config(path: Path) -> TrainConfig:
    """The configuration in a run's folder."""
    try:
        return TrainConfig.from_json(json.loads(read_small(path)))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not the configuration of a training run: {error}") from error

"""The start of the critic's last layer: zero against orthogonal weights of gain 1, at several scales of the reward.

    python benchmarks/value_start.py [--tasks cue ...] [--seeds 20 21 ...] [--scales 1 0.1 0.01]

Tasks, lengths and settings are those of tests/agent/test_learning.py; each row trains one agent per seed and start and
prints the deterministic evaluation of each, in unscaled rewards. The two agents of a seed differ in that layer only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "agent"))
from toy_environments import (
    CartPoleWithoutVelocities,
    CueMemory,
    MaskedMultiDiscrete,
    OpConditional,
    ToyEnvironment,
    evaluate,
    make_agent,
    train,
)

from esper.agent.config import PPOConfig

STARTS = {"gain 1": 1.0, "zero": 0.0}


@dataclass(frozen=True)
class Trial:
    """One task, as tests/agent/test_learning.py trains it."""

    make: Callable[..., ToyEnvironment]
    environments: int
    length: int
    """Steps after which an episode of the training is over."""
    rollout: int
    """Steps of a rollout, at least."""
    steps: int
    episodes: int
    config: PPOConfig
    network: dict[str, Any] = field(default_factory=dict)


PER_STEP = PPOConfig(discount=0.0, learning_rate=2e-3, target_kl=0.05)
LONG = {"discount": 0.99, "gae_decay": 0.95}
ANNEALED = {"learning_rate": 1.5e-3, "learning_rate_end": 1e-4, "anneal_updates": 50, "epochs": 6}
TRIALS = {
    "cue": Trial(CueMemory, 32, 12, 384, 30_000, 200, PPOConfig(**LONG, learning_rate=1e-3)),
    "op-conditional": Trial(OpConditional, 80, 5, 400, 16_000, 200, PER_STEP, {"floor": 0.02}),
    "multi-discrete": Trial(
        MaskedMultiDiscrete, 16, 16, 256, 20_480, 20, PPOConfig(discount=0.0, learning_rate=3e-3, target_kl=0.05)
    ),
    "cartpole": Trial(CartPoleWithoutVelocities, 8, 128, 1024, 51_200, 20, PPOConfig(**LONG, **ANNEALED)),
}


def score(trial: Trial, seed: int, scale: float, gain: float) -> float:
    env = trial.make(trial.environments, seed, length=trial.length)
    env.scale = scale
    agent = make_agent(env, trial.config, seed, **trial.network)
    torch.nn.init.orthogonal_(agent.network.value_output.weight, gain)
    train(env, agent, trial.steps, trial.rollout)
    test = trial.make(20, 1000 + seed)
    if isinstance(test, OpConditional):
        test.luck = 0.0
    return evaluate(test, agent, trial.episodes)


def main(
    tasks: tuple[str, ...] = tuple(TRIALS),
    seeds: tuple[int, ...] = tuple(range(20, 26)),
    scales: tuple[float, ...] = (1.0, 0.1, 0.01),
) -> None:
    torch.set_num_threads(1)
    print(f"seeds {' '.join(map(str, seeds))}")
    for task, scale, (name, gain) in product(tasks, scales, STARTS.items()):
        scores = [score(TRIALS[task], seed, scale, gain) for seed in seeds]
        each = " ".join(f"{one:.2f}" for one in scores)
        print(f"{task:16} rewards × {scale:<6g} {name:8} mean {fmean(scores):7.2f}   {each}", flush=True)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)

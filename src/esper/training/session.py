"""What every process that trains does around `Trainer.run`, with or without the command line."""

from __future__ import annotations

import os

import torch

from esper import __version__
from esper.config import EngineName
from esper.policy.controller import RandomLegal
from esper.rollout.play import ControllerActor
from esper.telemetry.store import RunStore
from esper.training.engines import make_env, one_round, stack_size
from esper.training.loop import Trainer
from esper.training.speed import stopwatch
from esper.training.train_config import TrainConfig

LONG = 5_000
"""Episodes of a run from which on it is worth some seconds to say beforehand how long it will take."""
WARM_UP, TIMED = 3, 3
"""Steps before time is taken (seeds begin to grow, kernels are loaded), and while."""
MOST_TIMED = 1024
"""Networks that are timed on a GPU, at most; one more there costs less, so the estimate is rather too long."""


def begin_session(trainer: Trainer, store: RunStore) -> None:
    """After `trainer.resume`: the store is as it was at that update, and says who writes from now on."""
    store.rewind(trainer.update)  # what a killed run recorded after its last checkpoint will be done again
    store.describe({"config": trainer.config.to_json(), "engine": str(trainer.engine)})
    store.begin_session(trainer.update, __version__)


def duration_of(config: TrainConfig, engine: EngineName, device: torch.device | str, workers: int) -> str:
    """About how long the rollouts of a long run take on this device, from some steps of it; empty for short runs."""
    if config.updates * config.envs < LONG:
        return ""
    steps, speed = _steps(config), _steps_per_second(config, engine, device)
    if torch.device(device).type == "cpu":
        speed *= min(workers, os.cpu_count() or 1)
    hours = steps / speed / 3600
    words = f"{hours:.1f} hours" if hours >= 1.0 else f"{60 * hours:.0f} minutes"
    return (
        f"{steps / 1e6:.1f} million env-steps at about {speed:,.0f} a second: about {words} on this device ({device})"
    )


def _steps(config: TrainConfig) -> float:
    """Of all rollouts, by the horizons of one round of the family."""
    family = config.family()
    some = one_round(family, config.draw_ids(1)[0])
    return config.updates * config.envs * sum(family.draw(number).horizon for number in some) / len(some)


def _steps_per_second(config: TrainConfig, engine: EngineName, device: torch.device | str) -> float:
    """Of one process, with seeds that random decisions plant."""
    family = config.family()
    some = list(one_round(family, config.draw_ids(1)[0]))
    if engine == "stacked":
        size = min(config.envs, stack_size(config.envs, device), MOST_TIMED)
        some = (some * -(-size // len(some)))[:size]
    env = make_env(engine, family, len(some), device, precision=config.precision, compiled=config.compiled)
    actor = ControllerActor(RandomLegal())
    observation, masks = env.reset(some)
    actor.reset(some)
    for steps in (WARM_UP, TIMED):
        with stopwatch(torch.device(device)) as seconds:
            for _ in range(steps):
                decided = actor.act(env.situations, observation, masks)
                found = env.step(decided.action if decided.records is None else decided.records)
                observation, masks = found.observation, found.masks
    return TIMED * len(some) / seconds[0]

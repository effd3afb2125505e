"""The environments of a training run: whole episodes, in this process or in worker processes, with the same numbers.

On a CPU an episode is played by one process from its first step to its last, with a copy of the policy, and the next
idle worker takes the next episode: nobody waits for the slowest network of a step. An episode depends on its draw, the
policy and its own dice, so where it is played changes nothing. On a GPU all networks step side by side, as one batch of
this process: processes take turns on a GPU, and when last tried, four were slower than one (docs/performance.md).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.agent.actor import Actor
from esper.agent.buffer import map_masks, map_observation
from esper.agent.policies import unpack_policy
from esper.engine.precision import Precision
from esper.env.growth_env import GrowthEnv, StepInfo
from esper.env.reward import RewardConfig
from esper.env.spaces import ActionMasks, Observation
from esper.offline.episodes import Episodes, from_tensors, join, tensors_of
from esper.offline.recorder import Tape
from esper.tasks.family import BoundedFamily
from esper.training.workers import Worker, share_out, start_workers

NAME = "policy"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Play:
    """Episodes to play side by side."""

    policy: bytes
    """Of `pack_policy`."""
    numbers: tuple[int, ...]
    held_out: bool
    dice: int | None
    """Decides what is drawn from the policy; None takes the most probable action."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One episode of each of N draws, in the order of the draws."""

    episodes: Episodes
    """All rows have as many steps as the longest episode of the family; beyond a row's end it idles."""
    infos: list[tuple[StepInfo | None, ...]]
    """[T][N]: None where a row's episode is over."""

    def steps(self, device: torch.device | str = "cpu") -> Iterator[PlayedStep]:
        e, valid = self.episodes, self.episodes.valid
        for t, infos in enumerate(self.infos):
            yield PlayedStep(
                map_observation(e.observation, lambda x, t=t: x[:, t].to(device)),  # type: ignore[misc]
                map_masks(e.masks, lambda x, t=t: x[:, t].to(device)),  # type: ignore[misc]
                e.taken[:, t].to(device),
                e.reward[:, t].to(device),
                e.terminated[:, t].to(device),
                valid[:, t].to(device),
                infos,
            )


@dataclass(frozen=True, slots=True)
class PlayedStep:
    """One step of all rows: what the policy saw, what it did, and what came of it. Tensors start with [N]."""

    observation: Observation
    masks: ActionMasks
    action: Tensor
    reward: Tensor
    terminated: Tensor
    acted: Tensor
    """False once a row's episode is over."""
    infos: tuple[StepInfo | None, ...]


class Player:
    """What a worker runs: it keeps its environment and the last policy it was sent."""

    def __init__(self, family: BoundedFamily, size: int, device: str, **settings: Any) -> None:
        """`settings` are the environment's."""
        self._family, self._size, self._device, self._settings = family, size, device, settings
        self._env: GrowthEnv | None = None
        self._policy: tuple[bytes, Any] = (b"", None)

    def __call__(self, job: Play) -> tuple[dict[str, NDArray[Any]], list[tuple[StepInfo | None, ...]]]:
        """Arrays, because tensors that travel between processes each hold a file open."""
        if self._env is None:  # made here, not in the parent: an environment does not travel
            self._env = GrowthEnv(self._family, self._size, device=self._device, **self._settings)
        if self._policy[0] != job.policy:
            self._policy = (job.policy, unpack_policy(job.policy, self._device))
        network, normaliser = self._policy[1]
        actor = Actor(network, len(job.numbers), normaliser, job.dice is None, job.dice or 0)
        tape, infos = Tape(), []
        observation, masks = self._env.reset(job.numbers, held_out=job.held_out)
        for _ in range(self._family.horizon):
            action = actor.act(observation, masks)
            step = self._env.step(action)
            tape.note(observation, masks, action, action, step.reward, step.terminated, step.acted)
            infos.append(step.infos)
            observation, masks = step.observation, step.masks
        episodes = tape.episodes(torch.tensor(job.numbers), NAME)
        return {name: tensor.cpu().numpy() for name, tensor in tensors_of(episodes).items()}, infos


class Fleet:
    """All environments of a run."""

    def __init__(
        self,
        family: BoundedFamily,
        size: int,
        *,
        reward: RewardConfig,
        slots: int,
        device: str = "cpu",
        workers: int = 1,
        precision: Precision = Precision.FP32,
        compiled: bool = False,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, not {workers}")
        on_cpu = torch.device(device).type == "cpu"
        self._together = 1 if on_cpu else size
        """Episodes that are played side by side."""
        if workers > 1 and not on_cpu:
            log.warning("on a GPU one process plays all environments: of %d workers, none is started", workers)
        player = Player(
            family, self._together, device, reward=reward, slots=slots, precision=precision, compiled=compiled
        )
        self._local = player if workers == 1 or not on_cpu else None
        self._workers: list[Worker] = [] if self._local else start_workers([player] * min(workers, size))

    def play(
        self, policy: bytes, numbers: Sequence[int], *, held_out: bool = False, dice: Sequence[int] | None = None
    ) -> Rollout:
        """`dice` has a number for each draw; without it the policy takes its most probable actions."""
        jobs = list(self._jobs(policy, numbers, held_out, dice))
        local = self._local
        played = share_out(self._workers, jobs) if local is None else [local(job) for job in jobs]
        episodes = join(
            [from_tensors({n: torch.from_numpy(a) for n, a in arrays.items()}, [NAME]) for arrays, _ in played]
        )
        if not bool(episodes.terminated.any(1).all()):
            raise ValueError(
                f"an episode lasts longer than the {episodes.reward.shape[1]} epochs that its family named"
            )
        rows = [sum(parts, ()) for parts in zip(*(infos for _, infos in played), strict=True)]
        kept = len(numbers)  # the last batch on a GPU may have been filled up
        return Rollout(episodes.select(torch.arange(kept)), [row[:kept] for row in rows])

    def _jobs(
        self, policy: bytes, numbers: Sequence[int], held_out: bool, dice: Sequence[int] | None
    ) -> Iterator[Play]:
        for first in range(0, len(numbers), self._together):
            part = tuple(numbers[first : first + self._together])
            part += part[-1:] * (self._together - len(part))
            yield Play(policy, part, held_out, None if dice is None else dice[first])

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


def dice_for(seed: int, update: int, count: int) -> list[int]:
    """A number for each episode of a rollout; no two rollouts of a run share any, but by chance."""
    return [
        int(number)
        for number in np.random.SeedSequence([seed, update]).generate_state(count, np.uint64) >> np.uint64(1)
    ]

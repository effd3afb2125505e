"""The environments of a training run: whole episodes, in this process or in worker processes, with the same numbers.

On a CPU an episode is played by one process from its first step to its last, with a copy of the policy, and the next
idle worker takes the next episode: nobody waits for the slowest network of a step. An episode depends on its draw, the
policy and its own seed, so where it is played changes nothing. On a GPU all networks step side by side, as one batch of
this process: processes take turns on a GPU, and when last tried, four were slower than one (docs/performance.md).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from esper.agent.actor import PolicyActor
from esper.agent.policies import unpack_policy
from esper.engine.precision import Precision
from esper.env.growth_env import GrowthEnv
from esper.env.reward import RewardConfig
from esper.rollout.episodes import Episodes, join
from esper.rollout.play import play
from esper.tasks.family import BoundedFamily
from esper.training.workers import Worker, share_out, start_workers

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PolicyJob:
    """Episodes to play side by side with a policy."""

    policy: bytes
    """Of `pack_policy`."""
    draws: tuple[int, ...]
    held_out: bool
    seed: int | None
    """Of what is drawn from the policy; None takes the most probable action."""


class PolicyPlayer:
    """What a worker runs: it keeps its environment and the last policy it was sent."""

    def __init__(self, family: BoundedFamily, size: int, device: str, **settings: Any) -> None:
        """`settings` are the environment's."""
        self._family, self._size, self._device, self._settings = family, size, device, settings
        self._env: GrowthEnv | None = None
        self._policy: tuple[bytes, Any] = (b"", None)

    def __call__(self, job: PolicyJob) -> Episodes:
        if self._env is None:  # made here, not in the parent: an environment does not travel
            self._env = GrowthEnv(self._family, self._size, device=self._device, **self._settings)
        if self._policy[0] != job.policy:
            self._policy = (job.policy, unpack_policy(job.policy, self._device))
        network, normaliser = self._policy[1]
        actor = PolicyActor(network, normaliser, job.seed)
        return play(self._env, actor, job.draws, held_out=job.held_out, longest=self._family.horizon)


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
        player = PolicyPlayer(
            family, self._together, device, reward=reward, slots=slots, precision=precision, compiled=compiled
        )
        self._local = player if workers == 1 or not on_cpu else None
        self._workers: list[Worker] = [] if self._local else start_workers([player] * min(workers, size))

    def play(
        self, policy: bytes, draws: Sequence[int], *, held_out: bool = False, seeds: Sequence[int] | None = None
    ) -> Episodes:
        """One episode of each draw, in their order, with a seed for each; without seeds the most probable actions."""
        jobs = list(self._jobs(policy, draws, held_out, seeds))
        local = self._local
        episodes = join(share_out(self._workers, jobs) if local is None else [local(job) for job in jobs])
        kept = len(draws)  # the last batch on a GPU may have been filled up
        return episodes if len(episodes) == kept else episodes.select(torch.arange(kept))

    def _jobs(
        self, policy: bytes, draws: Sequence[int], held_out: bool, seeds: Sequence[int] | None
    ) -> Iterator[PolicyJob]:
        for first in range(0, len(draws), self._together):
            part = tuple(draws[first : first + self._together])
            part += part[-1:] * (self._together - len(part))
            yield PolicyJob(policy, part, held_out, None if seeds is None else seeds[first])

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


def seeds_for(seed: int, update: int, count: int) -> list[int]:
    """A seed for each episode of a rollout; no two rollouts of a run share any, but by chance."""
    return [
        int(number)
        for number in np.random.SeedSequence([seed, update]).generate_state(count, np.uint64) >> np.uint64(1)
    ]

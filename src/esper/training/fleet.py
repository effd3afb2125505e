"""The environments of a training run: whole episodes, in this process or in worker processes, with the same numbers.

On a CPU an episode is played by one process from its first step to its last, with a copy of the policy, and the next
idle worker takes the next episode: nobody waits for the slowest network of a step. An episode depends on its draw, the
policy and its own seed, so where it is played changes nothing. On a GPU all networks step side by side, as one batch of
this process: processes take turns on a GPU, and when last tried, four were slower than one (docs/performance.md).

With the stacked engine a job is a stack, of a size that follows from how many episodes there are (`stack_size`); where
this process plays all of them, others may draw the next problems ahead.
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
from esper.config import EngineName
from esper.engine.precision import Precision
from esper.env.growth_env import GrowthEnv
from esper.env.rent import RENT_RATE
from esper.env.rents import Rent
from esper.env.reward import RewardConfig
from esper.env.situation import Situation
from esper.env.spaces import ActionMasks, Observation
from esper.env.stacked_env import StackedEnv
from esper.env.world import World
from esper.rollout.episodes import Episodes, join
from esper.rollout.play import Decisions, play
from esper.tasks.family import BoundedFamily
from esper.tasks.stacking import BatchedFamily
from esper.telemetry.profiler import PhaseTimers
from esper.training.drawing import DrawAhead
from esper.training.engines import make_env, parts_of, per_network, stack_size
from esper.training.pools import Executor, InProcess
from esper.training.workers import Processes

log = logging.getLogger(__name__)
CLUSTER_STACK = 1024
"""Networks of a stack on each GPU of a cluster: one machine stacks all, but then there is one job for all GPUs."""


@dataclass(frozen=True, slots=True)
class PolicyJob:
    """Episodes to play side by side with a policy."""

    policy: bytes
    """Of `pack_policy`."""
    draws: tuple[int, ...]
    held_out: bool
    seed: int | None
    """Of what is drawn from the policy; None takes the most probable action."""


@dataclass(frozen=True, slots=True)
class Played:
    """What a job gave."""

    episodes: Episodes
    seconds: dict[str, float]
    """By phase: reset, engine, reward, observe, policy. On a GPU, of handing out work and waiting for it."""


class PolicyPlayer:
    """What a worker runs: it keeps its environment and the last policy it was sent."""

    def __init__(self, family: BoundedFamily, engine: EngineName, device: str, **settings: Any) -> None:
        """`settings` are the environment's."""
        self._family, self._engine, self._device, self._settings = family, engine, device, settings
        self._env: GrowthEnv | StackedEnv | None = None
        self._policy: tuple[bytes, Any] = (b"", None)

    def __call__(self, job: PolicyJob) -> Played:
        size = len(job.draws)
        if self._env is None or self._env.size != size:  # made here, not in the parent: an environment does not travel
            self._env = None
            self._env = make_env(self._engine, self._family, size, self._device, **self._settings)
        if self._policy[0] != job.policy:
            self._policy = (job.policy, unpack_policy(job.policy, self._device))
        network, normaliser = self._policy[1]
        actor = _TimedActor(network, normaliser, job.seed)
        self._env.seconds.clear()
        episodes = play(self._env, actor, job.draws, held_out=job.held_out, longest=self._family.horizon)
        return Played(episodes, self._env.seconds | actor.timers.seconds)


class _TimedActor(PolicyActor):
    """A policy whose decisions are timed."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.timers = PhaseTimers()

    def act(self, situations: Sequence[Situation] | World, observation: Observation, masks: ActionMasks) -> Decisions:
        with self.timers("policy"):
            return super().act(situations, observation, masks)


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
        drawers: int = 0,
        engine: EngineName | None = None,
        precision: Precision = Precision.FP32,
        compiled: bool = False,
        rent: Rent = RENT_RATE,
        executor: Executor | None = None,
    ) -> None:
        """`engine`: None is the per-network one of the device. `drawers` are processes that draw problems ahead, where
        this process plays stacks itself. `executor` plays in place of `workers` processes of this machine; `device` is
        that of whoever plays."""
        here = Processes(workers)
        engine = engine or per_network(device)
        on_cpu = torch.device(device).type == "cpu"
        self._stacked = engine == "stacked"
        self._together = stack_size(size, device) if self._stacked else 1 if on_cpu else size
        """Episodes that are played side by side."""
        if executor is not None and self._stacked and not on_cpu:
            self._together = min(self._together, CLUSTER_STACK)
        if workers > 1 and not on_cpu and executor is None:
            log.warning("on a GPU one process plays all environments: of %d workers, none is started", workers)
        settings: dict[str, Any] = {"reward": reward, "slots": slots, "precision": precision}
        settings |= {"compiled": compiled, "rent": rent}
        workers = min(workers, -(-size // self._together))  # no more than there are jobs
        local = executor is None and (workers == 1 or not on_cpu)
        draws_ahead = local and drawers > 0 and self._stacked and not isinstance(family, BatchedFamily)
        self._ahead = DrawAhead(family, drawers) if draws_ahead else None
        if self._ahead is not None:
            settings["source"] = self._ahead.problems
        player = PolicyPlayer(family, engine, device, **settings)
        self._pool = (InProcess() if local else executor or here).pool(player, workers)
        self._timers = PhaseTimers()

    def prepare(self, draws: Sequence[int]) -> None:
        """Begin to draw what will be played next, where that is done ahead."""
        if self._ahead is not None:
            for part in parts_of(draws, self._together):
                self._ahead.prepare(part)

    def play(
        self, policy: bytes, draws: Sequence[int], *, held_out: bool = False, seeds: Sequence[int] | None = None
    ) -> Episodes:
        """One episode of each draw, in their order, with a seed for each; without seeds the most probable actions."""
        jobs = list(self._jobs(policy, draws, held_out, seeds))
        played = self._pool.map(jobs)
        for one in played:
            for phase, seconds in one.seconds.items():
                self._timers.seconds[phase] = self._timers.seconds.get(phase, 0.0) + seconds
        episodes = join([one.episodes for one in played])
        kept = len(draws)  # the last batch on a GPU may have been filled up
        return episodes if len(episodes) == kept else episodes.select(torch.arange(kept))

    def _jobs(
        self, policy: bytes, draws: Sequence[int], held_out: bool, seeds: Sequence[int] | None
    ) -> Iterator[PolicyJob]:
        for i, part in enumerate(parts_of(draws, self._together)):
            filled = part if self._stacked else part + part[-1:] * (self._together - len(part))
            yield PolicyJob(policy, filled, held_out, None if seeds is None else seeds[i * self._together])

    def seconds(self) -> dict[str, float]:
        """By phase since the last call, summed over processes, under their logged names."""
        return self._timers.drain()

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
        self._pool.close()


def seeds_for(seed: int, update: int, count: int) -> list[int]:
    """A seed for each episode of a rollout; no two rollouts of a run share any, but by chance."""
    return [
        int(number)
        for number in np.random.SeedSequence([seed, update]).generate_state(count, np.uint64) >> np.uint64(1)
    ]

"""The environments of a training run: whole episodes, in this process or in worker processes, with the same numbers.

On a CPU an episode is played by one process from its first step to its last, with a copy of the policy, and the next
idle worker takes the next episode: no worker waits for the slowest network of a step. An episode depends on its draw,
the policy and its own seed, so where it is played changes nothing. With the per-network engine on a GPU all networks
step side by side, as one batch of this process: processes take turns there, and four were slower than one
(docs/performance.md).

With the stacked engine a job is a stack. On a CPU its size follows from how many episodes there are (`stack_size`). On
a GPU a job is what can be stacked (`parts_by_sort`), and several processes play such jobs on one GPU: most of a step is
Python and launches, and with NVIDIA's MPS their small kernels run side by side (docs/stacked.md).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from esper.agent.actor import PolicyActor
from esper.agent.policies import unpack_policy
from esper.agent.removals import without_costly_removals
from esper.config import EngineName
from esper.engine.gc_control import collect_garbage, deferred_gc
from esper.env.growth_env import GrowthEnv
from esper.env.situation import Situation, world_of
from esper.env.spaces import ActionMasks, Observation
from esper.env.stacked_env import StackedEnv
from esper.env.world import World
from esper.errors import first_line
from esper.rollout.episodes import Episodes, join
from esper.rollout.play import Decisions, play
from esper.tasks.family import BoundedFamily
from esper.telemetry.profiler import PhaseTimers
from esper.training.engines import make_env, parts_by_sort, parts_of, per_network, stack_size
from esper.training.pools import Executor, InProcess
from esper.training.workers import Processes

log = logging.getLogger(__name__)
SHARES_OF_GPU = 2.0
"""Even shares of a GPU's memory that one process may use. Stacks differ in size: of 16 processes the largest came to
its even share (8.7 GiB) while all together used half of the GPU."""


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

    def __init__(
        self, family: BoundedFamily, engine: EngineName, device: str, *, sharing: int = 0, **settings: Any
    ) -> None:
        """`sharing`: so many processes use the device, this one among them, and episodes are sent to another; 0 is the
        only one, which keeps them. `settings` are the environment's."""
        self._family, self._engine, self._device, self._settings = family, engine, device, settings
        self._sharing = sharing
        self._env: GrowthEnv | StackedEnv | None = None
        self._policy: tuple[bytes, Any] = (b"", None)

    def __call__(self, job: PolicyJob) -> Played:
        """A job that runs out of a GPU's memory is played once more from its start, after all memory was given back:
        what earlier graphs leave is in pieces, and a process that ended at its limit had half of it unused."""
        try:
            return self._play(job)
        except torch.cuda.OutOfMemoryError as error:
            log.warning("out of memory, so %d episodes are played again: %s", len(job.draws), first_line(error))
        self._give_back_memory()
        return self._play(job)

    def _play(self, job: PolicyJob) -> Played:
        size = len(job.draws)
        if self._sharing > 0 and torch.device(self._device).type == "cuda":
            # MPS has few connections, and a process takes eight by default; read when CUDA starts.
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
            self._give_back_memory()  # what this process only keeps for later, another may need now
            torch.cuda.set_per_process_memory_fraction(min(1.0, SHARES_OF_GPU / self._sharing))
        if self._env is None or self._env.size != size:  # made here, not in the parent: an environment does not travel
            self._env = None
            self._env = make_env(self._engine, self._family, size, self._device, **self._settings)
        if self._policy[0] != job.policy:
            self._policy = (job.policy, unpack_policy(job.policy, self._device))
        network, normaliser = self._policy[1]
        actor = _TimedActor(network, normaliser, job.seed)
        self._env.seconds.clear()
        with deferred_gc(torch.device(self._device)):
            episodes = play(self._env, actor, job.draws, held_out=job.held_out, longest=self._family.horizon)
        return Played(episodes.to("cpu") if self._sharing else episodes, self._env.seconds | actor.timers.seconds)

    def _give_back_memory(self) -> None:
        self._env = None
        collect_garbage()
        torch.cuda.empty_cache()


class _TimedActor(PolicyActor):
    """A policy whose decisions are timed. Where it draws nothing it is frozen, and decides as `LearnedController` does:
    what an evaluation scores is what a comparison plays."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.timers = PhaseTimers()

    def act(self, situations: Sequence[Situation] | World, observation: Observation, masks: ActionMasks) -> Decisions:
        with self.timers("policy"):
            if self.seed is None:
                world = situations if isinstance(situations, World) else world_of(situations)[0]
                masks = without_costly_removals(masks, world)
            return super().act(situations, observation, masks)


class Fleet:
    """All environments of a run."""

    def __init__(
        self,
        family: BoundedFamily,
        size: int,
        *,
        device: str = "cpu",
        workers: int = 1,
        engine: EngineName | None = None,
        executor: Executor | None = None,
        **settings: Any,
    ) -> None:
        """`engine`: None is the per-network one of the device. `executor` plays in place of `workers` processes of this
        machine; `device` is that of whoever plays. `settings` are the environments'."""
        engine = engine or per_network(device)
        on_cpu = torch.device(device).type == "cpu"
        self._family, self._stacked, self._on_cpu = family, engine == "stacked", on_cpu
        self._together = stack_size(size, device) if self._stacked else 1 if on_cpu else size
        """Episodes that are played side by side; stacks on a GPU are divided by sort instead."""
        if workers > 1 and not (on_cpu or self._stacked) and executor is None:
            log.warning("on a GPU one process plays all environments: of %d workers, none is started", workers)
        if on_cpu or not self._stacked:
            workers = min(workers, -(-size // self._together))  # no more than there are jobs
        local = executor is None and (workers == 1 or not (on_cpu or self._stacked))
        sharing = 0 if local else workers + 1 if executor is None else 1  # an actor of a cluster has its own GPU
        player = PolicyPlayer(family, engine, device, sharing=sharing, **settings)
        self._pool = InProcess(player) if local else (executor or Processes(workers)).pool(player, workers)
        self._timers = PhaseTimers()
        self._took: dict[str, float] = {}
        """Seconds of each job of the last rollout, by name."""

    def play(
        self, policy: bytes, draws: Sequence[int], *, held_out: bool = False, seeds: Sequence[int] | None = None
    ) -> Episodes:
        """One episode of each draw, in their order, with a seed for each; without seeds the most probable actions."""
        parts = self._parts(draws, held_out)
        chosen = [None if seeds is None else seeds[part[0]] for part in parts.values()]
        jobs = [
            PolicyJob(policy, self._filled([draws[place] for place in part]), held_out, seed)
            for part, seed in zip(parts.values(), chosen, strict=True)
        ]
        played = self._pool.map(jobs)
        for name, one in zip(parts, played, strict=True):
            self._took[name] = sum(one.seconds.values())
            for phase, seconds in one.seconds.items():
                self._timers.seconds[phase] = self._timers.seconds.get(phase, 0.0) + seconds
        order = torch.tensor([place for part in parts.values() for place in part])
        episodes = join([one.episodes for one in played])
        return episodes if torch.equal(order, torch.arange(len(episodes))) else episodes.select(order.argsort())

    def _parts(self, draws: Sequence[int], held_out: bool) -> dict[str, tuple[int, ...]]:
        """The places of the draws of each job, by name. What took longest in the last rollout is begun first."""
        if self._on_cpu or not self._stacked:
            return {str(i): part for i, part in enumerate(parts_of(range(len(draws)), self._together))}
        parts = parts_by_sort(self._family, draws, held_out=held_out)
        return dict(sorted(parts.items(), key=lambda part: -self._took.get(part[0], len(part[1]))))

    def _filled(self, draws: list[int]) -> tuple[int, ...]:
        """A batch of per-network engines on a GPU has one size: its last draw is played more than once."""
        more = 0 if self._stacked else self._together - len(draws)
        return (*draws, *draws[-1:] * more)

    def seconds(self) -> dict[str, float]:
        """By phase since the last call, summed over processes, under their logged names."""
        return self._timers.drain()

    def close(self) -> None:
        self._pool.close()


def seeds_for(seed: int, update: int, count: int) -> list[int]:
    """A seed for each episode of a rollout; no two rollouts of a run share any, but by chance."""
    return [
        int(number)
        for number in np.random.SeedSequence([seed, update]).generate_state(count, np.uint64) >> np.uint64(1)
    ]

"""Frozen controllers on numbered draws of a family: what each of them makes of the same problems.

Every controller gets the same draws: the same data, host, first weights and minibatches. A result depends on its draw
and its controller alone, not on the process; per-network engines make it independent of the batch it ran in, too, and
a stack is always made of the same draws (`batch_size`). The test set is looked at once, at the end.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from esper.config import EngineName
from esper.env.growth_env import GrowthEnv
from esper.env.rent import RENT_RATE
from esper.env.stacked_env import StackedEnv
from esper.policy.controller import Controller
from esper.rollout.episodes import Episodes
from esper.rollout.play import ControllerActor, never, play
from esper.tasks.family import Family, get_family
from esper.training.catalogue import make_controller
from esper.training.engines import make_env, parts_of, per_network, stack_size
from esper.training.pools import Executor, run_each
from esper.training.results import EpisodeResult, Results, results_of_learners, results_of_stacks
from esper.training.workers import Processes

EAGER_BATCH = 4
"""Networks that train side by side in one process. Small, so that progress is seen often and workers end together."""
STACKED_BATCH = 1024
"""The same as a stack on a GPU, at most."""


@dataclass(frozen=True, slots=True)
class PackedController:
    """A controller as bytes, for jobs that are done where its file is not; a cluster sends them to each node once."""

    pickled: bytes

    @classmethod
    def of(cls, controller: Controller) -> PackedController:
        return cls(pickle.dumps(controller))

    def open(self) -> Controller:
        controller: Controller = pickle.loads(self.pickled)
        return controller


@dataclass(frozen=True, slots=True)
class Job:
    """Some draws under one controller, trained side by side. Names stand for built-in families and controllers."""

    label: str
    family: Family | str
    controller: Controller | PackedController | str
    draws: tuple[int, ...]
    held_out: bool = True
    noise: float = 0.0
    """Probability that a decision is replaced by a random legal one."""
    engine: EngineName | None = None
    """None is the per-network one of the device."""
    rent: float = RENT_RATE

    def play(
        self, device: torch.device | str = "cpu", stop: Callable[[], bool] = never
    ) -> tuple[Episodes, GrowthEnv | StackedEnv]:
        """The episodes, and the environment as they left it. They depend on the job alone, not on where it runs."""
        family = get_family(self.family) if isinstance(self.family, str) else self.family
        env = make_env(self.engine or per_network(device), family, len(self.draws), device, rent=self.rent)
        actor = ControllerActor(self._make_controller(), self.label, self.noise)
        with one_thread():
            return play(env, actor, self.draws, held_out=self.held_out, stop=stop), env

    def _make_controller(self) -> Controller:
        if isinstance(self.controller, PackedController):
            return self.controller.open()
        return make_controller(self.controller) if isinstance(self.controller, str) else self.controller


def record_job(job: Job, device: torch.device | str = "cpu") -> Episodes:
    """The episodes alone, for a recording: the networks are not judged."""
    return replace(job.play(device)[0], final=None, reports=(), facts=None).to("cpu")


def jobs_for(
    family: Family | str,
    controllers: Mapping[str, Controller | PackedController | str],
    draws: Sequence[int],
    *,
    held_out: bool = True,
    noise: float = 0.0,
    batch: int = EAGER_BATCH,
    engine: EngineName | None = None,
    rent: float = RENT_RATE,
) -> list[Job]:
    """All controllers on the first draws, then on the next ones: a run that is cut short leaves complete pairs."""
    groups = parts_of(draws, batch)
    return [
        Job(label, family, who, group, held_out, noise, engine, rent)
        for group in groups
        for label, who in controllers.items()
    ]


def batch_size(engine: EngineName | None, networks: int, device: torch.device | str) -> int:
    """Networks of one job, by the engine and how many draws there are, and nothing else."""
    return min(STACKED_BATCH, stack_size(networks, device)) if engine == "stacked" else EAGER_BATCH


def run_jobs(
    jobs: Sequence[Job],
    *,
    workers: int = 1,
    executor: Executor | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[Job, list[EpisodeResult]], None] | None = None,
    stop: Callable[[], bool] = never,
) -> Results:
    """Run the jobs in so many processes, or wherever `executor` says; `device` is the one there. What was complete when
    `stop` said so is returned."""
    where = executor or Processes(workers)
    found: Results = {job.label: {} for job in jobs}
    work = partial(run_job, device=str(device))
    if isinstance(where, Processes) and where.workers == 1:  # a job in this process can be stopped in its middle
        work = partial(work, stop=stop)
    for job, results in run_each(work, jobs, where, stop):
        found[job.label].update({result.number: result for result in results})
        if progress is not None:
            progress(job, results)
    return found


def run_job(job: Job, device: torch.device | str = "cpu", stop: Callable[[], bool] = never) -> list[EpisodeResult]:
    """Train the job's networks to their ends and judge them."""
    started = time.perf_counter()
    episodes, env = job.play(device, stop)
    with one_thread():
        if isinstance(env, StackedEnv):
            results = results_of_stacks(episodes, env.engine, job.rent)
        else:
            results = results_of_learners(episodes, env, job.rent)
    seconds = (time.perf_counter() - started) / len(results)
    return [replace(result, seconds=seconds) for result in results]


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums do not depend on how many threads share them when there is one; and small networks are fastest so."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

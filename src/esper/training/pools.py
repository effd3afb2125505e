"""Where jobs are done: in this process, in processes of this machine, or on a cluster. One interface for all three.

A job is a fixed chunk of draw ids with everything else that its result depends on. So its result is the same wherever
it is done, in whatever company and however often; that is what lets a cluster lose nodes without losing numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from esper.rollout.play import StoppedError, never

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


class Pool(ABC):
    """Copies of one function, each of which keeps its state from job to job."""

    @abstractmethod
    def as_they_finish(self, jobs: Sequence[Any], stop: Callable[[], bool] = never) -> Iterator[tuple[int, Any]]:
        """The index of each job with its result. What a job raised is raised here. Once `stop` says so, running jobs
        are dropped."""

    def map(self, jobs: Sequence[Any]) -> list[Any]:
        """The results of all jobs, in the order of the jobs."""
        results = dict(self.as_they_finish(jobs))
        return [results[index] for index in range(len(jobs))]

    @abstractmethod
    def close(self) -> None:
        """End what was started for this pool. It may be closed twice."""


class Executor(Protocol):
    """What makes pools."""

    def pool(self, function: Callable[[Any], Any], jobs: int) -> Pool:
        """For a function that can be pickled; `jobs` is how many there will be at a time."""
        ...


class InProcess(Pool):
    """One job after the other, in this process."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def as_they_finish(self, jobs: Sequence[Any], stop: Callable[[], bool] = never) -> Iterator[tuple[int, Any]]:
        for index, job in enumerate(jobs):
            if stop():
                return
            try:
                result = self._function(job)
            except StoppedError:  # a function that asks `stop` itself, in the middle of a job
                return
            yield index, result

    def close(self) -> None:
        """Nothing was started."""


def run_each(
    function: Callable[[_Job], _Result],
    jobs: Sequence[_Job],
    executor: Executor,
    stop: Callable[[], bool] = never,
) -> Iterator[tuple[_Job, _Result]]:
    """Each job with its result, in a pool of their own."""
    pool = executor.pool(function, len(jobs))
    try:
        for index, result in pool.as_they_finish(jobs, stop):
            yield jobs[index], result
    finally:
        pool.close()

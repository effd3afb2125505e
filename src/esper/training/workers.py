"""Jobs in several processes: each job goes to the next idle worker, results come back in the order they finish.

Workers are fresh interpreters (spawn), with one torch thread each. They ignore Ctrl-C, which is the parent's to handle,
and they end with the parent, however that ends: their pipe breaks.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

import torch

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")

POLL_SECONDS = 0.2
"""How often the parent looks whether it is to stop."""


class WorkerError(RuntimeError):
    """A worker process ended without an answer."""


class Worker:
    """A process that answers jobs with a function of its own, which keeps its state from job to job."""

    def __init__(self, process: SpawnProcess, pipe: Connection) -> None:
        self.process = process
        self.pipe = pipe

    def send(self, job: Any) -> None:
        try:
            self.pipe.send(job)
        except OSError:  # its pipe is broken, or closed
            raise self._gone() from None

    def receive(self) -> Any:
        """Wait for the answer; an error that the job raised is raised here."""
        try:
            answer = self.pipe.recv()
        except (EOFError, ConnectionError):
            raise self._gone() from None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _gone(self) -> WorkerError:
        self.process.join(timeout=5)
        return WorkerError(
            f"a worker process ended with exit code {self.process.exitcode}; it may have run out of memory: "
            "use fewer workers"
        )

    def close(self) -> None:
        self.pipe.close()
        self.process.terminate()
        self.process.join()


def in_processes(
    function: Callable[[_Job], _Result],
    jobs: Sequence[_Job],
    workers: int,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[_Job, _Result]]:
    """Each job with its result. `function` and the jobs are pickled. Once `stop` says so, running jobs are dropped."""
    crew = start_workers([function] * min(workers, len(jobs)))
    try:
        for index, result in as_they_finish(crew, jobs, stop):
            yield jobs[index], result
    finally:
        for worker in crew:
            worker.close()


def share_out(crew: Sequence[Worker], jobs: Sequence[Any]) -> list[Any]:
    """The results of all jobs, in the order of the jobs. After an error the crew is gone: what it still works on would
    be taken for the answers to other jobs."""
    try:
        results: dict[int, Any] = dict(as_they_finish(crew, jobs))
    except BaseException:
        for worker in crew:
            worker.close()
        raise
    return [results[index] for index in range(len(jobs))]


def as_they_finish(
    crew: Sequence[Worker], jobs: Sequence[Any], stop: Callable[[], bool] = lambda: False
) -> Iterator[tuple[int, Any]]:
    """The index of each job with its result; each job goes to the next idle worker."""
    waiting = list(reversed(range(len(jobs))))
    doing: dict[Connection, tuple[Worker, int]] = {}
    while not stop() and (waiting or doing):
        for worker in crew:
            if worker.pipe not in doing and waiting:
                index = waiting.pop()
                doing[worker.pipe] = (worker, index)
                worker.send(jobs[index])
        for pipe in wait(list(doing), timeout=POLL_SECONDS):
            worker, index = doing.pop(pipe)  # type: ignore[call-overload]
            yield index, worker.receive()


def start_workers(functions: Sequence[Callable[[Any], Any]]) -> list[Worker]:
    """One process per function; each function is pickled to its worker."""
    context = multiprocessing.get_context("spawn")
    crew = []
    with _ignoring_interrupts():
        for function in functions:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, function), daemon=True)
            process.start()
            theirs.close()  # so that the pipe breaks when the worker ends
            crew.append(Worker(process, ours))
    return crew


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """A process inherits that it ignores a signal, from its first moment on; while it imports, it could not say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _serve(pipe: Connection, function: Callable[[Any], Any]) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            job = pipe.recv()
        except (EOFError, ConnectionError):
            return
        try:
            answer = function(job)
        except Exception as error:
            answer = error
        try:
            pipe.send(answer)
        except (BrokenPipeError, ConnectionError):
            return

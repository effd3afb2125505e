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
from dataclasses import dataclass
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


@dataclass(slots=True)
class _Worker:
    process: SpawnProcess
    pipe: Connection
    job: Any = None
    """What it works on; None when idle."""


def in_processes(
    function: Callable[[_Job], _Result],
    jobs: Sequence[_Job],
    workers: int,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[_Job, _Result]]:
    """Each job with its result. `function` and the jobs are pickled. Once `stop` says so, running jobs are dropped."""
    waiting = list(reversed(jobs))
    crew = _start(function, min(workers, len(jobs)))
    try:
        while not stop() and (waiting or any(worker.job is not None for worker in crew)):
            for worker in crew:
                if worker.job is None and waiting:
                    worker.job = waiting.pop()
                    worker.pipe.send(worker.job)
            busy = {worker.pipe: worker for worker in crew if worker.job is not None}
            for pipe in wait(list(busy), timeout=POLL_SECONDS):
                worker = busy[pipe]  # type: ignore[index]
                result = _receive(worker)
                job, worker.job = worker.job, None
                yield job, result
    finally:
        for worker in crew:
            worker.pipe.close()
            worker.process.terminate()
        for worker in crew:
            worker.process.join()


def _start(function: Callable[[Any], Any], count: int) -> list[_Worker]:
    context = multiprocessing.get_context("spawn")
    crew = []
    with _ignoring_interrupts():
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, function), daemon=True)
            process.start()
            theirs.close()  # so that the pipe breaks when the worker ends
            crew.append(_Worker(process, ours))
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


def _receive(worker: _Worker) -> Any:
    try:
        answer = worker.pipe.recv()
    except (EOFError, ConnectionError):
        worker.process.join(timeout=5)
        raise WorkerError(
            f"a worker process ended with exit code {worker.process.exitcode}; it may have run out of memory: "
            "use fewer workers"
        ) from None
    if isinstance(answer, BaseException):
        raise answer
    return answer


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

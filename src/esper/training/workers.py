"""Jobs in several processes: each job goes to the next idle worker, results come back in the order they finish.

Workers are fresh interpreters (spawn), with one torch thread each. They ignore the signals that end a command, which
are the parent's to handle, and they end with the parent, however that ends: their pipe breaks.

How long a job takes is not known before, so a worker shows in another way that it works: a thread of it sends a beat
every second through a pipe of its own. One that is stopped, or hangs where no thread can run, is silent; it is ended,
and the parent says so instead of waiting for ever.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import torch

from esper.rollout.play import never
from esper.training.interrupt import ENDING, handled
from esper.training.pools import InProcess, Pool

POLL_SECONDS = 0.2
"""How often the parent looks whether it is to stop."""
BEAT_SECONDS = 1.0
SILENT_SECONDS = 60.0
"""Without a beat, after which a worker is given up: far longer than a busy machine makes a thread wait."""
START_SECONDS = 600.0
"""The same before its first beat: many processes that read torch from a slow disk take minutes."""
OF_THE_PARENT = (signal.SIGINT, *ENDING)


class WorkerError(RuntimeError):
    """A worker process ended without an answer."""


class Worker:
    """A process that answers jobs with a function of its own, which keeps its state from job to job."""

    def __init__(self, process: SpawnProcess, pipe: Connection, beats: Connection) -> None:
        self.process = process
        self.pipe = pipe
        self.beats = beats
        self._answered = False
        self._given_up: float | None = None
        """Seconds of silence after which it was ended."""
        self._watch = threading.Thread(target=self._listen, name=f"watch-{process.pid}", daemon=True)
        self._watch.start()
        # Where it is not closed: multiprocessing would end it by SIGTERM, which it ignores, and wait.
        self._last_resort = util.Finalize(self, process.kill, exitpriority=10)

    def send(self, job: Any) -> None:
        try:
            self.pipe.send(job)
        except OSError:  # its pipe is broken, or closed
            raise self._gone() from None

    def receive(self) -> Any:
        """Wait for the answer; an error that the job raised is raised here."""
        try:
            answer = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionError):
            raise self._gone() from None
        self._answered = True  # a quick first answer may come before the first beat
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _listen(self) -> None:
        """In a thread of the parent, because to send to a stopped worker, or to read half an answer of it, blocks."""
        silent, limit, before, started = 0.0, START_SECONDS, time.monotonic(), False
        with suppress(EOFError, OSError):  # it has ended, or was closed
            while silent < limit:
                beat = self.beats.poll(POLL_SECONDS)
                if beat:
                    self.beats.recv_bytes()
                if beat or (self._answered and not started):
                    silent, limit, started = 0.0, SILENT_SECONDS, True
                now = time.monotonic()
                # At most a few polls: where Ctrl-Z stopped the parent as well, that time was no worker's silence.
                silent += min(now - before, 5 * POLL_SECONDS)
                before = now
            self._given_up = limit
            self.process.kill()  # its pipe breaks, and whoever waits there goes on

    def _gone(self) -> WorkerError:
        self.process.join(timeout=5)
        if self._given_up is not None:
            return WorkerError(
                f"worker process {self.process.pid} has not answered for {self._given_up:.0f} seconds and was ended: "
                "it was stopped, or it hung"
            )
        return WorkerError(
            f"worker process {self.process.pid} ended with exit code {self.process.exitcode}; it may have run out of "
            "memory: use fewer workers"
        )

    def close(self) -> None:
        """At once, also where it is stopped: it has nothing to keep."""
        self.process.kill()
        self.process.join()
        self._watch.join()
        self.pipe.close()
        self.beats.close()


class Processes:
    """So many processes of this machine; one is this process itself."""

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, not {workers}")
        self.workers = workers

    def pool(self, function: Callable[[Any], Any], jobs: int) -> Pool:
        """No more processes are started than there are jobs."""
        if self.workers == 1:
            return InProcess(function)
        return ProcessPool(function, min(self.workers, jobs))


class ProcessPool(Pool):
    """Worker processes, each with a copy of the function."""

    def __init__(self, function: Callable[[Any], Any], workers: int) -> None:
        self.crew = start_workers([function] * workers)

    def as_they_finish(self, jobs: Sequence[Any], stop: Callable[[], bool] = never) -> Iterator[tuple[int, Any]]:
        """Each job goes to the next idle worker."""
        waiting = list(reversed(range(len(jobs))))
        doing: dict[Connection, tuple[Worker, int]] = {}
        try:
            while not stop() and (waiting or doing):
                for worker in self.crew:
                    if worker.pipe not in doing and waiting:
                        index = waiting.pop()
                        doing[worker.pipe] = (worker, index)
                        worker.send(jobs[index])
                for pipe in wait(list(doing), timeout=POLL_SECONDS):
                    worker, index = doing[pipe]  # type: ignore[index]
                    result = worker.receive()
                    del doing[pipe]  # type: ignore[arg-type]
                    yield index, result
        finally:
            if doing:  # after an error, or a stop: their answers would be taken for those to other jobs
                self.close()

    def close(self) -> None:
        for worker in self.crew:
            worker.close()


def start_workers(functions: Sequence[Callable[[Any], Any]]) -> list[Worker]:
    """One process per function; each function is pickled to its worker."""
    context = multiprocessing.get_context("spawn")
    crew = []
    # A process inherits that it ignores a signal, from its first moment on; while it imports, it could not say so.
    with handled(signal.SIG_IGN, OF_THE_PARENT):
        for function in functions:
            ours, theirs = context.Pipe()
            heard, beats = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(theirs, beats, function), daemon=True)
            process.start()
            theirs.close()  # so that the pipe breaks when the worker ends
            beats.close()
            crew.append(Worker(process, ours, heard))
    return crew


def _beat(beats: Connection) -> None:
    with suppress(OSError):  # the parent has ended
        while True:
            beats.send_bytes(b".")
            time.sleep(BEAT_SECONDS)


def _work(pipe: Connection, beats: Connection, function: Callable[[Any], Any]) -> None:
    threading.Thread(target=_beat, args=(beats,), daemon=True).start()
    _serve(pipe, function)


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
            # Bytes: each tensor that multiprocessing itself pickles holds a file open, in both processes.
            pipe.send_bytes(pickle.dumps(answer))
        except (BrokenPipeError, ConnectionError):
            return

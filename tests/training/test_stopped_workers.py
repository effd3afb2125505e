"""A worker process that is stopped or hangs is named and ended; one that is only slow is waited for."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from esper.training import workers
from esper.training.workers import ProcessPool, WorkerError

workers.BEAT_SECONDS = 0.1  # in the workers, too: they import this module for `answer`
SILENT_SECONDS = 3.0
NAMED = r"worker process \d+ has not answered for 3 seconds"


def answer(job: object) -> object:
    """A worker's function: stop, hang, be slow, or give the job's length back."""
    if job == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if job == "slow":
        time.sleep(SILENT_SECONDS + 1.0)
    if isinstance(job, tuple):
        time.sleep(0.1)
        os.kill(os.getpid(), job[0])
        return "alive"
    return len(job) if isinstance(job, bytes) else job


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(workers, "SILENT_SECONDS", SILENT_SECONDS)

    def late(number: int, frame: object) -> None:
        pytest.fail("the parent waited for ever")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def pool() -> Iterator[ProcessPool]:
    made = ProcessPool(answer, 2)
    assert made.map([b"1", b"22"]) == [1, 2]  # both are awake
    yield made
    made.close()


@pytest.mark.slow
def test_a_stopped_worker_is_named(pool: ProcessPool) -> None:
    with pytest.raises(WorkerError, match=NAMED):
        pool.map(["stop", b"1"])
    assert not any(worker.process.is_alive() for worker in pool.crew)


@pytest.mark.slow
def test_a_worker_that_is_stopped_before_a_large_job(pool: ProcessPool) -> None:
    """More than a pipe holds: to send it would wait for ever, too."""
    for worker in pool.crew:
        assert worker.process.pid is not None
        os.kill(worker.process.pid, signal.SIGSTOP)
    with pytest.raises(WorkerError, match=NAMED):
        pool.map([bytes(10_000_000)])


def test_one_that_never_starts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "START_SECONDS", 0.01)
    with pytest.raises(WorkerError, match=r"worker process \d+ has not answered"):
        ProcessPool(answer, 1).map([b"1"])


@pytest.mark.slow
def test_a_slow_worker_is_waited_for_and_signals_are_the_parents_to_handle(pool: ProcessPool) -> None:
    """A closed terminal, or a batch system, signals every process of a run."""
    signals = [(signal.SIGINT,), (signal.SIGTERM,), (signal.SIGHUP,)]
    assert pool.map(["slow", *signals]) == ["slow", "alive", "alive", "alive"]


def test_closing_ends_a_stopped_worker(pool: ProcessPool) -> None:
    process = pool.crew[0].process
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    pool.crew[0].close()
    assert not process.is_alive()

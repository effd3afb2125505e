"""Functions for the actors of a cluster, in a module that they can import."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


def double(job: int) -> int:
    return 2 * job


class Lengths:
    """The lengths of what a job holds, and how many jobs this copy has done."""

    def __init__(self) -> None:
        self.done = 0

    def __call__(self, job: tuple[bytes, ...]) -> tuple[list[int], int]:
        self.done += 1
        return [len(part) for part in job], self.done


def _die() -> None:
    print("about to die", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def trouble(job: str) -> str:
    """What can go wrong on a node, by the first word of the job; the second is a file that remembers."""
    what, _, memory = job.partition(" ")
    if what == "raise":
        raise ValueError("this job is bad")
    if what == "die":
        _die()
    if what == "die-once" and not Path(memory).exists():
        Path(memory).touch()
        _die()
    if what == "slow-once" and not Path(memory).exists():
        Path(memory).touch()
        time.sleep(60.0)
    if what == "sleep":
        time.sleep(5.0)
    if what == "no-file":
        Path("/nowhere/data.bin").read_bytes()
    if what == "no-memory":
        raise MemoryError("Unable to allocate 1 TiB")
    return job


def open_file(job: str) -> object:
    return open("/dev/null")

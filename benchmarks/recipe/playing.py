"""Playing many episodes in processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from esper.offline.episodes import Episodes, join
from esper.training.workers import in_processes

_Job = TypeVar("_Job")

EPISODES_AT_ONCE = 32


def play_all(
    play: Callable[[_Job], Episodes], jobs: Sequence[_Job], workers: int, seconds: float | None = None
) -> Episodes:
    """All of them, or as many as are played after so many seconds."""
    started, played = time.perf_counter(), []

    def late() -> bool:
        return seconds is not None and time.perf_counter() - started > seconds

    for count, (_, episodes) in enumerate(in_processes(play, jobs, workers, late), 1):
        played.append(episodes)
        if count % EPISODES_AT_ONCE == 0:
            played = [join(played)]  # tensors of another process each hold a file open until they are copied
            print(f"{count} of {len(jobs)} episodes, {time.perf_counter() - started:.0f} s", flush=True)
    if not played:
        raise SystemExit(f"no episode of {len(jobs)} was finished within {seconds} s: allow more --seconds")
    return join(played)

"""Problems that are drawn ahead, by processes of their own, while the networks of the last ones still train.

A draw of the first families costs a core 1 to 10 ms, and a GPU that plays thousands of networks would wait for it.
Which process draws what changes nothing: a chunk of draws is the same problems everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from esper.tasks.family import Family
from esper.tasks.joining import Groups, join_groups
from esper.tasks.stacking import is_made_on_device, stacked_problems
from esper.training.shared_memory import Shared, SharedMemory
from esper.training.workers import ProcessPool

CHUNK = 64
"""Draws of one job: some dozens of megabytes."""

_Key = tuple[tuple[int, ...], bool]
"""Draw ids, and whether they are held out."""


class _Drawer:
    """What a worker runs."""

    def __init__(self, family: Family) -> None:
        self._family, self._memory = family, SharedMemory()

    def __call__(self, job: _Key) -> Shared:
        return self._memory.share(stacked_problems(self._family, job[0], held_out=job[1]))


class DrawAhead:
    """Processes that draw; a thread of this one collects what they made."""

    def __init__(self, family: Family, workers: int) -> None:
        self._family = family
        self._pool = ProcessPool(_Drawer(family), workers)
        self._thread = ThreadPoolExecutor(1, "draw-ahead")
        self._ahead: dict[_Key, Future[list[Groups]]] = {}
        self._closed = False
        self._trouble: BaseException | None = None
        """What ended the processes before they were closed."""

    def prepare(self, draws: Sequence[int], *, held_out: bool = False) -> None:
        """Begin to draw these, after those that were asked for before."""
        key = (tuple(draws[place] for place in self._slow(draws)), held_out)
        if key not in self._ahead:
            self._ahead[key] = self._thread.submit(self._draw, key)

    def problems(self, draws: Sequence[int], held_out: bool, device: torch.device) -> Groups:
        """As `stacked_problems`; waits for what is not there yet. What is made on the device is made now."""
        self.prepare(draws, held_out=held_out)
        slow = self._slow(draws)
        fast = sorted(set(range(len(draws))) - set(slow))
        key = (tuple(draws[place] for place in slow), held_out)
        drawn = join_groups(self._ahead.pop(key).result(), device)
        made: Groups = []
        if fast:
            made = stacked_problems(self._family, [draws[place] for place in fast], held_out=held_out, device=device)
        return [
            ([places[i] for i in own], problems)
            for places, groups in ((fast, made), (slow, drawn))
            for own, problems in groups
        ]

    def _slow(self, draws: Sequence[int]) -> list[int]:
        """The places of those that are drawn one by one."""
        return [place for place, draw in enumerate(draws) if not is_made_on_device(self._family, draw)]

    def close(self) -> None:
        self._closed = True
        self._thread.shutdown(cancel_futures=True)
        self._pool.close()

    def _draw(self, key: _Key) -> list[Groups]:
        draws, held_out = key
        jobs = [(draws[start : start + CHUNK], held_out) for start in range(0, len(draws), CHUNK)]
        made: dict[int, Groups] = {}
        try:
            for index, shared in self._pool.as_they_finish(jobs, stop=lambda: self._closed):
                made[index] = shared.open()  # before its worker gets another job
        except BaseException as error:
            self._closed, self._trouble = True, error
            raise
        if len(made) < len(jobs):
            raise RuntimeError("the processes that draw problems were ended") from self._trouble
        return [made[index] for index in range(len(jobs))]

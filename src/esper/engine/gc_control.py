"""Control of the garbage collector, so that no GPU waits for a collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

NEVER = 1_000_000
"""Collections of young objects before one of older ones."""
FULL = 16
"""Every so many calls of `collect_garbage` everything is looked through."""
FROZEN_AT_START = 1000
"""Python 3.12 has frozen 375 objects of its own when it starts. Whoever else freezes, freezes far more than this."""


@contextmanager
def deferred_gc(device: torch.device) -> Iterator[None]:
    """Within, no collection that a GPU would wait for comes in the middle of a step. For a CPU nothing changes.

    Objects that existed before are not searched, and only the youngest ones are, until `collect_garbage` is
    called, as environments do at every reset.
    """
    if device.type != "cuda" or gc.get_freeze_count() > FROZEN_AT_START:  # frozen by another, who alone may end that
        yield
        return
    gc.collect()  # what is garbage already would be kept with the rest
    gc.freeze()
    usual = gc.get_threshold()
    gc.set_threshold(usual[0], NEVER, NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()


class GarbageCollection:
    """To be called when networks have just been dropped.

    While collections are deferred, dropped networks are all still young, and only young objects are searched: to search
    the modules that torch.compile imports and the captured epochs of 64 networks took 0.3 s of every reset. A network
    that survived another collection (torch.compile makes some) is old, and then everything is searched; so it is at
    every sixteenth call, for another environment's networks, and always where collections are not deferred.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._collections = -1
        """Of objects that are not young, up to the last call."""

    def __call__(self) -> None:
        self._calls += 1
        deferred = gc.get_threshold()[1] == NEVER and _old_collections() == self._collections
        gc.collect(1 if deferred and self._calls % FULL else 2)
        self._collections = _old_collections()


def _old_collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats()[1:])


collect_garbage = GarbageCollection()

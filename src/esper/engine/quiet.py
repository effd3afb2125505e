"""A garbage collector that keeps no GPU waiting."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def quiet_collector(device: torch.device) -> Iterator[None]:
    """Within, a collection on behalf of a GPU does not look through what was there before, modules above all.

    It comes in the middle of a step, again and again, and the GPU would wait for it. For a CPU nothing changes.
    """
    if device.type != "cuda" or gc.get_freeze_count():  # frozen by somebody else, who alone may end that
        yield
        return
    gc.collect()  # what is garbage already would be kept with the rest
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()

"""An answer of a worker process in memory that both processes see: gigabytes of tensors cost no pipe and no copy.

Where the system has no such memory (`memfd`), the answer is pickled as any other.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes: where a tensor may begin."""


class _Pickler(pickle.Pickler):
    """Tensors as arrays of numpy, whose contents pickle gives out of band."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.from_numpy, (value.numpy(),)
        return NotImplemented


@dataclass(frozen=True, slots=True)
class Shared:
    """What travels through the pipe: where the contents are, and the rest."""

    pickled: bytes
    sizes: tuple[int, ...]
    """Bytes of each buffer."""
    path: str
    """Of the memory, which the worker keeps until its next job; empty: there are no contents."""

    def open(self) -> Any:
        """The answer; its tensors lie in the shared memory, for as long as they are there."""
        if not self.path:
            return pickle.loads(self.pickled)
        with open(self.path, "r+b") as file:
            memory = memoryview(mmap.mmap(file.fileno(), 0))
        buffers, start = [], 0
        for size in self.sizes:
            buffers.append(memory[start : start + size])
            start += _aligned(size)
        return pickle.loads(self.pickled, buffers=buffers)


class SharedMemory:
    """The memory of a worker's last answer."""

    def __init__(self) -> None:
        self._held: int | None = None

    def share(self, answer: Any) -> Shared:
        """The answer, to be opened before this is called again: then the memory of this one goes, unless it is open."""
        if self._held is not None:
            os.close(self._held)
            self._held = None
        if sys.platform != "linux":
            return Shared(pickle.dumps(answer), (), "")
        buffers: list[pickle.PickleBuffer] = []
        file = io.BytesIO()
        _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(answer)
        raw = [buffer.raw() for buffer in buffers]
        sizes = tuple(len(one) for one in raw)
        if not any(sizes):
            return Shared(pickle.dumps(answer), (), "")
        self._held = os.memfd_create("esper")
        os.ftruncate(self._held, sum(map(_aligned, sizes)))
        with mmap.mmap(self._held, 0) as memory:
            start = 0
            for one, size in zip(raw, sizes, strict=True):
                memory[start : start + size] = one
                start += _aligned(size)
        return Shared(file.getvalue(), sizes, f"/proc/{os.getpid()}/fd/{self._held}")


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT

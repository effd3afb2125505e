"""One update of a stack as a CUDA graph: recorded once an epoch, on a stream of the stack's own."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

_IDLE: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)
"""Streams of stacks that are gone. cuBLAS keeps a workspace of tens of MB for every stream that ever used it, so each
new stack takes one of these: a process needs as many as it has stacks at a time."""


class Capture:
    """A stream, and the memory in which a stack's graphs keep their activations.

    `torch.cuda.graph` waits for the whole device and collects garbage before every capture; with some graphs per epoch
    that would cost more than the captures, so the two calls that matter are made here.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        idle = _IDLE[device]
        self.stream = idle.pop() if idle else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        weakref.finalize(self, idle.append, self.stream)
        self._pool = torch.cuda.graph_pool_handle()
        # A pool is given back to the device when its last graph goes; an empty one keeps it.
        self._keeper = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            self._keeper.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            torch.zeros(1, device=device)
            self._keeper.capture_end()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within, work is queued on the stack's own stream, after what was queued before."""
        outside = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(outside)
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        """What is queued from here on waits for the stack's stream."""
        torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def record(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            function()
        except BaseException:
            with suppress(RuntimeError):  # it says that the capture failed, not why
                graph.capture_end()
            raise
        graph.capture_end()
        return graph

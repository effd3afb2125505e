"""Computations over fixed addresses, replayed as CUDA graphs on a pool of streams."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from esper.errors import first_line


class CaptureError(RuntimeError):
    """The work cannot be made a CUDA graph: it waits for the device, or does what a graph cannot repeat."""


class GraphStream:
    """A stream, and the memory that the graphs on it share: they never run at the same time.

    On a CPU a stream is a plain loop: nothing is captured, and all work is called directly.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle() if on_gpu else None
        self.busy = 0
        """Learners whose epochs run here."""

    @contextmanager
    def running(self) -> Iterator[None]:
        with returning(self.device):
            self.enter()
            yield

    def enter(self) -> None:
        """What is launched from now on is launched here. Only within `returning`; quicker than `running` for many."""
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)

    def join(self) -> None:
        """What the current stream is given from now on comes after what was launched here."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def mark(self) -> torch.cuda.Event | None:
        """The end of what has been launched here so far."""
        return mark(self.device, self._stream)

    def follow(self, mark: torch.cuda.Event | None) -> None:
        """What is launched here from now on comes after what was launched elsewhere up to the mark."""
        if self._stream is not None and mark is not None:
            self._stream.wait_event(mark)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """`work` as a graph. It is not carried out; it must have been once, on this stream, so that all is warm."""
        if self._stream is None:
            return work
        # torch.cuda.graph collects garbage and waits for the device each time, which costs more than the capture.
        graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        gc.disable()  # what a collection frees in the middle of a capture may not be freed then
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    work()
                except BaseException:
                    with suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
        except RuntimeError as error:
            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            raise CaptureError(first_line(error)) from error
        finally:
            if collecting:
                gc.enable()
        return graph.replay


@contextmanager
def returning(device: torch.device) -> Iterator[None]:
    """Afterwards the current device and its current stream are again what they were."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device)
        try:
            yield
        finally:
            torch.cuda.set_stream(stream)


def mark(device: torch.device, stream: torch.cuda.Stream | None = None) -> torch.cuda.Event | None:
    """The end of what a stream (default: the current one) has been given so far; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream or torch.cuda.current_stream(device))
    return event


class Replay:
    """Work that is done directly the first time, which warms everything up, and replayed from then on.

    Work that turns out not to be replayable is done directly for good; `refused` is called with the reason.
    """

    def __init__(
        self,
        stream: GraphStream,
        work: Callable[[], None],
        refused: Callable[[str], None],
        why_not: Callable[[], str] = lambda: "",
    ) -> None:
        self._stream = stream
        self._work = work
        self._refused = refused
        self._why_not = why_not
        """Called after the first time; gives a reason not to replay, or an empty string."""
        self._replay: Callable[[], None] | None = None

    def __call__(self) -> None:
        if self._replay is not None:
            self._replay()
            return
        self._work()
        try:
            if reason := self._why_not():
                raise CaptureError(reason)
            self._replay = self._stream.capture(self._work)
        except CaptureError as error:
            self.give_up()
            self._refused(str(error))

    def give_up(self) -> None:
        """From now on the work is done directly."""
        self._replay = self._work

"""The graph engine: the epochs of many learners as CUDA graphs, side by side on a pool of streams.

It gives the numbers of the eager engine. What Python does per update, and with it the time that a small network waits
for Python, is paid once per topology and kept in a cache that outlives the learners.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from typing import Generic, TypeVar

import torch
from torch import Tensor

from esper.engine.captured import CapturedEpoch, EpochCache
from esper.engine.eager import EagerEngine
from esper.engine.governor import Governor
from esper.engine.graph_storage import tensor_feed, why_not_capturable
from esper.engine.learner import Learner, TrainReport
from esper.engine.measure import Evaluation
from esper.engine.streams import GraphStream, mark, returning

STREAMS = 16
"""Streams per device. More of them share the same few queues of the device."""

PARTS = (1, 3, 4, 4, 3, 1)
"""The parts in which a step is made, in sixteenths: the device works on one while Python prepares or reads another.

The first is small, so that the device has work at once, and so is the last: Python is alone with what comes after it.
"""

_Report = TypeVar("_Report")

log = logging.getLogger(__name__)


class GraphCache:
    """What graph engines keep from one set of learners to the next. One per process is enough."""

    def __init__(self, streams: int = STREAMS) -> None:
        self._streams = streams
        self._caches: dict[torch.device, EpochCache] = {}
        self.refused: dict[str, int] = {}
        """Why learners ran eagerly, and how many."""

    def of(self, device: torch.device) -> EpochCache:
        if device not in self._caches:
            self._caches[device] = EpochCache(device, self._streams, self.refuse)
        return self._caches[device]

    def release(self) -> None:
        """The learners of the last engine are done: they keep their numbers, the cache keeps its graphs."""
        for cache in self._caches.values():
            cache.release()

    @property
    def in_use(self) -> int:
        """Learners that are bound to captured epochs."""
        return sum(cache.in_use for cache in self._caches.values())

    @property
    def captures(self) -> int:
        return sum(cache.captures for cache in self._caches.values())

    def refuse(self, reason: str) -> None:
        if reason not in self.refused:
            log.warning("a network trains without CUDA graphs, and slower: %s", reason)
        self.refused[reason] = self.refused.get(reason, 0) + 1


class GraphEngine(EagerEngine):
    """Advances learners as the eager engine does. Those that cannot be captured run eagerly, and the log says why."""

    def __init__(
        self,
        learners: Sequence[Learner],
        governors: Sequence[Governor | None] | None = None,
        width: int | None = None,
        *,
        cache: GraphCache | None = None,
    ) -> None:
        super().__init__(learners, governors, width)
        self.cache = cache or GraphCache()
        self._caches: dict[Learner, EpochCache] = {}
        """By learner: to look up a network's device takes longer than most other things here."""
        self._eager: set[Learner] = set()
        for learner in self.learners:
            if reason := why_not_capturable(learner):
                self.cache.refuse(reason)
                self._eager.add(learner)

    def run(self, learners: Iterable[Learner]) -> Iterator[tuple[TrainReport, Evaluation]]:
        """One epoch of all, in a few parts: while the device works on one, Python prepares or reads another."""
        order: list[Learner] = []
        eager: list[Learner] = []
        launched: list[_Launched[tuple[TrainReport, Evaluation]]] = []
        with self._out_of_memory_explained():
            for part in self._parts(learners):
                order += part
                replayed, direct = self._sorted(part)
                eager += direct
                epochs = self._planned(replayed)
                launched += [self._launch(e, CapturedEpoch.run, CapturedEpoch.read) for e in _by_device(epochs)]
            rest = EagerEngine.run(self, eager)
            reports = _Reports(launched)
            for learner in order:
                yield next(rest) if learner in self._eager else reports.of(learner)

    def measure(self, learners: Sequence[Learner]) -> list[Evaluation]:
        replayed, eager = self._sorted(learners)
        with self._out_of_memory_explained():
            epochs = [self._epoch_of(learner) for learner in replayed]
            launched = [
                self._launch(e, CapturedEpoch.measure, CapturedEpoch.read_evaluation) for e in _by_device(epochs)
            ]
            reports = _Reports(launched)
            found = {learner: reports.of(learner) for learner in replayed}
        found |= dict(zip(eager, super().measure(eager), strict=True))
        return [found[learner] for learner in learners]

    def close(self) -> None:
        self.cache.release()

    def _parts(self, learners: Iterable[Learner]) -> Iterator[list[Learner]]:
        waiting, count = iter(learners), len(self.learners)
        ends = [-(-count * sixteenths // sum(PARTS)) for sixteenths in accumulate(PARTS, initial=0)]
        for first, end in pairwise(ends):
            if part := list(islice(waiting, end - first)):
                yield part

    def _planned(self, learners: Sequence[Learner]) -> list[CapturedEpoch]:
        """Epochs into which the examples to take and the learning rates have been written."""
        epochs = [self._epoch_of(learner) for learner in learners]
        feeds = [tensor_feed(learner) for learner in learners]
        plans = [feed.plan(feed.updates_per_epoch) for feed in feeds]
        rates = [x.optimizer.plan(feed.updates_per_epoch) for x, feed in zip(learners, feeds, strict=True)]
        for device in {epoch.stream.device for epoch in epochs}:
            rows = [i for i, epoch in enumerate(epochs) if epoch.stream.device == device]
            _upload([plans[i] for i in rows], [rates[i] for i in rows], [epochs[i] for i in rows])
        return epochs

    def _launch(
        self,
        epochs: Sequence[CapturedEpoch],
        work: Callable[[CapturedEpoch], None],
        read: Callable[[CapturedEpoch, list[float]], _Report],
    ) -> _Launched[_Report]:
        """Start epochs of one device."""
        streams, cache = {epoch.stream for epoch in epochs}, self.cache.of(epochs[0].stream.device)
        given = mark(cache.device)
        for stream in streams:
            stream.follow(given)
        with returning(cache.device):
            for epoch in epochs:
                epoch.stream.enter()
                work(epoch)
        return _Launched(epochs, read, [stream.mark() for stream in streams], cache.copy_stream)

    def _sorted(self, learners: Sequence[Learner]) -> tuple[list[Learner], list[Learner]]:
        """Those that are replayed, and those that run eagerly."""
        self._eager |= {x for x in learners if self._cache_of(x).gave_up(x)}
        return [x for x in learners if x not in self._eager], [x for x in learners if x in self._eager]

    def _epoch_of(self, learner: Learner) -> CapturedEpoch:
        cache = self._cache_of(learner)
        try:
            return cache.epoch_of(learner)
        except torch.cuda.OutOfMemoryError:
            cache.make_room()
            return cache.epoch_of(learner)

    def _cache_of(self, learner: Learner) -> EpochCache:
        if learner not in self._caches:
            self._caches[learner] = self.cache.of(learner.model.device)
        return self._caches[learner]

    @contextmanager
    def _out_of_memory_explained(self) -> Iterator[None]:
        try:
            yield
        except torch.cuda.OutOfMemoryError as error:
            raise RuntimeError(_too_many(len(self.learners), self.cache.in_use)) from error


def _too_many(wanted: int, running: int) -> str:
    """What to say when the device is full: how many networks would fit."""
    used, total = torch.cuda.memory_allocated() / 2**30, torch.cuda.get_device_properties().total_memory / 2**30
    fits = max(1, int(0.9 * running * total / max(used, 1e-9))) if running else 1
    fits = min(fits, wanted - 1)
    return (
        f"{wanted} networks do not fit into {total:.0f} GiB of GPU memory ({used:.1f} GiB hold {running}): "
        f"use at most about {max(1, fits)} environments, a smaller batch, or bf16"
    )


def _upload(plans: Sequence[Tensor], rates: Sequence[list[list[float]]], epochs: Sequence[CapturedEpoch]) -> None:
    """Write examples and learning rates into the epochs of one device, with one transfer for all of them."""
    to_plans, to_rates = [epoch.flat_plan for epoch in epochs], [epoch.flat_rates for epoch in epochs]
    numbers = torch.tensor([x for rows in rates for row in rows for x in row], dtype=to_rates[0].dtype)
    sizes = [sum(plan.nbytes for plan in plans), numbers.nbytes]
    on_gpu = to_plans[0].is_cuda
    flat = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=on_gpu)
    examples, rest = torch.split(flat, sizes)
    torch.cat([plan.view(-1) for plan in plans], out=examples.view(to_plans[0].dtype))
    rest.copy_(numbers.view(torch.uint8))
    if on_gpu:
        examples, rest = torch.split(flat.to(to_plans[0].device, non_blocking=True), sizes)
    for targets, arrived in ((to_plans, examples), (to_rates, rest)):
        pieces = torch.split(arrived.view(targets[0].dtype), [target.numel() for target in targets])
        torch._foreach_copy_(targets, pieces)


def _by_device(epochs: Sequence[CapturedEpoch]) -> list[list[CapturedEpoch]]:
    devices = dict.fromkeys(epoch.stream.device for epoch in epochs)
    return [[epoch for epoch in epochs if epoch.stream.device == device] for device in devices]


@dataclass(frozen=True, slots=True)
class _Launched(Generic[_Report]):
    """Epochs that a device works on, and how to read what comes back."""

    epochs: Sequence[CapturedEpoch]
    read: Callable[[CapturedEpoch, list[float]], _Report]
    marks: Sequence[torch.cuda.Event | None]
    """Behind the work of each stream."""
    copy_stream: GraphStream

    def reports(self) -> dict[Learner, _Report]:
        for end in self.marks:
            self.copy_stream.follow(end)
        with self.copy_stream.running():
            arriving = Arriving(torch.cat([epoch.results for epoch in self.epochs]))
        numbers = arriving.wait().tolist()
        ends = accumulate(epoch.size for epoch in self.epochs)
        return {e.learner: self.read(e, numbers[end - e.size : end]) for e, end in zip(self.epochs, ends, strict=True)}


class _Reports(Generic[_Report]):
    """The reports of all launches; it waits for no more of them than needed."""

    def __init__(self, launched: Sequence[_Launched[_Report]]) -> None:
        self._waiting = iter(launched)
        self._found: dict[Learner, _Report] = {}

    def of(self, learner: Learner) -> _Report:
        while learner not in self._found:
            self._found |= next(self._waiting).reports()
        return self._found[learner]


class Arriving:
    """Numbers on their way from the device."""

    def __init__(self, numbers: Tensor) -> None:
        self._event = None
        self._numbers = numbers
        if numbers.is_cuda:
            self._numbers = torch.empty_like(numbers, device="cpu", pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(numbers.device))

    def wait(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._numbers

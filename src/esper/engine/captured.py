"""One learner's epoch over fixed addresses, and a cache of such epochs.

An epoch is: write down which examples to take and the learning rates, replay a block of updates as often as wanted,
replay the evaluation. All numbers stay on the device; one tensor of results is read at the end.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from esper.engine.fingerprint import CachedFingerprint, module_fingerprint
from esper.engine.governor import pack
from esper.engine.graph_storage import (
    Storage,
    ensure_state,
    is_copied,
    moving_tensors,
    signature,
    tensor_feed,
    topology,
)
from esper.engine.learner import Learner, TrainReport, all_finite
from esper.engine.measure import Contrasts, Evaluation, measure_batch, measuring
from esper.engine.streams import GraphStream, Replay
from esper.growth.randomness import preserved_rng
from esper.growth.tensors import own_tensors
from esper.tasks.data import Split
from esper.tasks.feed import chunks

MOST_FREE = 1024
"""Most captured epochs that wait for a learner; beyond that the one that has waited longest goes."""
BLOCK = 4
"""Most updates in one graph: fewer launches and fewer kernels beside the updates, but a longer capture."""


class CapturedEpoch:
    """The graphs of one topology, over tensors of their own; it serves one learner at a time."""

    def __init__(
        self,
        learner: Learner,
        moving: list[Tensor],
        stream: GraphStream,
        key: CachedFingerprint,
        refused: Callable[[str], None],
    ) -> None:
        self.stream, self.signature = stream, key
        self._serve(learner)
        self.topology: Hashable = None
        self.gave_up = False
        """It cannot be replayed, and the learner had better run eagerly."""
        self._storage = Storage(moving)
        feed = tensor_feed(learner)
        self._train, self._val = (_own(split) if is_copied(split) else split for split in (feed.train, feed.val))
        self._block = max(b for b in range(1, BLOCK + 1) if feed.updates_per_epoch % b == 0)
        blocks = feed.updates_per_epoch // self._block
        groups, device = len(learner.optimizer.optimizer.param_groups), learner.model.device
        # As the fused optimizers take them; on a CPU they round nothing.
        rates = torch.float32 if device.type == "cuda" else torch.float64
        per_example = 4 if feed.augment else 1
        self.plan = torch.zeros(blocks, self._block, feed.batch_size, per_example, dtype=torch.int64, device=device)
        self.rates = torch.zeros(blocks, self._block, groups, dtype=rates, device=device)
        self._position = torch.zeros(1, dtype=torch.int64, device=device)
        self.flat_plan, self.flat_rates = self.plan.view(-1), self.rates.view(-1)
        # Lengths as numbers: to read them from a tensor takes longer than most other things that are done in an epoch.
        self._blocks, self._examples = blocks, len(self._val)
        parts = self._parts()
        self.size, self._trained = sum(parts), sum(parts[:-1])
        """Of the results: how many there are, and how many of them the updates show."""
        self._total = torch.zeros(parts[0], dtype=torch.float64, device=device)
        self.results = torch.zeros(self.size, dtype=torch.float64, device=device)
        self._losses, self._norms, self._finite, self._numbers = torch.split(self.results, parts)
        self._packed = pack(learner.model)
        self._refused, self._drew = refused, False
        self._updates = Replay(stream, self._make_updates, self._give_up, self._why_not)
        self._measure = Replay(stream, self._make_measurement, self._give_up)

    def _parts(self) -> list[int]:
        model = self.learner.model
        return [1 + len(self._incubating), 1 + len(model.seeds), 1, self._contrasts.size]

    # -- whose epoch it is ----------------------------------------------------------------------------------------

    @property
    def learner(self) -> Learner:
        assert self._learner is not None
        return self._learner

    def bind(self, learner: Learner, moving: list[Tensor]) -> None:
        """`moving`: the learner's tensors, in the order of those that this was made for."""
        self._serve(learner)
        self._storage.bind(moving)
        if self._blocks > 1:  # an epoch that was interrupted has left them as they were
            self._total.zero_()
            self._position.zero_()
        feed = tensor_feed(learner)
        for own, split in ((self._train, feed.train), (self._val, feed.val)):
            if own.x is not split.x:
                own.x.copy_(split.x)
                own.y.copy_(split.y)
        learner.packed = self._packed
        self.topology = topology(learner)

    def unbind(self) -> None:
        """The learner gets tensors of its own again."""
        self.learner.packed = {}
        self._storage.unbind()
        self._serve(None)

    def mark_free(self) -> None:
        """The learner is bound elsewhere now."""
        self._storage.forget()
        self._serve(None)

    def _serve(self, learner: Learner | None) -> None:
        """Note whose epoch it is, and what follows from its topology: both stay until the next call."""
        self._learner = learner
        self._incubating = [] if learner is None else learner.model.incubating
        self._contrasts = Contrasts([] if learner is None else learner.measured_slots)

    # -- an epoch -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """All updates, by `plan` and `rates`, and an evaluation; the numbers are in `results`."""
        for _ in range(self._blocks):
            self._updates()
        self._measure()

    def measure(self) -> None:
        """An evaluation alone."""
        self._measure()

    def read(self, numbers: list[float]) -> tuple[TrainReport, Evaluation]:
        report = self.learner.read_training(numbers[: self._trained], self._incubating)
        return report, self.read_evaluation(numbers)

    def read_evaluation(self, numbers: list[float]) -> Evaluation:
        return self._contrasts.read(numbers[self._trained :], self._examples)

    # -- what is captured -----------------------------------------------------------------------------------------

    def _make_updates(self) -> None:
        """One block of updates: the next one."""
        learner = self.learner
        model, incubating = learner.model, self._incubating
        drawn = learner.rng_state, learner.other_rngs
        batches = tensor_feed(learner).gather(self._now(self.plan), self._train)
        model.train()
        losses = []
        with learner.own_rng(), learner.arithmetic(), model.recording() if incubating else nullcontext():
            for i, (batch, rates) in enumerate(zip(batches, self._now(self.rates), strict=True)):
                losses.append(learner.gradients(batch, incubating))
                if i + 1 == self._block:
                    self._norms.copy_(learner.gradient_norms())
                learner.optimizer.step_with(rates.unbind())
                if i + 1 < self._block:
                    learner.updated()
        total = torch.stack(losses).sum(0)
        if self._blocks == 1:  # the only block of the epoch: nothing to add up, and none to come
            self._losses.copy_(total)
        else:
            self._total.add_(total)
            self._position.add_(1)
        self._drew = not (torch.equal(learner.rng_state, drawn[0]) and learner.other_rngs.same(drawn[1]))
        learner.optimizer.zero_grad()  # a gradient lies in the graph's memory, which other graphs will use

    def _make_measurement(self) -> None:
        """What the epoch has shown; and all is ready for the next one."""
        learner, contrasts = self.learner, self._contrasts
        with preserved_rng(learner.model.device), learner.arithmetic(), measuring(learner.model):
            found = [
                contrasts.numbers(*measure_batch(learner.model, batch, learner.loss, learner.score, contrasts.variants))
                for batch in chunks(self._val)
            ]
        self._numbers.copy_(found[0] if len(found) == 1 else torch.stack(found).sum(0))
        self._finite.copy_(all_finite(learner.model))
        if not self.gave_up:
            pack(learner.model, self._packed)
        if self._blocks > 1:
            self._losses.copy_(self._total)
            self._total.zero_()
            self._position.zero_()

    def _now(self, planned: Tensor) -> Tensor:
        """The block that is next; without a kernel if there is only one."""
        return planned[0] if self._blocks == 1 else planned.index_select(0, self._position)[0]

    def _give_up(self, reason: str) -> None:
        """What is true of the updates is true of the evaluation: both see the same tensors, or neither."""
        self._updates.give_up()
        self._measure.give_up()
        self.gave_up, self.learner.packed = True, {}
        self._refused(reason)

    def _why_not(self) -> str:
        if not self._storage.holds(moving_tensors(self.learner, own_tensors)):
            return "the host puts new tensors in the place of its buffers (write into them instead)"
        if self._drew and self.stream.device.type == "cuda":
            return "the host draws random numbers on the CPU, and a graph would repeat what it did with them"
        return ""


def _own(split: Split) -> Split:
    return Split(torch.empty_like(split.x), torch.empty_like(split.y))


class EpochCache:
    """Captured epochs on one device: those in use, and those kept for the next learner that needs the same."""

    def __init__(self, device: torch.device, streams: int, refused: Callable[[str], None]) -> None:
        self.device = device
        self._refused = refused
        self.streams = [GraphStream(device) for _ in range(streams)]
        self.copy_stream = GraphStream(device)
        """Results take a stream of their own, so that nothing that is launched meanwhile waits for them."""
        self.captures = 0
        """Epochs that had to be built; all others were found here."""
        self._fingerprints: dict[nn.Module, CachedFingerprint] = {}
        """Of hosts and seeds: to find one takes longer than the rest of a change of topology."""
        self._tensors: dict[nn.Module, tuple[list[Tensor], list[Tensor]]] = {}
        """Parameters and buffers of hosts and seeds, for the same reason."""
        self._in_use: dict[Learner, CapturedEpoch] = {}
        self._home: dict[Learner, GraphStream] = {}
        """Neighbours are launched together, so they had better not wait for each other on one stream."""
        self._free: dict[CachedFingerprint, list[CapturedEpoch]] = {}
        """By signature; those that were used last come last."""

    def epoch_of(self, learner: Learner) -> CapturedEpoch:
        """The learner's epoch as it is now, with the learner bound to it."""
        current = self._in_use.get(learner)
        if current is not None and current.topology == topology(learner):
            return current
        ensure_state(learner.optimizer.optimizer)
        key = CachedFingerprint(signature(learner, self._own, self._fingerprint))
        moving = moving_tensors(learner, self._own)
        if current is not None and current.signature == key:
            current.bind(learner, moving)  # the same computation, but some tensors are new: a rollback, or another seed
            return current
        home = self._home.setdefault(learner, self.streams[len(self._home) % len(self.streams)])
        epoch = self._take(key, home) or self._build(learner, moving, key, home)
        epoch.bind(learner, moving)
        epoch.stream.busy += 1
        if current is not None:
            current.mark_free()
            self._put_back(current)
        self._in_use[learner] = epoch
        return epoch

    @property
    def in_use(self) -> int:
        return len(self._in_use)

    def gave_up(self, learner: Learner) -> bool:
        """Whether the learner turned out not to be replayable. Then it is no longer bound to anything here."""
        epoch = self._in_use.get(learner)
        if epoch is None or not epoch.gave_up:
            return False
        epoch.unbind()
        epoch.stream.busy -= 1
        del self._in_use[learner]
        return True

    def make_room(self) -> None:
        """Drop every captured epoch that no learner uses, and old networks that are not collected yet."""
        self._free.clear()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def release(self) -> None:
        """All learners take their numbers away with them."""
        for stream in self.streams:  # after an interruption there may be work left on them
            stream.join()
        for epoch in self._in_use.values():
            epoch.unbind()
            self._put_back(epoch)
        self._in_use.clear()
        self._home.clear()
        self._fingerprints.clear()
        self._tensors.clear()

    def _own(self, module: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        if module not in self._tensors:
            self._tensors[module] = own_tensors(module)
        return self._tensors[module]

    def _fingerprint(self, module: nn.Module) -> CachedFingerprint:
        if module not in self._fingerprints:
            self._fingerprints[module] = CachedFingerprint(module_fingerprint(module))
        return self._fingerprints[module]

    def _take(self, key: CachedFingerprint, home: GraphStream) -> CapturedEpoch | None:
        """A free one: at home, or else on the stream with the least to do."""
        kept = self._free.pop(key, None)
        if not kept:
            return None
        best = min(kept, key=lambda epoch: (epoch.stream is not home, epoch.stream.busy))
        kept.remove(best)
        if kept:
            self._free[key] = kept
        return best

    def _build(
        self, learner: Learner, moving: list[Tensor], key: CachedFingerprint, home: GraphStream
    ) -> CapturedEpoch:
        self.captures += 1
        return CapturedEpoch(learner, moving, home, key, self._refused)

    def _put_back(self, epoch: CapturedEpoch) -> None:
        epoch.stream.busy -= 1
        self._free[epoch.signature] = [*self._free.pop(epoch.signature, ()), epoch]
        while sum(map(len, self._free.values())) > MOST_FREE:
            oldest = next(iter(self._free))
            self._free[oldest] = self._free[oldest][1:]
            if not self._free[oldest]:
                del self._free[oldest]

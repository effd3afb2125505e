"""An epoch of updates of a stack: one update as a function of its number, run in a loop, or as a CUDA graph.

The composition of seeds is fixed within an epoch, so one captured update serves all of its updates; to capture it costs
less than to replay it for an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.engine.stacked.adamw import EpochUpdates, Moments, rate_table
from esper.engine.stacked.composition import SeedStates
from esper.engine.stacked.hosts import MOMENTUM, Statistics
from esper.engine.stacked.passes import Leaves, StackedPass
from esper.growth.blueprints import blueprint_names

if TYPE_CHECKING:
    from esper.engine.stacked.stack import Stack


@dataclass(frozen=True, slots=True)
class TrainedEpoch:
    """What an epoch of updates showed of the networks that took part [n]; of slots [n, S]."""

    loss: Tensor
    host_gradient: Tensor
    seed_gradient: Tensor
    """NaN where there is no seed."""
    finite: Tensor
    """bool"""


class EpochOfUpdates:
    """The updates of the networks `rows` of a stack in one epoch."""

    def __init__(self, stack: Stack, rows: Tensor, states: SeedStates, epoch: int) -> None:
        self.stack, self.rows = stack, rows
        problems = stack.problems
        self.composition = stack.compose(states, removals=False)
        self.run_pass = StackedPass(stack.known, rows, self.composition)
        self.course = stack.course(rows)
        self.updates = int(self.course.updates.max())
        self.same = bool((self.course.updates == self.updates).all())
        self._begin_updates()
        self.plan = problems.minibatches(rows, epoch)  # [updates or more, n, batch]
        everyone = torch.arange(len(rows), device=stack.device)
        self.networks = torch.cat([everyone, self.composition.variants[-1]])
        update = torch.arange(self.updates, device=stack.device)[:, None]
        self.active = (update < self.course.updates[self.networks]).to(stack.dtype)  # [updates, rows of the pass]
        self.total = torch.zeros(len(self.networks), dtype=stack.dtype, device=stack.device)
        """Of losses, by row of the pass."""
        self.counter = torch.zeros(1, dtype=torch.int64, device=stack.device)
        self._begin_statistics()
        self._first = (rows * problems.train_x.shape[1])[:, None]
        self._x, self._y = problems.train_x.flatten(0, 1), problems.train_y.flatten()

    def _begin_updates(self) -> None:
        """Copies of what is trained: of the hosts, then of the parts and the gates of every slot."""
        stack, names = self.stack, blueprint_names()
        everyone = torch.arange(len(self.rows), device=stack.device)
        sets = [(stack.host, everyone, stack.hosts.table)]
        for slot, found in enumerate(self.composition.slots):
            sets += [(stack.seeds[slot], part.own, stack.tables[slot][names[part.blueprint]]) for part in found.parts]
            if found.gates is not None:
                sets.append((stack.gates[slot], found.gates.own, stack.gate_tables[slot]))
        owners = torch.cat([networks for _, networks, _ in sets])
        sizes = [len(networks) for _, networks, _ in sets]
        worked = [kept.select(self.rows[networks], table.width) for kept, networks, table in sets]
        course = self.course.of(owners)
        young = torch.arange(len(owners), device=stack.device) >= len(self.rows)
        steps = torch.cat([one.steps for one in worked])
        rates = torch.split(rate_table(course, steps, young, self.updates, stack.dtype), sizes, 1)
        made = torch.split(course.updates, sizes)
        self.all = [
            EpochUpdates(one, rates[i], made[i], table.real[self.rows[networks]], same=self.same)
            for i, (one, (_, networks, table)) in enumerate(zip(worked, sets, strict=True))
        ]
        self.host, rest = self.all[0], iter(self.all[1:])
        self.parts: list[list[EpochUpdates]] = []
        self.gates: list[EpochUpdates | None] = []
        for found in self.composition.slots:
            self.parts.append([next(rest) for _ in found.parts])
            self.gates.append(None if found.gates is None else next(rest))
        self.leaves = Leaves(
            self.host.leaf,
            tuple(tuple(one.leaf for one in slot) for slot in self.parts),
            tuple(None if one is None else one.leaf for one in self.gates),
        )

    def _begin_statistics(self) -> None:
        """Copies of the statistics of [networks, shadows] at each stage."""
        self._statistics = []
        for stage in range(len(self.stack.running)):
            running, private = self.stack.statistics(self.rows, stage)
            networks, slots = self._shadows(stage)
            mean = torch.cat([running.mean, private.mean[networks, slots]])
            variance = torch.cat([running.variance, private.variance[networks, slots]])
            self._statistics.append(Statistics(mean, variance))

    def _shadows(self, stage: int) -> tuple[Tensor, Tensor]:
        """Networks and slots of the shadows that pass through a stage."""
        networks = self.composition.variants[stage]
        return networks, self.composition.variant_slots[: len(networks)]

    # -- one update ----------------------------------------------------------------------------------------------------

    def update(self) -> None:
        """The update whose number is in `counter`."""
        index = (self.plan.index_select(0, self.counter)[0] + self._first).flatten()
        shape = (len(self.rows), -1)
        x = torch.unflatten(self._x.index_select(0, index), 0, shape).to(self.stack.dtype).movedim(1, -2)
        y = self._y.index_select(0, index).view(shape)[self.networks]  # [rows of the pass, batch]
        with self.stack.arithmetic():
            out, seen = self.run_pass(self.leaves, x, None)
        losses = (
            F.cross_entropy(out.to(self.stack.dtype).flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1)
        )
        gradients = torch.autograd.grad(losses.sum(), [one.leaf for one in self.all])
        with torch.no_grad():
            active = self.active.index_select(0, self.counter)[0]
            self.total += losses.detach() if self.same else torch.where(active > 0, losses, 0.0)
            for kept, batch in zip(self._statistics, seen, strict=True):
                share = MOMENTUM if self.same else MOMENTUM * active[: len(batch.mean), None]
                kept.mean.lerp_(batch.mean.to(kept.mean.dtype), share)
                kept.variance.lerp_(batch.variance.to(kept.mean.dtype), share)
            for updates, gradient in zip(self.all, gradients, strict=True):
                updates.step(gradient, self.counter)
            self.counter += 1

    def run(self) -> None:
        if self.stack.capture is not None:
            self.graph = self.stack.capture.record(self.update)
            for _ in range(self.updates):
                self.graph.replay()
            return
        for _ in range(self.updates):
            self.update()

    # -- the end -------------------------------------------------------------------------------------------------------

    def statistics(self, stage: int) -> tuple[Statistics, Statistics]:
        """As `Stack.statistics`, after the updates."""
        kept, n = self._statistics[stage], len(self.rows)
        _, private = self.stack.statistics(self.rows, stage)
        networks, slots = self._shadows(stage)
        private.mean[networks, slots], private.variance[networks, slots] = kept.mean[n:], kept.variance[n:]
        return Statistics(kept.mean[:n], kept.variance[:n]), private

    def _seeds(self) -> Iterator[tuple[int, Tensor, EpochUpdates, Moments, Tensor]]:
        """Of all parts, then of all gates: slot, networks, updates, where they are kept, and true sizes."""
        stack, names = self.stack, blueprint_names()
        for slot, (found, parts) in enumerate(zip(self.composition.slots, self.parts, strict=True)):
            for part, updates in zip(found.parts, parts, strict=True):
                sizes = stack.tables[slot][names[part.blueprint]].sizes[self.rows[part.own]]
                yield slot, part.own, updates, stack.seeds[slot], sizes
        for slot, (found, gates) in enumerate(zip(self.composition.slots, self.gates, strict=True)):
            if gates is not None and found.gates is not None:
                own = found.gates.own
                yield slot, own, gates, stack.gates[slot], stack.gate_tables[slot].sizes[self.rows[own]]

    def report(self) -> TrainedEpoch:
        n, device = len(self.rows), self.stack.device
        finite = torch.isfinite(self.host.leaf.detach()).all(1)
        squares = torch.zeros((n, self.stack.slots), dtype=torch.float64, device=device)
        sizes = torch.zeros_like(squares)  # stays 0, and gives NaN, where there is no seed
        for slot, own, updates, _, true in self._seeds():
            squares[own, slot] += updates.gradient.double()
            sizes[own, slot] += true.double()
            finite[own] &= torch.isfinite(updates.leaf.detach()).all(1)
        for kept in self._statistics:
            finite &= ~(kept.mean[:n].isnan().any(1) | kept.variance[:n].isnan().any(1))
        loss = self.total[:n].double() / self.course.updates
        return TrainedEpoch(loss, self.host.gradient.double().sqrt(), (squares / sizes).sqrt(), finite)

    def commit(self, healthy: Tensor) -> None:
        """Keep what was trained, of the networks [n] that are healthy; the others stay what they were before."""
        self.stack.host.write(self.rows, self.host.finish(), healthy)
        for _, own, updates, kept, _ in self._seeds():
            kept.write(self.rows[own], updates.finish(), healthy[own])
        for stage, (running, private) in enumerate(zip(self.stack.running, self.stack.private, strict=True)):
            of_networks, of_shadows = self.statistics(stage)
            was_running, was_private = self.stack.statistics(self.rows, stage)
            for name in ("mean", "variance"):
                ok = healthy[:, None]
                getattr(running, name)[self.rows] = torch.where(
                    ok, getattr(of_networks, name), getattr(was_running, name)
                )
                ok = ok[:, None]
                getattr(private, name)[self.rows] = torch.where(
                    ok, getattr(of_shadows, name), getattr(was_private, name)
                )

"""The networks of some problems of one form: weights, optimizer, statistics, seeds; trained and measured as one.

The state is columns over all networks. A slot has room for the largest seed; a smaller one uses the first columns.
An epoch works on copies of what takes part in it and writes them back: networks whose episodes are over cost nothing.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from esper.engine.stacked.adamw import Course, Moments
from esper.engine.stacked.capture import Capture
from esper.engine.stacked.composition import Composition, SeedStates, compose
from esper.engine.stacked.hosts import Statistics
from esper.engine.stacked.passes import Known, Leaves, StackedPass
from esper.engine.stacked.training import EpochOfUpdates
from esper.growth.blueprints import blueprint_names
from esper.slot_columns import CONTRAST
from esper.tasks.problems import Problems

CHUNK_NUMBERS = {"cpu": 2**22, "cuda": 2**27}
"""Numbers of one activation in an evaluation's chunk of examples: small enough for a cache, or for the memory."""


@dataclass(frozen=True, slots=True)
class Measured:
    """An evaluation: [n], and contrasts [n, S, 3] that are NaN where nothing was measured. float64."""

    loss: Tensor
    accuracy: Tensor
    shadow: Tensor
    contribution: Tensor


class Stack:
    """N networks of one form."""

    def __init__(self, problems: Problems, dtype: torch.dtype = torch.float32, *, bf16: bool = False) -> None:
        """`bf16`: passes calculate in bfloat16 (on a GPU); weights, optimizer and statistics stay what they are."""
        self.bf16 = bf16 and problems.train_x.is_cuda
        self.problems, self.dtype = problems, dtype
        self.device = problems.train_x.device
        self.capture = Capture(self.device) if self.device.type == "cuda" else None
        self.known = Known(problems, dtype)
        self.hosts = self.known.hosts
        n, form = len(problems), problems.form
        self.slots = form.stages
        everyone = torch.arange(n, device=self.device)
        drawn = problems.host_uniforms(everyone, int(self.hosts.table.drawn.max()))
        self.host = Moments.of(self.hosts.table.fill(drawn).to(dtype))
        self.tables, self.gate_tables = self.known.tables, self.known.gate_tables
        self.seeds = [self._room(n, max(table.width for table in tables.values())) for tables in self.tables]
        self.gates = [self._room(n, table.width) for table in self.gate_tables]
        normed = form.layout.startswith("conv") and form.norm
        widths = self.hosts.padded if normed else []
        self.running = [self._fresh((n, width)) for width in widths]
        """Of each stage's batch norm."""
        self.private = [self._fresh((n, self.slots, width)) for width in widths]
        """The same, as the shadow of the seed at each slot sees it."""

    def _room(self, networks: int, width: int) -> Moments:
        return Moments.of(torch.zeros((networks, width), dtype=self.dtype, device=self.device))

    def _fresh(self, shape: tuple[int, ...]) -> Statistics:
        zeros = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return Statistics(zeros, torch.ones_like(zeros))

    def __len__(self) -> int:
        return len(self.problems)

    def arithmetic(self) -> AbstractContextManager[Any]:
        """Within, passes are made in the stack's precision."""
        return torch.autocast("cuda", torch.bfloat16, cache_enabled=False) if self.bf16 else nullcontext()

    def own_stream(self) -> AbstractContextManager[None]:
        """Within, work is queued beside that of other stacks."""
        return nullcontext() if self.capture is None else self.capture.active()

    def join(self) -> None:
        """What is queued from here on comes after all of this stack's work."""
        if self.capture is not None:
            self.capture.join()

    # -- what blueprints cost ------------------------------------------------------------------------------------------

    def costs(self) -> tuple[Tensor, Tensor]:
        """Parameters of each blueprint at each slot [N, S, B] (NaN where it does not fit), and of a gate [N, S]."""
        names = blueprint_names()
        nothing = torch.full((len(self),), math.nan, dtype=torch.float64, device=self.device)
        found = [
            torch.stack([tables[name].sizes.double() if name in tables else nothing for name in names], -1)
            for tables in self.tables
        ]
        return torch.stack(found, 1), torch.stack([table.sizes for table in self.gate_tables], 1)

    # -- a seed begins -------------------------------------------------------------------------------------------------

    def plant(self, rows: Tensor, slot: Tensor, blueprint: Tensor, born: Tensor) -> None:
        """Seeds of these networks [m]: `born` is the number of each one's seed, from 1 on."""
        names = blueprint_names()
        at = np.stack([t.cpu().numpy() for t in (slot, blueprint)], 1)
        for place, kind in np.unique(at, axis=0):
            chosen = torch.from_numpy(np.flatnonzero((at == (place, kind)).all(1))).to(self.device)
            some, body, gate = rows[chosen], self.tables[place][names[kind]], self.gate_tables[place]
            used = body.drawn[some]
            drawn = self.problems.seed_uniforms(some, born[chosen], int((used + gate.drawn[some]).max()))
            self.seeds[place].plant(some, body.fill(drawn, some))
            # A gate is filled for all of these, and used where the blend has one.
            self.gates[place].plant(some, gate.fill(drawn, some, used))
            for running, private in zip(self.running, self.private, strict=True):
                private.mean[some, int(place)] = running.mean[some]
                private.variance[some, int(place)] = running.variance[some]

    # -- one epoch -----------------------------------------------------------------------------------------------------

    def course(self, rows: Tensor) -> Course:
        p = self.problems
        updates = p.updates[rows]
        made = self.host.steps[rows]
        return Course(
            p.learning_rate[rows].double(), p.weight_decay[rows].double(), updates, updates * p.horizon[rows], made
        )

    def compose(self, states: SeedStates, *, removals: bool) -> Composition:
        return compose(states, removals=removals, device=self.device, dtype=self.dtype)

    def prepare(self, rows: Tensor, states: SeedStates, *, contrasts: bool = True) -> StackedPass:
        """A pass for `measure`. To be made before an epoch's updates are queued: it reads numbers from the device."""
        states = states if contrasts else states.grown
        return StackedPass(self.known, rows, self.compose(states, removals=contrasts))

    def measure(self, run: StackedPass, epoch: EpochOfUpdates | None = None, *, test: bool = False) -> Measured:
        """The networks of a pass on their validation sets, and every unfinished seed against the network without it.

        With `epoch` as it has trained them; without, as they are kept.
        """
        rows, composition = run.rows, run.composition
        leaves = self.leaves(rows, composition) if epoch is None else epoch.leaves
        statistics = self._known_statistics(rows, composition, epoch)
        x, y = (self.problems.test_x, self.problems.test_y) if test else (self.problems.val_x, self.problems.val_y)
        networks = torch.cat([torch.arange(len(rows), device=self.device), composition.variants[-1]])
        count, losses, correct = x.shape[1], [], []
        chunk = self._chunk(len(networks), count)
        with torch.no_grad():
            for start in range(0, count, chunk):
                part = x[rows, start : start + chunk].to(self.dtype)  # [n, examples, *sizes, features]
                with self.arithmetic():
                    out, _ = run(leaves, part.movedim(1, -2), statistics)
                targets = y[rows, start : start + chunk][networks]
                out = out.to(self.dtype)
                each = F.cross_entropy(out.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
                losses.append(each.double().sum(1))
                correct.append(out.argmax(-1) == targets)
        loss = torch.stack(losses).sum(0) / count
        return _contrasts(loss, torch.cat(correct, 1), composition, self.slots)

    def _chunk(self, rows: int, count: int) -> int:
        widest = max(
            math.prod(sizes) * width for sizes, width in zip(self.hosts.sizes, self.hosts.padded, strict=False)
        )
        # As many parts of equal size as needed: a last part of other size would be another shape to prepare for.
        parts = max(1, math.ceil(rows * count * widest / CHUNK_NUMBERS[self.device.type]))
        return max(1, math.ceil(count / parts))

    def leaves(self, rows: Tensor, composition: Composition) -> Leaves:
        """Copies of what takes part, to read."""
        names = blueprint_names()
        parts = [
            tuple(
                self.seeds[slot].weights[:, : self.tables[slot][names[part.blueprint]].width][rows[part.own]]
                for part in found.parts
            )
            for slot, found in enumerate(composition.slots)
        ]
        gates = [
            None if found.gates is None else self.gates[slot].weights[rows[found.gates.own]]
            for slot, found in enumerate(composition.slots)
        ]
        return Leaves(self.host.weights[rows], tuple(parts), tuple(gates))

    def _known_statistics(
        self, rows: Tensor, composition: Composition, epoch: EpochOfUpdates | None
    ) -> list[Statistics]:
        """Of [networks, variants] at each stage: a shadow has its own, a network without a seed the network's."""
        found = []
        for stage in range(len(self.running)):
            running, private = self.statistics(rows, stage) if epoch is None else epoch.statistics(stage)
            networks = composition.variants[stage]
            slots, shadow = composition.variant_slots[: len(networks)], composition.shadows[: len(networks), None]
            again = [
                torch.where(shadow, own[networks, slots], shared[networks])
                for own, shared in ((private.mean, running.mean), (private.variance, running.variance))
            ]
            found.append(Statistics(torch.cat([running.mean, again[0]]), torch.cat([running.variance, again[1]])))
        return found

    def statistics(self, rows: Tensor, stage: int) -> tuple[Statistics, Statistics]:
        """Copies of those of a stage's batch norm: the networks' [n, channels], and the shadows' [n, S, channels]."""
        kept = (self.running[stage], self.private[stage])
        running, private = (Statistics(one.mean[rows], one.variance[rows]) for one in kept)
        return running, private


def _contrasts(loss: Tensor, correct: Tensor, composition: Composition, slots: int) -> Measured:
    """From the mean losses [rows] and which examples are right [rows, examples], of networks and then of variants."""
    n, networks = composition.networks, composition.variants[-1]
    count = correct.shape[1]
    score = 100.0 * correct.double()
    found = torch.full((2, n, slots, len(CONTRAST)), math.nan, dtype=torch.float64, device=loss.device)
    if len(networks):
        difference = score[n:] - score[networks]
        mean, square = difference.mean(1), difference.square().mean(1)
        error = ((square - mean.square()).clamp(min=0.0) / max(1, count - 1)).sqrt()
        sign = torch.where(composition.shadows, 1.0, -1.0).double()  # with the seed minus without it
        contrast = torch.stack([sign * mean, sign * (loss[networks] - loss[n:]), error], -1)
        kind = (~composition.shadows).long()
        found[kind, networks, composition.variant_slots] = contrast
    return Measured(loss[:n], score[:n].mean(1), found[0], found[1])

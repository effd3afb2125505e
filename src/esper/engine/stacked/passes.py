"""One stacked pass: the networks of a composition and their variants, from inputs to outputs.

The weights of hosts and seeds are leaves [units, P]; variants read them as constants. So one backward pass of the sum
of all losses gives each host the gradients of its own loss and each incubating seed those of its shadow's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from esper.engine.stacked import blueprints
from esper.engine.stacked import operations as ops
from esper.engine.stacked.blueprints import BATCHED, Constants, select_constants
from esper.engine.stacked.composition import Composition, SlotRows
from esper.engine.stacked.functions import Fork, Join
from esper.engine.stacked.hosts import StackedHosts, Statistics
from esper.engine.stacked.parameters import Table
from esper.growth.blueprints import blueprint_names
from esper.tasks.problems import Problems


@dataclass(frozen=True, slots=True)
class Leaves:
    """What is trained, in the order of the composition."""

    host: Tensor
    """[n, P]"""
    parts: tuple[tuple[Tensor, ...], ...]
    """By slot and part: [own, P]."""
    gates: tuple[Tensor | None, ...]
    """By slot: [own, P]."""


class Known:
    """What does not change about the networks of some problems: tables of their parameters, and constants of passes."""

    def __init__(self, problems: Problems, dtype: torch.dtype) -> None:
        self.hosts = StackedHosts(problems, dtype)
        self.attends = problems.attends.cpu().numpy()
        layout = problems.form.layout
        if unknown := blueprints.without_batched_form(layout):
            raise ValueError(f"blueprints without a stacked form: {', '.join(unknown)} ({layout}); use another engine")
        self.blueprints = {name: BATCHED[layout][name] for name in blueprint_names() if name in BATCHED[layout]}
        self.places = [self.hosts.place(slot) for slot in range(problems.form.stages)]
        self.tables = [
            {name: Table(batched.parameters(place)) for name, batched in self.blueprints.items()}
            for place in self.places
        ]
        """By slot and blueprint, of all networks."""
        self.gate_tables = [Table(blueprints.gate_parameters(place)) for place in self.places]
        self.gate_constants = [blueprints.gate_constants(place) for place in self.places]
        self._constants: dict[tuple[int, str], Constants] = {}

    def seed_constants(self, slot: int, blueprint: str) -> Constants:
        """Of all networks; made when a seed of that kind first grows there."""
        key = (slot, blueprint)
        if key not in self._constants:
            self._constants[key] = self.blueprints[blueprint].constants(self.places[slot])
        return self._constants[key]


class StackedPass:
    """A composition with all that is constant about it, so that only activations remain to be computed."""

    def __init__(self, known: Known, rows: Tensor, composition: Composition) -> None:
        """`rows` [n] are the networks of the composition among all that are `known`."""
        self.known, self.hosts, self.rows, self.composition = known, known.hosts, rows, composition
        everyone = [torch.cat([rows, rows[variants]]) for variants in composition.variants]
        attends = known.attends[rows.cpu().numpy()]
        self._stages, self._after = [], []
        for stage, variants in enumerate(composition.variants_cpu[:-1]):
            attending = np.flatnonzero(np.concatenate([attends[:, stage], attends[variants, stage]]))
            there = torch.from_numpy(attending).to(rows.device)
            self._stages.append(self.hosts.constants(stage, everyone[stage], there))
            # What follows a slot has rows for the variants that begin there, too.
            self._after.append(self.hosts.after_slot(stage, everyone[stage + 1]))
        self._head = self.hosts.head_constants(everyone[-1])
        # Networks of the rows that seeds change, and of those whose shadows begin, at each slot.
        self._attached = [everyone[slot][found.attached] for slot, found in enumerate(composition.slots)]
        self._detached = [rows[found.detached] for found in composition.slots]
        names = blueprint_names()
        self._parts = [
            [
                select_constants(known.seed_constants(slot, names[part.blueprint]), rows[part.networks])
                for part in found.parts
            ]
            for slot, found in enumerate(composition.slots)
        ]
        self._gates = [
            None if found.gates is None else select_constants(known.gate_constants[slot], rows[found.gates.networks])
            for slot, found in enumerate(composition.slots)
        ]

    def __call__(
        self, leaves: Leaves, x: Tensor, statistics: Sequence[Statistics] | None
    ) -> tuple[Tensor, list[Statistics]]:
        """Outputs [n + variants, batch, classes], and the batch statistics of each stage (in training, of batch norms).

        `statistics` are those that batch norms shall use, of [networks, variants] at each stage; None is training.
        """
        hosts, seen = self.hosts, []
        pieces = torch.split(leaves.host, [table.width for table in hosts.tables], 1)
        constant = leaves.host.detach()
        h = x
        for stage in range(hosts.form.stages):
            weights = _with_again(
                hosts.tables[stage], pieces[stage], hosts.piece(constant, stage), self.composition.variants[stage]
            )
            given = None if statistics is None or not statistics else statistics[stage]
            h, found = hosts.stage(stage, weights, self._stages[stage], h, given)
            if found is not None:
                seen.append(found)
            h = hosts.pool(stage, self._after[stage], self._slot(stage, leaves, h))
        weights = _with_again(
            hosts.tables[-1], pieces[-1], hosts.piece(constant, len(hosts.tables) - 1), self.composition.variants[-1]
        )
        return hosts.head(weights, self._head, h), seen

    def _slot(self, slot: int, leaves: Leaves, h: Tensor) -> Tensor:
        rows, hosts = self.composition.slots[slot], self.hosts
        if not rows.parts:
            return h
        detached = h.detach().index_select(0, rows.detached)
        h, attached = Fork.apply(h, rows.attached)  # type: ignore[no-untyped-call]
        grown, shadows = self._grown(slot, leaves, rows, attached, detached)
        gates = self._gates[slot]
        if gates is not None:
            grown, shadows = self._gated(slot, leaves, torch.cat([attached, detached]), torch.cat([grown, shadows]))
        weight = rows.alpha.view(-1, *[1] * (h.dim() - 1))
        changed = torch.lerp(attached, grown, weight.to(grown.dtype))
        # Biases of seeds reach beyond the true positions of a feature map.
        changed = hosts.cut(slot, self._attached[slot], changed)
        shadows = hosts.cut(slot, self._detached[slot], shadows)
        return ops.apply(Join, h, changed, shadows, rows.attached, rows.without)

    def _grown(
        self, slot: int, leaves: Leaves, rows: SlotRows, attached: Tensor, detached: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What seeds make of the attached and the detached rows, in their order."""
        grown, shadows = [], []
        pieces = zip(
            torch.split(attached, rows.attached_sizes), torch.split(detached, rows.detached_sizes), strict=True
        )
        for i, (acting, young) in enumerate(pieces):
            part, leaf, constants = rows.parts[i], leaves.parts[slot][i], self._parts[slot][i]
            name = blueprint_names()[part.blueprint]
            batched, table = self.known.blueprints[name], self.known.tables[slot][name]
            weights = _with_again(table, leaf, leaf.detach(), part.again)
            there = [some for some in (young, acting) if len(some)]
            inputs = there[0] if len(there) == 1 else torch.cat(there)
            out = batched.forward(weights, constants, inputs).to(inputs.dtype)  # in bfloat16, sums of both are float32
            shadow, changed = torch.split(out, [part.incubating, len(out) - part.incubating])
            shadows.append(shadow)
            grown.append(changed)
        return torch.cat(grown), torch.cat(shadows)

    def _gated(self, slot: int, leaves: Leaves, h: Tensor, grown: Tensor) -> tuple[Tensor, Tensor]:
        gates, found, leaf = self.composition.slots[slot].gates, self._gates[slot], leaves.gates[slot]
        assert gates is not None
        assert found is not None
        assert leaf is not None
        weights = _with_again(self.known.gate_tables[slot], leaf, leaf.detach(), gates.again)
        seen = h.index_select(0, gates.rows)
        is_map = self.hosts.form.layout.startswith("conv")
        opening = blueprints.gate(weights, found, seen, is_map=is_map)
        mixed = seen + opening * (grown.index_select(0, gates.rows) - seen)
        grown = grown.index_copy(0, gates.rows, mixed.to(grown.dtype))
        attached = len(self.composition.slots[slot].attached)
        return grown[:attached], grown[attached:]


def _with_again(table: Table, leaf: Tensor, constant: Tensor, again: Tensor) -> dict[str, Tensor]:
    """The weights of own rows, then of those that pass again."""
    own = table.split(leaf)
    if len(again) == 0:
        return own
    second = table.split(constant.index_select(0, again))
    return {name: torch.cat([tensor, second[name]]) for name, tensor in own.items()}

"""One stacked pass: the networks of a composition and their variants, from inputs to outputs.

`Weights` of hosts and seeds are leaves [units, P]; variants read them as constants. So one backward pass of the sum of
all losses gives each host the gradients of its own loss and each incubating seed those of its shadow's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.engine.stacked import seeds
from esper.engine.stacked.composition import Composition, SlotRows
from esper.engine.stacked.hosts import StackedHosts, Statistics
from esper.engine.stacked.parameters import Table
from esper.engine.stacked.seeds import BATCHED, BatchedBlueprint, Constants, Place
from esper.growth.blueprints import blueprint_names


@dataclass(frozen=True, slots=True)
class Leaves:
    """What is trained, in the order of the composition."""

    host: Tensor
    """[n, P]"""
    parts: tuple[tuple[Tensor, ...], ...]
    """By slot and part: [own, P]."""
    gates: tuple[Tensor | None, ...]
    """By slot: [own, P]."""

    def all(self) -> list[Tensor]:
        seeds_ = [leaf for slot in self.parts for leaf in slot]
        return [self.host, *seeds_, *(leaf for leaf in self.gates if leaf is not None)]


class StackedPass:
    """A composition with all that is constant about it, so that only activations remain to be computed."""

    def __init__(self, hosts: StackedHosts, rows: Tensor, composition: Composition) -> None:
        """`rows` [n] are the networks of the composition among the hosts'."""
        self.hosts, self.rows, self.composition = hosts, rows, composition
        everyone = [torch.cat([rows, rows[variants]]) for variants in composition.variants]
        stages = range(hosts.form.stages)
        self._stages: list[Constants] = [hosts.constants(stage, everyone[stage]) for stage in stages]
        # Pooling follows the slot, where variants begin.
        self._pools: list[Constants] = [hosts.constants(stage, everyone[stage + 1]) for stage in stages]
        self._head = hosts.head_constants(everyone[-1])
        names, layout = blueprint_names(), hosts.form.layout
        self._parts: list[list[tuple[BatchedBlueprint, Table, Constants]]] = []
        self._gates: list[tuple[Table, Constants] | None] = []
        for slot, found in zip(stages, composition.slots, strict=True):
            parts = []
            for part in found.parts:
                place = self._place(slot, part.networks)
                batched = BATCHED[layout][names[part.blueprint]]
                parts.append((batched, Table(batched.parameters(place)), batched.constants(place)))
            self._parts.append(parts)
            gates = found.gates
            if gates is None:
                self._gates.append(None)
                continue
            place = self._place(slot, gates.networks)
            self._gates.append((Table(seeds.gate_parameters(place)), seeds.gate_constants(place)))

    def _place(self, slot: int, networks: Tensor) -> Place:
        return self.hosts.place(slot).of(self.rows[networks])

    def __call__(
        self, leaves: Leaves, x: Tensor, statistics: Sequence[Statistics] | None
    ) -> tuple[Tensor, list[Statistics]]:
        """Outputs [n + variants, batch, classes], and the batch statistics of each stage (in training, of batch norms).

        `statistics` are those that batch norms shall use, of [networks, variants] at each stage; None is training.
        """
        hosts, seen = self.hosts, []
        pieces = leaves.host.split([table.width for table in hosts.tables], 1)
        constant = leaves.host.detach()
        h = x
        for stage in range(hosts.form.stages):
            weights = _with_again(hosts.tables[stage], pieces[stage], hosts.piece(constant, stage), self.composition.variants[stage])
            given = None if statistics is None or not statistics else statistics[stage]
            h, found = hosts.stage(stage, weights, self._stages[stage], h, given)
            if found is not None:
                seen.append(found)
            h = hosts.pool(stage, self._pools[stage], self._slot(stage, leaves, h))
        weights = _with_again(hosts.tables[-1], pieces[-1], hosts.piece(constant, len(hosts.tables) - 1), self.composition.variants[-1])
        return hosts.head(weights, self._head, h), seen

    def _slot(self, slot: int, leaves: Leaves, h: Tensor) -> Tensor:
        rows, hosts = self.composition.slots[slot], self.hosts
        if not rows.parts:
            return h
        attached, detached = h.index_select(0, rows.attached), h.detach().index_select(0, rows.detached)
        grown, shadows = self._grown(slot, leaves, rows, attached, detached)
        gates = self._gates[slot]
        if gates is not None:
            grown, shadows = self._gated(slot, leaves, torch.cat([attached, detached]), torch.cat([grown, shadows]))
        weight = rows.alpha.view(-1, *[1] * (h.dim() - 1))
        changed = h.index_copy(0, rows.attached, torch.lerp(attached, grown, weight.to(grown.dtype)))
        # Biases of seeds reach beyond the true positions of a feature map.
        return hosts.cut(self._pools[slot], torch.cat([changed, shadows, h.index_select(0, rows.without)]))

    def _grown(
        self, slot: int, leaves: Leaves, rows: SlotRows, attached: Tensor, detached: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What seeds make of the attached and the detached rows, in their order."""
        grown, shadows = [], []
        pieces = zip(attached.split(rows.attached_sizes), detached.split(rows.detached_sizes), strict=True)
        for i, (acting, young) in enumerate(pieces):
            batched, table, constants = self._parts[slot][i]
            part, leaf = rows.parts[i], leaves.parts[slot][i]
            weights = _with_again(table, leaf, leaf.detach(), part.again)
            inputs = torch.cat([young, acting]) if part.incubating and len(acting) else (young if part.incubating else acting)
            out = batched.forward(weights, constants, inputs)
            shadow, changed = out.split([part.incubating, len(out) - part.incubating])
            shadows.append(shadow)
            grown.append(changed)
        return torch.cat(grown), torch.cat(shadows)

    def _gated(self, slot: int, leaves: Leaves, h: Tensor, grown: Tensor) -> tuple[Tensor, Tensor]:
        gates, found, leaf = self.composition.slots[slot].gates, self._gates[slot], leaves.gates[slot]
        assert gates is not None
        assert found is not None
        assert leaf is not None
        table, constants = found
        weights = _with_again(table, leaf, leaf.detach(), gates.again)
        seen = h.index_select(0, gates.rows)
        is_map = self.hosts.form.layout.startswith("conv")
        opening = seeds.gate(weights, constants, seen, is_map=is_map)
        mixed = seen + opening * (grown.index_select(0, gates.rows) - seen)
        grown = grown.index_copy(0, gates.rows, mixed)
        attached = len(self.composition.slots[slot].attached)
        return grown[:attached], grown[attached:]


def _with_again(table: Table, leaf: Tensor, constant: Tensor, again: Tensor) -> dict[str, Tensor]:
    """The weights of own rows, then of those that pass again."""
    own = table.split(leaf)
    if len(again) == 0:
        return own
    second = table.split(constant.index_select(0, again))
    return {name: torch.cat([tensor, second[name]]) for name, tensor in own.items()}

"""Which rows pass where: states of the seeds of N networks at one moment, as index tensors for one stacked pass.

A pass has a *row* for each network, and further rows for variants of it: a network with an incubating seed at full
strength (its shadow), or without one of its live seeds. A variant's row begins at the slot where it differs, so nothing
before that is computed again; from there on it passes through the same stages and seeds as its network, as constants.
At each slot the rows that meet a seed are sorted by blueprint, and each blueprint is one batched call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.lifecycle import IN_FORWARD, Stage

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SeedStates:
    """Of the networks that take part, [n, slots] each, on the CPU."""

    stage: Ints
    blueprint: Ints
    gated: NDArray[np.bool_]
    alpha: NDArray[np.float64]

    @property
    def acting(self) -> NDArray[np.bool_]:
        return np.isin(self.stage, [int(stage) for stage in IN_FORWARD])

    @property
    def incubating(self) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = self.stage == Stage.TRAINING
        return found

    @property
    def grown(self) -> SeedStates:
        """Without incubating seeds."""
        stage = np.where(self.incubating, int(Stage.DORMANT), self.stage)
        return SeedStates(stage, self.blueprint, self.gated, self.alpha)

    def select(self, rows: Ints) -> SeedStates:
        return SeedStates(self.stage[rows], self.blueprint[rows], self.gated[rows], self.alpha[rows])

    def cut(self, slots: int) -> SeedStates:
        """The first slots alone."""
        return SeedStates(*(getattr(self, name)[:, :slots] for name in ("stage", "blueprint", "gated", "alpha")))

    @property
    def removable(self) -> NDArray[np.bool_]:
        """Acting, and not kept for good: what a leave-one-out is measured of."""
        found: NDArray[np.bool_] = self.acting & (self.stage != Stage.FOSSILIZED)
        return found


@dataclass(frozen=True, slots=True)
class SeedGroup:
    """The seeds of one blueprint at one slot. Its call has rows for [incubating, acting, acting in a variant]."""

    blueprint: int
    own: Tensor
    """Networks that have such a seed: the incubating first, then the acting."""
    incubating: int
    again: Tensor
    """Of each row of a variant, its seed: an index into `own`."""

    @property
    def networks(self) -> Tensor:
        """Of each row of the call."""
        return torch.cat([self.own, self.own[self.again]])


@dataclass(frozen=True, slots=True)
class Gates:
    """The gated seeds of one slot, among [attached, detached] rows of the slot."""

    own: Tensor
    """Networks."""
    again: Tensor
    """Of each row of a variant, its gate: an index into `own`."""
    rows: Tensor
    """Places of own gates, then of those in variants."""

    @property
    def networks(self) -> Tensor:
        return torch.cat([self.own, self.own[self.again]])


@dataclass(frozen=True, slots=True)
class SlotRows:
    """What happens at one slot. Rows are sorted by part."""

    parts: tuple[SeedGroup, ...]
    attached: Tensor
    """Rows that an acting seed changes: of networks and of variants."""
    alpha: Tensor
    """[attached]"""
    detached: Tensor
    """Rows whose shadow begins here."""
    gates: Gates | None
    without: Tensor
    """Rows that go on a second time without their seed."""
    attached_sizes: list[int]
    """By part."""
    detached_sizes: list[int]


@dataclass(frozen=True, slots=True)
class Composition:
    """One pass of n networks."""

    networks: int
    slots: tuple[SlotRows, ...]
    variants: tuple[Tensor, ...]
    """For each stage, then for the head: the networks of the variants' rows that exist there."""
    variants_cpu: tuple[Ints, ...]
    """The same on the CPU."""
    variant_slots: Tensor
    """Of all variants, in the order of their rows: the slot where they differ."""
    shadows: Tensor
    """Of all variants: bool, whether it is a shadow."""


def compose(states: SeedStates, *, removals: bool, device: torch.device, dtype: torch.dtype) -> Composition:
    """With the shadows of all incubating seeds; `removals` adds every network without each of its removable seeds."""
    networks, slots = states.stage.shape
    variant_networks: Ints = np.zeros(0, dtype=np.int64)
    variant_slots: list[int] = []
    variant_shadows: list[bool] = []
    found, before = [], []
    for slot in range(slots):
        before.append(variant_networks)
        rows, started, left = _slot(states, slot, variant_networks, removals, device, dtype)
        found.append(rows)
        variant_networks = np.concatenate([variant_networks, started, left])
        variant_slots += [slot] * (len(started) + len(left))
        variant_shadows += [True] * len(started) + [False] * len(left)
    before.append(variant_networks)

    def moved(values: Sequence[int] | Ints | Sequence[bool], kind: torch.dtype = torch.int64) -> Tensor:
        return torch.as_tensor(np.asarray(values), dtype=kind).to(device)

    return Composition(
        networks,
        tuple(found),
        tuple(moved(one) for one in before),
        tuple(before),
        moved(variant_slots),
        moved(variant_shadows, torch.bool),
    )


def _slot(
    states: SeedStates, slot: int, variants: Ints, removals: bool, device: torch.device, dtype: torch.dtype
) -> tuple[SlotRows, Ints, Ints]:
    """The slot, and the networks whose shadows, and whose removals, begin here."""
    n = len(states.stage)
    acting, incubating, kind = states.acting[:, slot], states.incubating[:, slot], states.blueprint[:, slot]
    parts, attached, detached, again_networks = [], [], [], []
    for blueprint in np.unique(kind[acting | incubating]):
        young = np.flatnonzero(incubating & (kind == blueprint))
        old = np.flatnonzero(acting & (kind == blueprint))
        second = np.flatnonzero(acting[variants] & (kind[variants] == blueprint))  # among the variants' rows
        place = np.zeros(n, dtype=np.int64)
        place[old] = len(young) + np.arange(len(old))
        parts.append((int(blueprint), np.concatenate([young, old]), len(young), place[variants[second]]))
        attached.append(np.concatenate([old, n + second]))
        again_networks.append(np.concatenate([old, variants[second]]))
        detached.append(young)
    everyone = _joined(again_networks)  # network of each attached row
    young = _joined(detached)
    left = np.flatnonzero(states.removable[:, slot]) if removals else np.zeros(0, dtype=np.int64)

    def moved(values: Ints) -> Tensor:
        return torch.from_numpy(values).to(device)

    rows = SlotRows(
        tuple(SeedGroup(blueprint, moved(own), count, moved(again)) for blueprint, own, count, again in parts),
        moved(_joined(attached)),
        torch.from_numpy(states.alpha[everyone, slot]).to(device, dtype),
        moved(young),
        _gates(states.gated[:, slot], _joined(attached), everyone, young, device),
        moved(left),
        [len(one) for one in attached],
        [len(one) for one in detached],
    )
    return rows, young, left


def _gates(
    gated: NDArray[np.bool_], attached: Ints, attached_networks: Ints, detached: Ints, device: torch.device
) -> Gates | None:
    n = len(gated)
    networks = np.concatenate([attached_networks, detached])  # of [attached, detached]
    first = np.concatenate([attached < n, np.ones(len(detached), dtype=np.bool_)])  # not in a variant
    own = np.flatnonzero(gated[networks] & first)
    second = np.flatnonzero(gated[networks] & ~first)
    if len(own) == 0:
        return None
    place = np.zeros(n, dtype=np.int64)
    place[networks[own]] = np.arange(len(own))
    again, rows = place[networks[second]], np.concatenate([own, second])
    return Gates(*(torch.from_numpy(one).to(device) for one in (networks[own], again, rows)))


def _joined(parts: Sequence[Ints]) -> Ints:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

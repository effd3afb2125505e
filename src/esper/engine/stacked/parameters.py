"""The parameters of many networks in one tensor [N, P]: padded to the widest, filled from counted random numbers.

A network of true sizes has zeros where others are wider. The optimizer leaves them alone (`real`): a padded channel
that is zero may have a gradient, because a norm's mean reads it. So padding changes no number. Tensors keep torch's own
order of axes, so that a plain module is a slice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

Segment = tuple[Tensor, int]
"""True sizes [N] int64, and the size to which all are padded."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a parameter: segments one after the other, such as queries, keys and values; each is padded."""

    segments: tuple[Segment, ...]
    centred: bool = False
    """Padding lies on both sides, as around the taps of a smaller kernel; else at the end."""

    @property
    def padded(self) -> int:
        return sum(size for _, size in self.segments)

    @property
    def true(self) -> Tensor:
        """[N]"""
        if len(self.segments) == 1:
            return self.segments[0][0]
        return torch.stack([true for true, _ in self.segments]).sum(0)

    def positions(self) -> tuple[Tensor, Tensor]:
        """For each padded position its true one [N, padded], and whether there is one."""
        found, valid, start = [], [], torch.zeros_like(self.segments[0][0])
        for true, padded in self.segments:
            place = torch.arange(padded, device=true.device).expand(len(true), -1)
            if self.centred:
                place = place - ((padded - true) // 2)[:, None]
            found.append(start[:, None] + place)
            valid.append((place >= 0) & (place < true[:, None]))
            start = start + true
        return torch.cat(found, 1), torch.cat(valid, 1)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of a module, for N networks."""

    name: str
    """As in the plain module's `state_dict`."""
    axes: tuple[Axis, ...]
    fan_in: Tensor | None = None
    """[N] int64: torch draws it uniformly, with a bound from these; None is drawn from nothing."""
    value: float | None = None
    """What it is set to in the end; what was drawn before that counts as used."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis.padded for axis in self.axes)


def linear(name: str, outputs: Axis, inputs: Axis, *, bias: bool = True, value: float | None = None) -> list[Parameter]:
    """As `nn.Linear`; `value` is set after torch has drawn."""
    return weight_and_bias(name, (outputs, inputs), inputs.true, bias=bias, value=value)


def weight_and_bias(
    name: str, axes: tuple[Axis, ...], fan_in: Tensor, *, bias: bool = True, value: float | None = None
) -> list[Parameter]:
    made = [Parameter(f"{name}.weight", axes, fan_in, value)]
    return [*made, Parameter(f"{name}.bias", axes[:1], fan_in, value)] if bias else made


def affine(name: str, channels: Axis) -> list[Parameter]:
    """Of a norm."""
    return [Parameter(f"{name}.weight", (channels,), value=1.0), Parameter(f"{name}.bias", (channels,), value=0.0)]


class Table:
    """All parameters of a module, of N networks, as the columns of one tensor [N, P]."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.parameters = tuple(parameters)
        self.numbers = [math.prod(parameter.shape) for parameter in self.parameters]
        """Padded elements of each."""
        self.width = sum(self.numbers)
        """P"""

    @cached_property
    def sizes(self) -> Tensor:
        """[N] true parameters of each network."""
        return torch.stack(self._elements).sum(0)

    @cached_property
    def real(self) -> Tensor:
        """[N, P] bool: what is no padding."""
        return torch.cat([_crossed(parameter, self._axes)[1] for parameter in self.parameters], 1)

    @cached_property
    def drawn(self) -> Tensor:
        """[N] random numbers that each network's first weights need."""
        drawn = [count for p, count in zip(self.parameters, self._elements, strict=True) if p.fan_in is not None]
        return torch.stack(drawn).sum(0) if drawn else torch.zeros_like(self.sizes)

    @cached_property
    def _axes(self) -> dict[Axis, tuple[Tensor, ...]]:
        """For each axis: positions, which of them are true, and true sizes."""
        axes = dict.fromkeys(axis for parameter in self.parameters for axis in parameter.axes)
        return {axis: (*axis.positions(), axis.true) for axis in axes}

    @cached_property
    def _elements(self) -> list[Tensor]:
        """[N] true elements of each parameter."""
        found = []
        for parameter in self.parameters:
            count = parameter.axes[0].true
            for axis in parameter.axes[1:]:
                count = count * axis.true
            found.append(count)
        return found

    @cached_property
    def _bounds(self) -> list[Tensor | None]:
        """[N] float32: between plus and minus which each parameter is drawn."""
        return [None if p.fan_in is None or p.value is not None else _bound(p.name, p.fan_in) for p in self.parameters]

    def fill(self, uniforms: Tensor, rows: Tensor | None = None, start: Tensor | None = None) -> Tensor:
        """First weights [n, P] float32 of the networks `rows` (all, if None), from numbers [n, count] in [0, 1): those
        that torch would draw for the module. `start` [n] are how many of a network's numbers were used before.
        """

        def chosen(column: Tensor) -> Tensor:
            return column if rows is None else column.index_select(0, rows)

        start = uniforms.new_zeros(len(uniforms), dtype=torch.int64) if start is None else start
        axes = {axis: tuple(chosen(column) for column in known) for axis, known in self._axes.items()}
        columns = []
        for parameter, count, bound in zip(self.parameters, self._elements, self._bounds, strict=True):
            index, valid = _crossed(parameter, axes)
            if bound is None:
                columns.append(valid * (parameter.value or 0.0))
            else:
                place = (start[:, None] + index).clamp(0, uniforms.shape[1] - 1)
                columns.append(torch.where(valid, _drawn(uniforms.gather(1, place), chosen(bound)[:, None]), 0.0))
            if parameter.fan_in is not None:
                start = start + chosen(count)
        return torch.cat(columns, 1)

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """[n, P] as tensors [n, *shape] by name: views, with one gradient for all of them."""
        pieces = torch.split(flat, self.numbers, 1)
        return {
            parameter.name: piece.view(len(flat), *parameter.shape)
            for parameter, piece in zip(self.parameters, pieces, strict=True)
        }

    def state_dict(self, flat: Tensor, row: int) -> dict[str, Tensor]:
        """The tensors of one network, without padding: as its plain module has them."""
        found, real = {}, torch.split(self.real[row], self.numbers)
        for parameter, piece, valid in zip(self.parameters, torch.split(flat[row], self.numbers), real, strict=True):
            shape = [int(axis.true[row]) for axis in parameter.axes]
            found[parameter.name] = piece[valid].reshape(shape).clone()
        return found


def _crossed(parameter: Parameter, axes: Mapping[Axis, tuple[Tensor, ...]]) -> tuple[Tensor, Tensor]:
    """For each padded element its true index in row-major order [n, elements], and whether there is one."""
    index, valid, _ = axes[parameter.axes[0]]
    for axis in parameter.axes[1:]:
        place, real, size = axes[axis]
        index = (index[:, :, None] * size[:, None, None] + place[:, None, :]).flatten(1)
        valid = (valid[:, :, None] & real[:, None, :]).flatten(1)
    return index, valid


def _bound(name: str, fan_in: Tensor) -> Tensor:
    root = fan_in.double().sqrt()
    # kaiming_uniform_ with a = √5 for weights
    return (1.0 / root if name.endswith("bias") else math.sqrt(3.0) * (math.sqrt(2.0 / 6.0) / root)).float()


def _drawn(uniforms: Tensor, bound: Tensor) -> Tensor:
    """Uniform between ± a bound, rounded once, as torch does it."""
    return (uniforms.double() * (2.0 * bound).double() - bound.double()).float()

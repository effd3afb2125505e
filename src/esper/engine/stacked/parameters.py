"""The parameters of many networks in one tensor [N, P]: padded to the widest, filled from counted random numbers.

A network of true sizes has zeros where others are wider. The optimizer leaves them alone (`real`): a padded channel
that is zero may have a gradient, because a norm's mean reads it. So padding changes no number. Tensors keep torch's own
order of axes, so that a plain module is a slice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
        return torch.stack([true for true, _ in self.segments]).sum(0)

    def places(self) -> tuple[Tensor, Tensor]:
        """For each padded place its true one [N, padded], and whether there is one."""
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

    @property
    def sizes(self) -> Tensor:
        """[N] true numbers of elements."""
        return torch.stack([axis.true for axis in self.axes]).prod(0)

    def elements(self, known: dict[Axis, tuple[Tensor, Tensor]] | None = None) -> tuple[Tensor, Tensor]:
        """For each padded element its true index in row-major order [N, elements], and whether there is one.

        `known` keeps the places of axes that parameters share.
        """
        known = {} if known is None else known
        networks = self.axes[0].segments[0][0].shape[0]
        device = self.axes[0].segments[0][0].device
        index = torch.zeros((networks, 1), dtype=torch.int64, device=device)
        valid = torch.ones((networks, 1), dtype=torch.bool, device=device)
        for axis in self.axes:
            if axis not in known:
                known[axis] = axis.places()
            place, real = known[axis]
            index = (index[:, :, None] * axis.true[:, None, None] + place[:, None, :]).flatten(1)
            valid = (valid[:, :, None] & real[:, None, :]).flatten(1)
        return index, valid


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
        return torch.stack([parameter.sizes for parameter in self.parameters]).sum(0)

    @cached_property
    def real(self) -> Tensor:
        """[N, P] bool: what is no padding."""
        return torch.cat([parameter.elements()[1] for parameter in self.parameters], 1)

    @cached_property
    def drawn(self) -> Tensor:
        """[N] random numbers that each network's first weights need."""
        drawn = [parameter.sizes for parameter in self.parameters if parameter.fan_in is not None]
        return torch.stack(drawn).sum(0) if drawn else torch.zeros_like(self.sizes)

    def fill(self, uniforms: Tensor, start: Tensor | None = None) -> Tensor:
        """First weights [N, P] float32, from numbers [N, count] in [0, 1): those that torch would draw for the module.

        `start` [N] are how many of a network's numbers were used before.
        """
        start = torch.zeros_like(self.drawn) if start is None else start
        columns, known = [], dict[Axis, tuple[Tensor, Tensor]]()
        for parameter in self.parameters:
            index, valid = parameter.elements(known)
            if parameter.value is not None:
                column = torch.full(valid.shape, parameter.value, device=uniforms.device)
            else:
                place = (start[:, None] + index).clamp(0, uniforms.shape[1] - 1)
                column = _drawn(uniforms.gather(1, place), parameter)
            if parameter.fan_in is not None:
                start = start + parameter.sizes
            columns.append(torch.where(valid, column, 0.0))
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
        found = {}
        for parameter, piece in zip(self.parameters, torch.split(flat[row], self.numbers), strict=True):
            _, valid = parameter.elements()
            shape = [int(axis.true[row]) for axis in parameter.axes]
            found[parameter.name] = piece[valid[row]].reshape(shape).clone()
        return found


def _drawn(uniforms: Tensor, parameter: Parameter) -> Tensor:
    """Uniform between ± a bound, rounded once, as torch does it."""
    assert parameter.fan_in is not None
    fan_in = parameter.fan_in.double()
    if parameter.name.endswith("bias"):
        bound = 1.0 / fan_in.sqrt()
    else:
        bound = math.sqrt(3.0) * (math.sqrt(2.0 / 6.0) / fan_in.sqrt())  # kaiming_uniform_ with a = √5
    bound = bound.float()[:, None]
    return (uniforms.double() * (2.0 * bound).double() - bound.double()).float()

"""Rules over expressions: which of four classes a point of a few coordinates has, for many problems at once."""

from __future__ import annotations

import torch
from torch import Tensor

from esper.tasks.counted import Purpose, normals
from esper.tasks.grammar_forms import CLASSES
from esper.tasks.grammar_kinds import ClassRule, Expression
from esper.tasks.grammar_settings import Settings

COORDINATES = 4
UNITS = 6
"""Waves of a landscape, hidden units of a network."""
PER_EXPRESSION = COORDINATES * (COORDINATES + UNITS) + 2 * UNITS
"""Random numbers that an expression is made of."""


def classes_of(settings: Settings, points: Tensor) -> Tensor:
    """[n, count] int64 from points [n, count, COORDINATES]: the classes are equally common, to one point."""
    count = points.shape[1]
    drawn = normals(settings.keys, Purpose.RELATION, 2 * PER_EXPRESSION).chunk(2, 1)
    used = torch.arange(COORDINATES, device=points.device) < settings.dimensions[:, None]
    kinds = (settings.first, settings.second)
    one, other = (
        _standardised(expression(kind, points, used, numbers, settings.steepness))
        for kind, numbers in zip(kinds, drawn, strict=True)
    )
    rule = settings.rule[:, None]
    rank = ranks(torch.where(rule == ClassRule.SUM, one + other, one))
    # The lower and the upper half of the first, each halved by the second: four equal classes from two bits.
    bits = ranks((2 * rank // count) * 1e3 + other) * CLASSES // count
    bands = rank * CLASSES // count
    cycles = (rank * 2 * CLASSES // count) % CLASSES
    return torch.where(rule == ClassRule.BITS, bits, torch.where(rule == ClassRule.CYCLES, cycles, bands))


def expression(kind: Tensor, points: Tensor, used: Tensor, numbers: Tensor, steepness: Tensor) -> Tensor:
    """[n, count]: each row's expression of its points. Its numbers turn the points before anything is made of them."""
    n = len(points)
    parts = [COORDINATES * COORDINATES, COORDINATES * UNITS, UNITS, UNITS]
    turn, slopes, phase, weight = torch.split(numbers, parts, 1)
    turn = turn.reshape(n, COORDINATES, COORDINATES) * used[:, :, None]
    turned = points @ (turn / turn.norm(dim=1, keepdim=True))  # [n, count, COORDINATES], unit variance each
    a, b, c = turned[..., 0], turned[..., 1], turned[..., 2]
    steep = steepness.to(points.dtype)[:, None]
    slopes = slopes.reshape(n, COORDINATES, UNITS) * used[:, :, None] * steep[:, :, None]
    units = points @ slopes + 2.0 * phase[:, None]  # [n, count, UNITS]
    made = {
        Expression.LINEAR: a,
        Expression.PRODUCT: a * b,
        Expression.RADIUS: a * a + b * b,
        Expression.CROSS: a.abs() - b.abs(),
        Expression.WAVES: units.sin().sum(2),
        Expression.NETWORK: (units.tanh() * weight[:, None]).sum(2),
        Expression.ANGLE: torch.atan2(b, a),
        Expression.FOLD: a.abs(),
        Expression.BOARD: (steep * a).sin() * (steep * b).sin(),
        Expression.SPIRAL: (torch.atan2(b, a) + 1.5 * steep * (a * a + b * b + 0.01).sqrt()).sin(),
        Expression.PARITY: a * b * c,
    }
    table = torch.stack([made[one] for one in Expression])  # [kinds, n, count]
    return table[kind, torch.arange(n, device=points.device)]


def _standardised(values: Tensor) -> Tensor:
    centred = values - values.mean(1, keepdim=True)
    return centred / centred.std(1, keepdim=True).clamp(min=1e-6)


def ranks(values: Tensor) -> Tensor:
    """[n, count] int64: 0 for the smallest of a row, count − 1 for the largest."""
    order = values.argsort(1)
    places = torch.arange(values.shape[1], device=values.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places)

"""Random numbers that are counted, not streamed: a number is a function of (key of the draw, purpose, index).

There is no state, so numbers can be made in any order, for any batch of draws, on any device, and are the same. The
arithmetic is splitmix64 (Steele, Lea, Flood 2014) in int64 tensors, whose products wrap modulo 2⁶⁴ on every backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import cache, lru_cache

import torch
from torch import Tensor


class Purpose(IntEnum):
    """What numbers are for. Numbers of two purposes have nothing to do with each other."""

    KEY = 0
    TABLE = 1
    SETTINGS = 2
    HOST = 3
    SEED = 4
    MINIBATCH = 5
    RELATION = 6
    LATENT = 7
    STRUCTURE = 8
    VARIANT = 9
    BASIS = 10
    NOISE = 11
    GAIN = 12
    OFFSET = 13
    DISTRACTOR = 14
    HINT = 15
    LABEL = 16
    PICK = 17
    RENT = 18


def _signed(value: int) -> int:
    """The int64 of the same 64 bits."""
    return (value + 2**63) % 2**64 - 2**63


STEP = _signed(0x9E3779B97F4A7C15)
FIRST, SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def mix(z: Tensor) -> Tensor:
    """splitmix64's one-to-one scrambling of 64 bits, element by element. int64 → int64"""
    # `>>` of a negative int64 repeats its sign; the masks make the shifts those of unsigned numbers.
    z = (z ^ ((z >> 30) & (2**34 - 1))) * FIRST
    z = (z ^ ((z >> 27) & (2**37 - 1))) * SECOND
    return z ^ ((z >> 31) & (2**33 - 1))


def draw_keys(draw_ids: Tensor, *, stream: int, streams: int) -> Tensor:
    """[N] int64: a key per draw. Draws of different streams (training, held out, …) never share one: `mix` is
    one-to-one, and so is the number that it is given."""
    return mix(draw_ids * streams + stream)


@cache
def _purpose_key(purpose: int) -> int:
    # Of a negative number, which no draw's key is made of: else key a with purpose b could be key b with purpose a.
    return int(mix(torch.tensor(-1 - purpose)))


def bits(keys: Tensor, purpose: int, count: int, first: Tensor | int = 0) -> Tensor:
    """[N, count] int64, all 64 bits random: the numbers of each key from the index `first` ([N] or one for all) on."""
    start = mix(keys + _purpose_key(purpose))  # [N]
    index = torch.arange(1, count + 1, device=keys.device)  # [count]
    index = index + (first[:, None] if isinstance(first, Tensor) else first)
    return mix(start[:, None] + index * STEP)


def _top(drawn: Tensor, size: int) -> Tensor:
    """The uppermost bits, as a number from 0 to 2^size − 1."""
    top: Tensor = (drawn >> (64 - size)) & (2**size - 1)
    return top


def uniforms(keys: Tensor, purpose: int, count: int, first: Tensor | int = 0) -> Tensor:
    """[N, count] float32 in [0, 1): multiples of 2⁻²⁴, exact on every device."""
    return _top(bits(keys, purpose, count, first), 24).to(torch.float32) * 2.0**-24


def integers(keys: Tensor, purpose: int, count: int, below: Tensor | int, first: Tensor | int = 0) -> Tensor:
    """[N, count] int64 from 0 to below − 1 (`below` is [N] or one for all, at most 2²⁴)."""
    limit = below[:, None] if isinstance(below, Tensor) else below
    return (_top(bits(keys, purpose, count, first), 24) * limit) >> 24


def chosen(u: Tensor, weights: Sequence[float]) -> Tensor:
    """The index into the weights that each uniform number falls on: as often as its weight says."""
    edges = torch.tensor(weights, dtype=torch.float64, device=u.device).cumsum(0)
    return torch.searchsorted(edges[:-1] / edges[-1], u.double().contiguous(), right=True)


def normals(keys: Tensor, purpose: int, count: int) -> Tensor:
    """[N, count] float32: standard normal numbers (Box and Muller), one per index, made in float64."""
    drawn = bits(keys, purpose, count)
    radius = (-2.0 * ((_top(drawn, 32).double() + 1.0) * 2.0**-32).log()).sqrt()
    return (radius * ((drawn & (2**32 - 1)).double() * (torch.pi * 2.0**-31)).cos()).float()


TABLE_SIZE = 2**17
"""Numbers in the tables for the bulk of the data: half a megabyte each, so that they stay in a core's cache."""


@lru_cache(maxsize=8)
def _normal_table(device: torch.device) -> Tensor:
    return normals(torch.zeros(1, dtype=torch.int64), Purpose.TABLE, TABLE_SIZE)[0].to(device)


@lru_cache(maxsize=8)
def _integer_table(device: torch.device) -> Tensor:
    return integers(torch.ones(1, dtype=torch.int64), Purpose.TABLE, TABLE_SIZE, 2**24)[0].to(device, torch.int32)


def noise(keys: Tensor, purpose: int, count: int, length: int) -> Tensor:
    """[N, count, length] float32: normal numbers for the bulk of the data.

    Each of the `count` rows is a stretch of one fixed table from a counted place on: 14 times cheaper than a number
    per element, and noise is all that it is good for, because rows overlap now and then.
    """
    return _stretches(_normal_table(keys.device), keys, purpose, count, length)


def random_bits(keys: Tensor, purpose: int, count: int, length: int) -> Tensor:
    """[N, count, length] int32 of 24 random bits, made as `noise` is."""
    return _stretches(_integer_table(keys.device), keys, purpose, count, length)


def _stretches(table: Tensor, keys: Tensor, purpose: int, count: int, length: int) -> Tensor:
    start = integers(keys, purpose, count, TABLE_SIZE - length + 1)
    windows = table.unfold(0, length, 1)  # a view: every stretch of the table
    return windows.index_select(0, start.flatten()).view(*start.shape, length)

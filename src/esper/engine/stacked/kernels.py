"""CUDA kernels (Triton) of what small networks spend their time on: norms, filters, patches, AdamW.

Each does in one pass over memory what takes ten or twenty calls of torch. They compute in float32 whatever the
activations are. `functions.py` has the same in plain torch, which tests compare these with, and which other devices use.

Activations are [V, positions, batch, channels], contiguous. `widths` [V] and `extents` [V, 2] say which channels and
positions of a network are true; `columns` is the padded size of the last axis of positions.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _true_position(p, columns, height, width):  # type: ignore[no-untyped-def]
    return ((p // columns) < height) & ((p % columns) < width)


# -- norms over the channels of a position ---------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows", "C"])
def _rows_forward(  # type: ignore[no-untyped-def]
    x, w, b, y, mean, rstd, widths, rows, C, R: tl.constexpr, CP: tl.constexpr, AFFINE: tl.constexpr
):
    v, r, c = tl.program_id(0), tl.program_id(1) * R + tl.arange(0, R), tl.arange(0, CP)
    width = tl.load(widths + v)
    at = (v.to(tl.int64) * rows + r)[:, None] * C + c[None]
    inside, real = (r < rows)[:, None] & (c < C)[None], (c < width)[None]
    value = tl.load(x + at, mask=inside & real, other=0.0).to(tl.float32)
    centre = tl.sum(value, 1) / width
    value = tl.where(real, value - centre[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(value * value, 1) / width + 1e-5)
    value = value * scale[:, None]
    if AFFINE:
        value = value * tl.load(w + v * C + c, mask=c < C)[None] + tl.load(b + v * C + c, mask=c < C)[None]
    tl.store(y + at, value, mask=inside)
    tl.store(mean + v.to(tl.int64) * rows + r, centre, mask=r < rows)
    tl.store(rstd + v.to(tl.int64) * rows + r, scale, mask=r < rows)


@triton.jit(do_not_specialize=["rows", "blocks", "C"])
def _rows_backward(  # type: ignore[no-untyped-def]
    x, w, dy, dx, dw, db, mean, rstd, widths, rows, blocks,
    C, R: tl.constexpr, CP: tl.constexpr, AFFINE: tl.constexpr,
):  # fmt: skip
    v, block, c = tl.program_id(0), tl.program_id(1), tl.arange(0, CP)
    r = block * R + tl.arange(0, R)
    width = tl.load(widths + v)
    at = (v.to(tl.int64) * rows + r)[:, None] * C + c[None]
    inside, real = (r < rows)[:, None] & (c < C)[None], (c < width)[None]
    scale = tl.load(rstd + v.to(tl.int64) * rows + r, mask=r < rows, other=0.0)[:, None]
    centre = tl.load(mean + v.to(tl.int64) * rows + r, mask=r < rows, other=0.0)[:, None]
    value = tl.load(x + at, mask=inside & real, other=0.0).to(tl.float32)
    value = tl.where(inside & real, (value - centre) * scale, 0.0)
    given = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    if AFFINE:
        place = (v * blocks + block) * C + c
        tl.store(dw + place, tl.sum(given * value, 0), mask=c < C)
        tl.store(db + place, tl.sum(given, 0), mask=c < C)
        given = given * tl.load(w + v * C + c, mask=c < C, other=0.0)[None]
    given = tl.where(real, given, 0.0)
    share = tl.sum(given, 1)[:, None] / width + value * (tl.sum(given * value, 1)[:, None] / width)
    tl.store(dx + at, tl.where(real, (given - share) * scale, 0.0), mask=inside)


# -- norms over the channels and positions of an example -----------------------------------------------------------------


@triton.jit(do_not_specialize=["columns", "P", "B", "C"])
def _examples_forward(  # type: ignore[no-untyped-def]
    x, w, b, y, mean, rstd, widths, extents, columns, P, B,
    C, PB: tl.constexpr, CP: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    v, e, c = tl.program_id(0), tl.program_id(1), tl.arange(0, CP)
    width, high, wide = tl.load(widths + v), tl.load(extents + 2 * v), tl.load(extents + 2 * v + 1)
    count = (width * high * wide).to(tl.float32)
    start = v.to(tl.int64) * P * B * C + e * C
    total = tl.zeros((PB, CP), tl.float32)
    for first in range(0, P, PB):
        p = first + tl.arange(0, PB)
        real = ((p < P) & _true_position(p, columns, high, wide))[:, None] & (c < width)[None]
        total += tl.load(x + start + p[:, None] * (B * C) + c[None], mask=real, other=0.0).to(tl.float32)
    centre = tl.sum(tl.sum(total, 1), 0) / count
    total = tl.zeros((PB, CP), tl.float32)
    for first in range(0, P, PB):
        p = first + tl.arange(0, PB)
        real = ((p < P) & _true_position(p, columns, high, wide))[:, None] & (c < width)[None]
        value = tl.load(x + start + p[:, None] * (B * C) + c[None], mask=real, other=0.0).to(tl.float32)
        value = tl.where(real, value - centre, 0.0)
        total += value * value
    scale = tl.rsqrt(tl.sum(tl.sum(total, 1), 0) / count + 1e-5)
    slope, shift = tl.load(w + v * C + c, mask=c < C, other=0.0), tl.load(b + v * C + c, mask=c < C, other=0.0)
    for first in range(0, P, PB):
        p = first + tl.arange(0, PB)
        there = p < P
        real = (there & _true_position(p, columns, high, wide))[:, None] & (c < width)[None]
        at = start + p[:, None] * (B * C) + c[None]
        value = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
        value = (value - centre) * scale * slope[None] + shift[None]
        if RELU:
            value = tl.maximum(value, 0.0)
        tl.store(y + at, tl.where(real, value, 0.0), mask=there[:, None] & (c < C)[None])
    tl.store(mean + v * B + e, centre)
    tl.store(rstd + v * B + e, scale)


@triton.jit(do_not_specialize=["columns", "P", "B", "C"])
def _examples_backward(  # type: ignore[no-untyped-def]
    x, w, b, dy, dx, dw, db, mean, rstd, widths, extents, columns, P, B,
    C, PB: tl.constexpr, CP: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    v, e, c = tl.program_id(0), tl.program_id(1), tl.arange(0, CP)
    width, high, wide = tl.load(widths + v), tl.load(extents + 2 * v), tl.load(extents + 2 * v + 1)
    count = (width * high * wide).to(tl.float32)
    start = v.to(tl.int64) * P * B * C + e * C
    centre, scale = tl.load(mean + v * B + e), tl.load(rstd + v * B + e)
    slope, shift = tl.load(w + v * C + c, mask=c < C, other=0.0), tl.load(b + v * C + c, mask=c < C, other=0.0)
    of_slope, of_shift = tl.zeros((PB, CP), tl.float32), tl.zeros((PB, CP), tl.float32)
    for first in range(0, P, PB):
        p = first + tl.arange(0, PB)
        real = ((p < P) & _true_position(p, columns, high, wide))[:, None] & (c < width)[None]
        at = start + p[:, None] * (B * C) + c[None]
        value = (tl.load(x + at, mask=real, other=0.0).to(tl.float32) - centre) * scale
        given = tl.load(dy + at, mask=real, other=0.0).to(tl.float32)
        if RELU:
            given = tl.where(value * slope[None] + shift[None] > 0.0, given, 0.0)
        of_slope += tl.where(real, given * value, 0.0)
        of_shift += given
    total_slope, total_shift = tl.sum(of_slope, 0), tl.sum(of_shift, 0)
    tl.store(dw + (v * B + e) * C + c, total_slope, mask=c < C)
    tl.store(db + (v * B + e) * C + c, total_shift, mask=c < C)
    level, tilt = tl.sum(total_shift * slope, 0) / count, tl.sum(total_slope * slope, 0) / count
    for first in range(0, P, PB):
        p = first + tl.arange(0, PB)
        there = p < P
        real = (there & _true_position(p, columns, high, wide))[:, None] & (c < width)[None]
        at = start + p[:, None] * (B * C) + c[None]
        value = (tl.load(x + at, mask=real, other=0.0).to(tl.float32) - centre) * scale
        given = tl.load(dy + at, mask=real, other=0.0).to(tl.float32)
        if RELU:
            given = tl.where(value * slope[None] + shift[None] > 0.0, given, 0.0)
        found = (given * slope[None] - level - value * tilt) * scale
        tl.store(dx + at, tl.where(real, found, 0.0), mask=there[:, None] & (c < C)[None])


# -- batch norm: over the batch and all positions, for each channel --------------------------------------------------------


@triton.jit(do_not_specialize=["columns", "P", "B", "C"])
def _batch_forward(  # type: ignore[no-untyped-def]
    x, w, b, y, mean, variance, extents, columns, P, B,
    C, R: tl.constexpr, CP: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    v, c = tl.program_id(0), tl.arange(0, CP)
    high, wide = tl.load(extents + 2 * v), tl.load(extents + 2 * v + 1)
    count, rows = (high * wide * B).to(tl.float32), P * B
    start = v.to(tl.int64) * rows * C
    total = tl.zeros((R, CP), tl.float32)
    for first in range(0, rows, R):
        r = first + tl.arange(0, R)
        real = ((r < rows) & _true_position(r // B, columns, high, wide))[:, None] & (c < C)[None]
        total += tl.load(x + start + r[:, None] * C + c[None], mask=real, other=0.0).to(tl.float32)
    centre = tl.sum(total, 0) / count
    total = tl.zeros((R, CP), tl.float32)
    for first in range(0, rows, R):
        r = first + tl.arange(0, R)
        real = ((r < rows) & _true_position(r // B, columns, high, wide))[:, None] & (c < C)[None]
        value = tl.load(x + start + r[:, None] * C + c[None], mask=real, other=0.0).to(tl.float32)
        value = tl.where(real, value - centre[None], 0.0)
        total += value * value
    spread = tl.sum(total, 0) / count
    slope = tl.load(w + v * C + c, mask=c < C, other=0.0) * tl.rsqrt(spread + 1e-5)
    shift = tl.load(b + v * C + c, mask=c < C, other=0.0)
    for first in range(0, rows, R):
        r = first + tl.arange(0, R)
        inside = (r < rows)[:, None] & (c < C)[None]
        real = inside & _true_position(r // B, columns, high, wide)[:, None]
        at = start + r[:, None] * C + c[None]
        value = (tl.load(x + at, mask=real, other=0.0).to(tl.float32) - centre[None]) * slope[None] + shift[None]
        if RELU:
            value = tl.maximum(value, 0.0)
        tl.store(y + at, tl.where(real, value, 0.0), mask=inside)
    tl.store(mean + v * C + c, centre, mask=c < C)
    tl.store(variance + v * C + c, spread, mask=c < C)


@triton.jit(do_not_specialize=["columns", "P", "B", "C"])
def _batch_backward(  # type: ignore[no-untyped-def]
    x, w, b, dy, dx, dw, db, mean, variance, extents, columns, P, B,
    C, R: tl.constexpr, CP: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    v, c = tl.program_id(0), tl.arange(0, CP)
    high, wide = tl.load(extents + 2 * v), tl.load(extents + 2 * v + 1)
    count, rows = (high * wide * B).to(tl.float32), P * B
    start = v.to(tl.int64) * rows * C
    centre = tl.load(mean + v * C + c, mask=c < C, other=0.0)
    scale = tl.rsqrt(tl.load(variance + v * C + c, mask=c < C, other=0.0) + 1e-5)
    slope, shift = tl.load(w + v * C + c, mask=c < C, other=0.0), tl.load(b + v * C + c, mask=c < C, other=0.0)
    of_slope, of_shift = tl.zeros((R, CP), tl.float32), tl.zeros((R, CP), tl.float32)
    for first in range(0, rows, R):
        r = first + tl.arange(0, R)
        real = ((r < rows) & _true_position(r // B, columns, high, wide))[:, None] & (c < C)[None]
        at = start + r[:, None] * C + c[None]
        value = (tl.load(x + at, mask=real, other=0.0).to(tl.float32) - centre[None]) * scale[None]
        given = tl.load(dy + at, mask=real, other=0.0).to(tl.float32)
        if RELU:
            given = tl.where(value * slope[None] + shift[None] > 0.0, given, 0.0)
        of_slope += tl.where(real, given * value, 0.0)
        of_shift += given
    total_slope, total_shift = tl.sum(of_slope, 0), tl.sum(of_shift, 0)
    tl.store(dw + v * C + c, total_slope, mask=c < C)
    tl.store(db + v * C + c, total_shift, mask=c < C)
    for first in range(0, rows, R):
        r = first + tl.arange(0, R)
        inside = (r < rows)[:, None] & (c < C)[None]
        real = inside & _true_position(r // B, columns, high, wide)[:, None]
        at = start + r[:, None] * C + c[None]
        value = (tl.load(x + at, mask=real, other=0.0).to(tl.float32) - centre[None]) * scale[None]
        given = tl.load(dy + at, mask=real, other=0.0).to(tl.float32)
        if RELU:
            given = tl.where(value * slope[None] + shift[None] > 0.0, given, 0.0)
        found = (given - total_shift[None] / count - value * (total_slope[None] / count)) * (scale * slope)[None]
        tl.store(dx + at, tl.where(real, found, 0.0), mask=inside)


# -- filters ---------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["H", "W", "E", "C"])
def _filter(x, w, y, H, W, E, C, K: tl.constexpr, AXES: tl.constexpr, BE: tl.constexpr, BACK: tl.constexpr):  # type: ignore[no-untyped-def]
    v, p, e = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BE + tl.arange(0, BE)
    row, column, c, half = p // W, p % W, e % C, K // 2
    start = v.to(tl.int64) * H * W * E
    total = tl.zeros((BE,), tl.float32)
    for tap in range(K**AXES):
        down, right = (tap // K - half, tap % K - half) if AXES == 2 else (0, tap - half)
        i, j = (row - down, column - right) if BACK else (row + down, column + right)
        if (i >= 0) & (i < H) & (j >= 0) & (j < W):
            seen = tl.load(x + start + (i * W + j) * E + e, mask=e < E, other=0.0).to(tl.float32)
            total += seen * tl.load(w + (v * C + c) * (K**AXES) + tap, mask=e < E, other=0.0)
    tl.store(y + start + p * E + e, total, mask=e < E)


@triton.jit(do_not_specialize=["H", "W", "B", "C", "blocks"])
def _filter_weights(  # type: ignore[no-untyped-def]
    x, dy, dw, H, W, B, C, blocks, K: tl.constexpr, AXES: tl.constexpr, BB: tl.constexpr, CP: tl.constexpr
):
    v, block, tap = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    half, c, b = K // 2, tl.arange(0, CP), block * BB + tl.arange(0, BB)
    down, right = (tap // K - half, tap % K - half) if AXES == 2 else (0, tap - half)
    inside = (b < B)[:, None] & (c < C)[None]
    start, each = v.to(tl.int64) * H * W * B * C, b[:, None] * C + c[None]
    total = tl.zeros((BB, CP), tl.float32)
    for p in range(H * W):
        i, j = p // W + down, p % W + right
        if (i >= 0) & (i < H) & (j >= 0) & (j < W):
            seen = tl.load(x + start + (i * W + j) * (B * C) + each, mask=inside, other=0.0).to(tl.float32)
            total += seen * tl.load(dy + start + p * (B * C) + each, mask=inside, other=0.0).to(tl.float32)
    tl.store(dw + ((v * blocks + block) * C + c) * (K**AXES) + tap, tl.sum(total, 0), mask=c < C)


@triton.jit(do_not_specialize=["H", "W", "B", "C"])
def _patches(x, y, H, W, B, C, K: tl.constexpr, AXES: tl.constexpr, BE: tl.constexpr, BACK: tl.constexpr):  # type: ignore[no-untyped-def]
    """`x` [V, H, W, B, C] → `y` [V, H, W, B, taps · C]; BACK: what each place of `x` gets from `y`, written to `x`."""
    v, e = tl.program_id(0), tl.program_id(2) * BE + tl.arange(0, BE)
    p = tl.program_id(1) + 0 * e  # the same for all, as a vector: so are the masks that follow from it
    row, column, half, taps = p // W, p % W, K // 2, K**AXES
    b, c, inside = e // C, e % C, e < B * C
    start = v.to(tl.int64) * H * W * B * C
    total = tl.zeros((BE,), tl.float32)
    for tap in range(K**AXES):
        down, right = (tap // K - half, tap % K - half) if AXES == 2 else (0, tap - half)
        i, j = (row - down, column - right) if BACK else (row + down, column + right)
        there = (i >= 0) & (i < H) & (j >= 0) & (j < W)
        if BACK:
            other = (start + (i * W + j) * (B * C)) * taps + (b * taps + tap) * C + c
            total += tl.load(y + other, mask=inside & there, other=0.0).to(tl.float32)
        else:
            seen = tl.load(x + start + (i * W + j) * (B * C) + e, mask=inside & there, other=0.0)
            tl.store(y + (start + p * (B * C)) * taps + (b * taps + tap) * C + c, seen, mask=inside)
    if BACK:
        tl.store(x + start + p * (B * C) + e, total, mask=inside)


# -- AdamW -------------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["m", "P", "blocks"])
def _adamw(weights, first, second, gradient, real, table, update, squares, m, P, blocks, BE: tl.constexpr):  # type: ignore[no-untyped-def]
    row, block = tl.program_id(0), tl.program_id(1)
    e = block * BE + tl.arange(0, BE)
    inside, at = e < P, row.to(tl.int64) * P + e
    line = table + (tl.load(update) * m + row) * 6
    size, small, kept, new1, new2, last = (
        tl.load(line), tl.load(line + 1), tl.load(line + 2), tl.load(line + 3), tl.load(line + 4), tl.load(line + 5)
    )  # fmt: skip
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.where(tl.load(real + at, mask=inside, other=0) != 0, g, 0.0)
    f, s = tl.load(first + at, mask=inside, other=0.0), tl.load(second + at, mask=inside, other=0.0)
    f += (g - f) * new1
    s += (g * g - s) * new2
    value = tl.load(weights + at, mask=inside, other=0.0) * kept - size * f / (tl.sqrt(s) + small)
    tl.store(weights + at, value, mask=inside)
    tl.store(first + at, f, mask=inside)
    tl.store(second + at, s, mask=inside)
    if last > 0:
        tl.store(squares + row * blocks + block, tl.sum(g * g, 0))


# -- launches ------------------------------------------------------------------------------------------------------------------

_ROWS, _BLOCK = 64, 1024


def _power(count: int) -> int:
    return max(16, triton.next_power_of_2(count))


def norm_rows(x: Tensor, affine: tuple[Tensor, Tensor] | None, widths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [V, rows, channels]: normalised, and mean and inverse deviation [V, rows]."""
    networks, rows, channels = x.shape
    y, mean = torch.empty_like(x), torch.empty((networks, rows), dtype=torch.float32, device=x.device)
    rstd, (w, b) = torch.empty_like(mean), affine or (x, x)
    grid = (networks, triton.cdiv(rows, _ROWS))
    _rows_forward[grid](x, w, b, y, mean, rstd, widths, rows, channels, _ROWS, _power(channels), affine is not None)
    return y, mean, rstd


def norm_rows_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, widths: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    networks, rows, channels = x.shape
    blocks = triton.cdiv(rows, _ROWS)
    dx, size = torch.empty_like(x), blocks if weight is not None else 0
    dw = torch.empty((networks, size, channels), dtype=torch.float32, device=x.device)
    db, w = torch.empty_like(dw), x if weight is None else weight
    _rows_backward[(networks, blocks)](
        x, w, dy, dx, dw, db, mean, rstd, widths, rows, blocks, channels, _ROWS, _power(channels), weight is not None
    )
    return (dx, None, None) if weight is None else (dx, dw.sum(1), db.sum(1))


def norm_examples(
    x: Tensor, affine: tuple[Tensor, Tensor], widths: Tensor, extents: Tensor, columns: int, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """x [V, positions, batch, channels]: normalised, and mean and inverse deviation [V, batch]."""
    networks, count, batch, channels = x.shape
    y, mean = torch.empty_like(x), torch.empty((networks, batch), dtype=torch.float32, device=x.device)
    rstd = torch.empty_like(mean)
    sizes = (channels, _positions(count, channels), _power(channels), relu)
    _examples_forward[(networks, batch)](x, *affine, y, mean, rstd, widths, extents, columns, count, batch, *sizes)
    return y, mean, rstd


def norm_examples_backward(
    dy: Tensor, x: Tensor, affine: tuple[Tensor, Tensor], mean: Tensor, rstd: Tensor, shape: tuple[Any, ...], relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    networks, count, batch, channels = x.shape
    dx, dw = torch.empty_like(x), torch.empty((networks, batch, channels), dtype=torch.float32, device=x.device)
    db = torch.empty_like(dw)
    sizes = (channels, _positions(count, channels), _power(channels), relu)
    _examples_backward[(networks, batch)](x, *affine, dy, dx, dw, db, mean, rstd, *shape, count, batch, *sizes)
    return dx, dw.sum(1), db.sum(1)


def _positions(count: int, channels: int) -> int:
    """Positions that a program holds at a time: about two thousand numbers."""
    return min(_power(count), max(16, 2048 // _power(channels)))


def batch_norm(
    x: Tensor, affine: tuple[Tensor, Tensor], extents: Tensor, columns: int, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """x [V, positions, batch, channels]: normalised, and mean and variance [V, channels]."""
    networks, count, batch, channels = x.shape
    y, mean = torch.empty_like(x), torch.empty((networks, channels), dtype=torch.float32, device=x.device)
    variance, sizes = torch.empty_like(mean), (channels, _positions(4096, channels), _power(channels), relu)
    _batch_forward[(networks,)](x, *affine, y, mean, variance, extents, columns, count, batch, *sizes, num_warps=8)
    return y, mean, variance


def batch_norm_backward(
    dy: Tensor,
    x: Tensor,
    affine: tuple[Tensor, Tensor],
    mean: Tensor,
    variance: Tensor,
    shape: tuple[Any, ...],
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    networks, count, batch, channels = x.shape
    dx, dw = torch.empty_like(x), torch.empty_like(mean)
    db, sizes = torch.empty_like(mean), (channels, _positions(4096, channels), _power(channels), relu)
    _batch_backward[(networks,)](x, *affine, dy, dx, dw, db, mean, variance, *shape, count, batch, *sizes, num_warps=8)
    return dx, dw, db


def _grid(x: Tensor) -> tuple[int, int, int, int]:
    """Height, width, batch and channels of x [V, *sizes, batch, channels]; a series is one row."""
    height, width = x.shape[1:-2] if x.dim() == 5 else (1, x.shape[1])
    return height, width, x.shape[-2], x.shape[-1]


def depthwise(x: Tensor, weight: Tensor, kernel: int, *, back: bool = False) -> Tensor:
    """weight [V, channels, taps], contiguous."""
    height, width, batch, channels = _grid(x)
    y, each = torch.empty_like(x), batch * channels
    grid = (x.shape[0], height * width, triton.cdiv(each, _BLOCK))
    _filter[grid](x, weight, y, height, width, each, channels, kernel, x.dim() - 3, _BLOCK, back)
    return y


def depthwise_weights(x: Tensor, dy: Tensor, kernel: int) -> Tensor:
    """[V, channels, taps]"""
    height, width, batch, channels = _grid(x)
    blocks, taps = triton.cdiv(batch, 16), kernel ** (x.dim() - 3)
    dw = torch.empty((x.shape[0], blocks, channels, taps), dtype=torch.float32, device=x.device)
    grid = (x.shape[0], blocks, taps)
    sizes = (kernel, x.dim() - 3, 16, _power(channels))
    _filter_weights[grid](x, dy, dw, height, width, batch, channels, blocks, *sizes)
    return dw.sum(1)


def patches(x: Tensor, kernel: int) -> Tensor:
    """[V, *sizes, batch, taps · channels]"""
    height, width, batch, channels = _grid(x)
    taps = kernel ** (x.dim() - 3)
    y = torch.empty((*x.shape[:-1], taps * channels), dtype=x.dtype, device=x.device)
    grid = (x.shape[0], height * width, triton.cdiv(batch * channels, _BLOCK))
    _patches[grid](x, y, height, width, batch, channels, kernel, x.dim() - 3, _BLOCK, False)
    return y


def patches_backward(dy: Tensor, kernel: int) -> Tensor:
    taps = kernel ** (dy.dim() - 3)
    dx = torch.empty((*dy.shape[:-1], dy.shape[-1] // taps), dtype=dy.dtype, device=dy.device)
    height, width, batch, channels = _grid(dx)
    grid = (dx.shape[0], height * width, triton.cdiv(batch * channels, _BLOCK))
    _patches[grid](dx, dy, height, width, batch, channels, kernel, dx.dim() - 3, _BLOCK, True)
    return dx


def adamw(
    weights: Tensor,
    moments: tuple[Tensor, Tensor],
    gradient: Tensor,
    real: Tensor,
    table: Tensor,
    update: Tensor,
    squares: Tensor,
) -> None:
    """One update in place; `squares` [m, blocks] takes the squared gradient where it is a row's last update."""
    m, width = weights.shape
    blocks = squares.shape[1]
    _adamw[(m, blocks)](weights, *moments, gradient, real, table, update, squares, m, width, blocks, _BLOCK)


def adamw_blocks(width: int) -> int:
    return int(triton.cdiv(width, _BLOCK))

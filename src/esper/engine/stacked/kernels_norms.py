"""Triton programs of the norms; `kernels.py` starts them and says what the tensors are."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _true_position(p, columns, height, width):
    return ((p // columns) < height) & ((p % columns) < width)


# -- norms over the channels of a position -----------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows", "C"])
def rows_forward(x, w, b, y, mean, rstd, widths, rows, C, R: tl.constexpr, CP: tl.constexpr, AFFINE: tl.constexpr):
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
def rows_backward(
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


# -- norms over the channels and positions of an example ---------------------------------------------------------------


@triton.jit(do_not_specialize=["columns", "P", "B", "C"])
def examples_forward(
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
def examples_backward(
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


# -- batch norm: over the batch and all positions, for each channel ----------------------------------------------------


@triton.jit(do_not_specialize=["columns", "P", "B", "C"])
def batch_forward(
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
def batch_backward(
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

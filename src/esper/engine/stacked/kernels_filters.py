"""Triton programs of filters, patches and AdamW; `kernels.py` starts them and says what the tensors are."""

from __future__ import annotations

import triton
import triton.language as tl

# -- filters -----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["H", "W", "E", "C"])
def filter(x, w, y, H, W, E, C, K: tl.constexpr, AXES: tl.constexpr, BE: tl.constexpr, BACK: tl.constexpr):
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
def filter_weights(
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
def patches(x, y, H, W, B, C, K: tl.constexpr, AXES: tl.constexpr, BE: tl.constexpr, BACK: tl.constexpr):
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


# -- AdamW -------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["m", "P", "blocks"])
def adamw(weights, first, second, gradient, real, table, update, squares, m, P, blocks, BE: tl.constexpr):
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

"""3×3 convolutions of few channels in bfloat16, written in Triton.

cuDNN's kernels are made for 64 channels and more: with 8 they keep a whole H200 busy for 20 µs, and these for 6
(docs/performance.md). One program makes a block of pixels. In memory an image is [row, column, channel], so the three
taps of one row of the kernel lie side by side, and three small matrix products make an output. The gradient of the
input is the same computation with the kernel turned round. The gradient of the weights is summed in blocks of pixels
and then over blocks: in the same order every time.

Import this only where Triton is.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

MOST_CHANNELS = 32
LEAST_BLOCKS, MOST_PARTS = 2, 256
"""Programs that share the sum of a weight's gradient, and blocks of pixels that each of them takes at least."""


def _convolve(
    x: tl.tensor,
    w: tl.tensor,
    b: tl.tensor,
    y: tl.tensor,
    pixels: tl.tensor,
    w_start: tl.tensor,
    w_out: tl.tensor,
    w_in: tl.tensor,
    w_row: tl.tensor,
    w_column: tl.tensor,
    height: tl.constexpr,
    width: tl.constexpr,
    inputs: tl.constexpr,
    outputs: tl.constexpr,
    taps: tl.constexpr,
    wide: tl.constexpr,
    has_bias: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """y[pixel, output] from x[pixel, input]; `taps` and `wide` are 3·inputs and outputs, up to a power of two."""
    pixel = tl.program_id(0) * block + tl.arange(0, block)
    column, row = pixel % width, pixel // width % height
    k, output = tl.arange(0, taps), tl.arange(0, wide)
    tap, channel = k // inputs, k % inputs
    seen = column[:, None] + tap[None, :]
    inside = (seen >= 1) & (seen <= width) & (tap < 3)[None, :] & (pixel < pixels)[:, None]
    known = (tap < 3)[:, None] & (output < outputs)[None, :]
    weights = w + w_start + output[None, :] * w_out + channel[:, None] * w_in + tap[:, None] * w_column
    total = tl.zeros((block, wide), tl.float32)
    for r in tl.static_range(3):
        there = inside & ((row + r >= 1) & (row + r <= height))[:, None]
        at = (pixel + (r - 1) * width - 1)[:, None] * inputs + k[None, :]
        values = tl.load(x + at, mask=there, other=0.0).to(tl.bfloat16)
        total = tl.dot(values, tl.load(weights + r * w_row, mask=known, other=0.0), total)
    if has_bias:
        total += tl.load(b + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    at = pixel[:, None] * outputs + output[None, :]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=(pixel < pixels)[:, None] & (output < outputs)[None, :])


def _sum_parts(
    x: tl.tensor,
    g: tl.tensor,
    sums: tl.tensor,
    pixels: tl.tensor,
    height: tl.constexpr,
    width: tl.constexpr,
    inputs: tl.constexpr,
    outputs: tl.constexpr,
    taps: tl.constexpr,
    wide: tl.constexpr,
    block: tl.constexpr,
    blocks: tl.constexpr,
) -> None:
    """sums[part]: the weights' gradient [row, column, input, output] and the bias's [output] over some blocks."""
    part = tl.program_id(0)
    k, output = tl.arange(0, taps), tl.arange(0, wide)
    tap = k // inputs
    first = tl.zeros((taps, wide), tl.float32)
    second = tl.zeros((taps, wide), tl.float32)
    third = tl.zeros((taps, wide), tl.float32)
    bias = tl.zeros((wide,), tl.float32)
    for turn in range(blocks):
        pixel = (part * blocks + turn) * block + tl.arange(0, block)
        column, row = pixel % width, pixel // width % height
        seen = column[:, None] + tap[None, :]
        inside = (seen >= 1) & (seen <= width) & (tap < 3)[None, :] & (pixel < pixels)[:, None]
        given = (pixel < pixels)[:, None] & (output < outputs)[None, :]
        gradient = tl.load(g + pixel[:, None] * outputs + output[None, :], mask=given, other=0.0)
        at = x + (pixel - 1)[:, None] * inputs + k[None, :]
        above = tl.load(at - width * inputs, mask=inside & (row >= 1)[:, None], other=0.0).to(tl.bfloat16)
        first = tl.dot(tl.trans(above), gradient, first)
        level = tl.load(at, mask=inside, other=0.0).to(tl.bfloat16)
        second = tl.dot(tl.trans(level), gradient, second)
        below = tl.load(at + width * inputs, mask=inside & (row + 2 <= height)[:, None], other=0.0).to(tl.bfloat16)
        third = tl.dot(tl.trans(below), gradient, third)
        bias += tl.sum(gradient.to(tl.float32), 0)
    to = sums + part * (9 * inputs + 1) * outputs
    at = to + k[:, None] * outputs + output[None, :]
    known = (tap < 3)[:, None] & (output < outputs)[None, :]
    tl.store(at, first, mask=known)
    tl.store(at + 3 * inputs * outputs, second, mask=known)
    tl.store(at + 6 * inputs * outputs, third, mask=known)
    tl.store(to + 9 * inputs * outputs + output, bias, mask=output < outputs)


def _sum_up(
    sums: tl.tensor,
    w: tl.tensor,
    b: tl.tensor,
    w_out: tl.tensor,
    w_in: tl.tensor,
    w_row: tl.tensor,
    w_column: tl.tensor,
    inputs: tl.constexpr,
    outputs: tl.constexpr,
    numbers: tl.constexpr,
    parts: tl.constexpr,
    each: tl.constexpr,
) -> None:
    """The gradients of weights and bias: the sum over parts."""
    number = tl.program_id(0) * numbers + tl.arange(0, numbers)
    length: tl.constexpr = (9 * inputs + 1) * outputs
    total = tl.zeros((numbers,), tl.float32)
    for start in range(0, parts, each):
        part = start + tl.arange(0, each)
        there = (part < parts)[:, None] & (number < length)[None, :]
        total += tl.sum(tl.load(sums + part[:, None] * length + number[None, :], mask=there, other=0.0), 0)
    output, channel = number % outputs, number // outputs % inputs
    column, row = number // (outputs * inputs) % 3, number // (outputs * inputs * 3)
    at = w + output * w_out + channel * w_in + row * w_row + column * w_column
    tl.store(at, total.to(w.dtype.element_ty), mask=row < 3)
    tl.store(b + output, total.to(b.dtype.element_ty), mask=(row == 3) & (number < length))


_convolve_kernel, _sum_parts_kernel, _sum_up_kernel = map(triton.jit, (_convolve, _sum_parts, _sum_up))


def _sizes(x: Tensor, outputs: int) -> dict[str, int]:
    inputs, height, width = x.shape[1:]
    return {
        "height": height,
        "width": width,
        "inputs": inputs,
        "outputs": outputs,
        "taps": _power(3 * inputs),
        "wide": _power(outputs),
        "block": _block(inputs, outputs),
    }


def _block(inputs: int, outputs: int) -> int:
    """Pixels that a program makes at a time: as many as its registers hold."""
    return 128 if max(inputs, outputs) <= 16 else 64


def _run(x: Tensor, w: Tensor, b: Tensor | None, y: Tensor, start: int, strides: tuple[int, ...]) -> None:
    outputs, pixels = y.shape[1], _pixels(x)
    _convolve_kernel[(triton.cdiv(pixels, _block(x.shape[1], outputs)),)](
        x,
        w,
        w if b is None else b,
        y,
        pixels,
        start,
        *strides,
        **_sizes(x, outputs),
        has_bias=b is not None,
        num_warps=4,
    )


def _power(size: int) -> int:
    """The next power of two that a matrix product takes."""
    return max(16, 1 << (size - 1).bit_length())


def _pixels(x: Tensor) -> int:
    return x.shape[0] * x.shape[2] * x.shape[3]


def _images(like: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    """[batch, channels, height, width], channels last in memory."""
    shape = (like.shape[0], channels, like.shape[2], like.shape[3])
    return torch.empty(shape, dtype=dtype, device=like.device, memory_format=torch.channels_last)


@torch.library.custom_op("esper::small_conv2d", mutates_args=())
def small_conv2d(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.conv2d(x, weight, bias, padding=1)` for 3×3 weights in bfloat16, and x with its channels last."""
    y = _images(x, weight.shape[0], torch.bfloat16)
    _run(x, weight, bias, y, 0, weight.stride())
    return y


@torch.library.custom_op("esper::small_conv2d_input", mutates_args=())
def _input_gradient(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    out, inside, row, column = weight.stride()
    found = _images(x, weight.shape[1], x.dtype)
    _run(gradient, weight, None, found, 2 * row + 2 * column, (inside, out, -row, -column))
    return found


@torch.library.custom_op("esper::small_conv2d_weight", mutates_args=())
def _weight_gradient(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    outputs, inputs = weight.shape[:2]
    pixels, block = _pixels(x), _block(inputs, outputs)
    blocks = max(LEAST_BLOCKS, triton.cdiv(pixels, block * MOST_PARTS))
    parts, length = triton.cdiv(pixels, block * blocks), (9 * inputs + 1) * outputs
    sums = torch.empty(parts, length, device=x.device)
    found, bias = torch.empty_like(weight), torch.empty(outputs, dtype=weight.dtype, device=x.device)
    _sum_parts_kernel[(parts,)](
        x,
        gradient,
        sums,
        pixels,
        **_sizes(x, outputs),
        blocks=blocks,
        num_warps=4,
        num_stages=1,
    )
    _sum_up_kernel[(triton.cdiv(length, 64),)](
        sums,
        found,
        bias,
        *found.stride(),
        inputs=inputs,
        outputs=outputs,
        numbers=64,
        parts=parts,
        each=32,
        num_warps=4,
    )
    return found, bias


@small_conv2d.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _images(x, weight.shape[0], torch.bfloat16)


@_input_gradient.register_fake
def _(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return _images(x, weight.shape[1], x.dtype)


@_weight_gradient.register_fake
def _(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(weight), weight.new_empty(weight.shape[0])


def by_pixel(x: Tensor) -> Tensor:
    """Channels last. Outside of the operators above, where the compiler sees it: what makes x can write it so."""
    return x.contiguous(memory_format=torch.channels_last)


def _note(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    gradient = by_pixel(gradient)
    found = _input_gradient(gradient, x, weight) if ctx.needs_input_grad[0] else None
    if not any(ctx.needs_input_grad[1:]):
        return found, None, None
    of_weight, of_bias = _weight_gradient(gradient, x, weight)
    return found, of_weight, of_bias if ctx.needs_input_grad[2] else None


small_conv2d.register_autograd(_backward, setup_context=_note)

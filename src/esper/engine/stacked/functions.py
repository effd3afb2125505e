"""The costly parts of a pass as functions with gradients of their own, in plain torch, or in `kernels.py` on a GPU.

torch's own gradients of these would keep every intermediate result and touch memory several times as often.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

EPSILON = 1e-5
"""Of every norm, as torch has it."""


@cache
def _kernels() -> ModuleType | None:
    """Triton comes with torch for CUDA, and only there."""
    if importlib.util.find_spec("triton") is None:
        return None
    from esper.engine.stacked import kernels  # noqa: PLC0415

    return kernels


def kernels_for(x: Tensor) -> ModuleType | None:
    """The kernels, if they are for tensors like this one: float64 is for the reference."""
    return _kernels() if x.is_cuda and x.dtype is not torch.float64 else None


@dataclass(frozen=True, slots=True)
class Extent:
    """Which numbers of V networks are true, of activations [V, *sizes, batch, channels]: as numbers, and as masks."""

    widths: Tensor
    """[V] int32: true channels."""
    extents: Tensor
    """[V, 2] int32: true positions; of vectors and sequences not used."""
    columns: int
    """Padded size of the last axis of positions."""
    mask: Tensor | None
    """[V, *sizes or 1, 1, channels or 1]; None if all are extent."""
    valid: Tensor | None
    """[V, *sizes, 1, 1]: true positions; None if all are."""
    counts: Tensor
    """[V, 1, …]: numbers that a norm sees; of a batch norm without the batch."""

    def of(self, rows: Tensor) -> Extent:
        mask, valid = (None if one is None else one[rows] for one in (self.mask, self.valid))
        return Extent(self.widths[rows], self.extents[rows], self.columns, mask, valid, self.counts[rows])


def spread(column: Tensor, like: Tensor) -> Tensor:
    """A column [V] or [V, channels], ready to meet activations."""
    if column.dim() == 1:
        return column.view(-1, *[1] * (like.dim() - 1))
    return column.view(column.shape[0], *[1] * (like.dim() - 2), column.shape[1])


def _three(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], -1, x.shape[-1])


def _four(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], -1, *x.shape[-2:])


class Norm(torch.autograd.Function):
    """Zero mean and unit variance over some axes, then scale and shift [V, channels], then perhaps a ReLU."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, extent: Extent, examples: bool, relu: bool
    ) -> Tensor:
        """`examples`: over channels and positions of an example; else over the channels of each position."""
        x, affine = x.contiguous(), None if weight is None or bias is None else (weight.contiguous(), bias.contiguous())
        kernels = kernels_for(x)
        if kernels is None:
            y, normed, rstd = _norm(x, affine, extent, examples, relu)
            saved = (normed, rstd, weight, y if relu else None, None)
        elif examples and affine is not None:
            y, mean, rstd = kernels.norm_examples(_four(x), affine, extent.widths, extent.extents, extent.columns, relu)
            saved = (x, rstd, affine[0], affine[1], mean)
        else:
            y, mean, rstd = kernels.norm_rows(_three(x), affine, extent.widths)
            saved = (x, rstd, affine[0] if affine else None, None, mean)
        ctx.save_for_backward(*saved)
        ctx.settings = extent, examples, relu
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        extent, examples, relu = ctx.settings
        x, rstd, weight, other, mean = ctx.saved_tensors
        dy, kernels = dy.contiguous(), kernels_for(dy)
        if kernels is None:
            return (*_norm_backward(dy, x, rstd, weight, other, extent, examples), None, None, None)
        if examples and weight is not None:
            shape = (extent.widths, extent.extents, extent.columns)
            found = kernels.norm_examples_backward(_four(dy), _four(x), (weight, other), mean, rstd, shape, relu)
        else:
            found = kernels.norm_rows_backward(_three(dy), _three(x), weight, mean, rstd, extent.widths)
        return (found[0].view(x.shape), found[1], found[2], None, None, None)


def _axes(x: Tensor, examples: bool) -> tuple[int, ...]:
    return (*range(1, x.dim() - 2), -1) if examples else (-1,)


def _norm(
    x: Tensor, affine: tuple[Tensor, Tensor] | None, extent: Extent, examples: bool, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    axes = _axes(x, examples)
    known = x if extent.valid is None or not examples else x * extent.valid  # filters reach beyond true positions
    normed = known - known.sum(axes, keepdim=True) / extent.counts
    if extent.mask is not None:
        normed *= extent.mask
    rstd = (normed.square().sum(axes, keepdim=True) / extent.counts + EPSILON).rsqrt()
    normed *= rstd
    if affine is None:
        return normed, normed, rstd
    shift = spread(affine[1], x)
    y = torch.addcmul(
        shift if extent.valid is None or not examples else shift * extent.valid, normed, spread(affine[0], x)
    )
    return y.relu_() if relu else y, normed, rstd


def _norm_backward(
    dy: Tensor, normed: Tensor, rstd: Tensor, weight: Tensor | None, y: Tensor | None, extent: Extent, examples: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if y is not None:
        dy = dy * (y > 0)
    if examples and extent.valid is not None:
        dy = dy * extent.valid
    axes, over, dw, db = _axes(dy, examples), tuple(range(1, dy.dim() - 1)), None, None
    product = dy * normed
    if weight is not None:
        dw, db = product.sum(over), dy.sum(over)
        dy, product = dy * spread(weight, dy), product * spread(weight, dy)
    elif extent.mask is not None:
        dy = dy * extent.mask
    level, tilt = dy.sum(axes, keepdim=True) / extent.counts, product.sum(axes, keepdim=True) / extent.counts
    dx = torch.addcmul(dy - level, normed, tilt, value=-1.0) * rstd
    return dx if extent.mask is None else dx * extent.mask, dw, db


class BatchNorm(torch.autograd.Function):
    """Over the batch and all positions, for each channel; gives the mean and the variance of the batch, too."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, extent: Extent, relu: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, affine, kernels = x.contiguous(), (weight.contiguous(), bias.contiguous()), kernels_for(x)
        if kernels is None:
            counts, axes = extent.counts * x.shape[-2], tuple(range(1, x.dim() - 1))
            known = x if extent.valid is None else x * extent.valid
            mean = known.sum(axes) / counts
            normed = known - spread(mean, x)
            if extent.valid is not None:
                normed *= extent.valid
            variance = normed.square().sum(axes) / counts
            rstd = (variance + EPSILON).rsqrt()
            normed *= spread(rstd, x)
            shift = spread(bias, x)
            y = torch.addcmul(shift if extent.valid is None else shift * extent.valid, normed, spread(weight, x))
            y = y.relu_() if relu else y
            ctx.save_for_backward(normed, rstd, weight, y if relu else None, counts)
        else:
            y, mean, variance = kernels.batch_norm(_four(x), affine, extent.extents, extent.columns, relu)
            ctx.save_for_backward(x, mean, *affine, variance)
        ctx.settings = extent, relu
        ctx.mark_non_differentiable(mean, variance)
        return y.view(x.shape), mean, variance

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> Any:
        (extent, relu), kernels, dy = ctx.settings, kernels_for(dy), dy.contiguous()
        if kernels is not None:
            x, mean, weight, bias, variance = ctx.saved_tensors
            shape = (extent.extents, extent.columns)
            found = kernels.batch_norm_backward(_four(dy), _four(x), (weight, bias), mean, variance, shape, relu)
            return found[0].view(x.shape), found[1], found[2], None, None
        normed, rstd, weight, y, counts = ctx.saved_tensors
        if y is not None:
            dy = dy * (y > 0)
        if extent.valid is not None:
            dy = dy * extent.valid
        axes = tuple(range(1, dy.dim() - 1))
        dw, db = (dy * normed).sum(axes), dy.sum(axes)
        dx = torch.addcmul(dy - spread(db / counts, dy), normed, spread(dw / counts, dy), value=-1.0)
        dx *= spread(rstd * weight, dy)
        return dx if extent.valid is None else dx * extent.valid, dw, db, None, None


def _windows(sizes: Sequence[int], kernel: int) -> list[tuple[slice, ...]]:
    """What each tap sees of positions padded by half a kernel on each side, in the order of torch's kernels."""
    if len(sizes) == 1:
        return [(slice(i, i + sizes[0]),) for i in range(kernel)]
    taps = range(kernel)
    return [(slice(i, i + sizes[0]), slice(j, j + sizes[1])) for i in taps for j in taps]


def _padded(x: Tensor, kernel: int) -> Tensor:
    reach = (kernel // 2, kernel // 2)
    return F.pad(x, (0, 0, 0, 0, *reach * (x.dim() - 3)))


class Patches(torch.autograd.Function):
    """Each position with its neighbourhood: [V, *sizes, batch, channels] → [V, *sizes, batch, taps · channels]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: int) -> Tensor:
        ctx.kernel, kernels = kernel, kernels_for(x)
        if kernels is not None:
            found: Tensor = kernels.patches(x.contiguous(), kernel)
            return found
        around, sizes = _padded(x, kernel), x.shape[1:-2]
        return torch.cat([around[:, *window] for window in _windows(sizes, kernel)], -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        kernel, kernels = ctx.kernel, kernels_for(dy)
        if kernels is not None:
            return kernels.patches_backward(dy.contiguous(), kernel), None
        sizes = dy.shape[1:-2]
        windows = _windows(sizes, kernel)
        pieces = dy.chunk(len(windows), -1)
        around = _padded(torch.zeros_like(pieces[0]), kernel)
        for window, piece in zip(windows, pieces, strict=True):
            around[:, *window] += piece
        return around[:, *windows[len(windows) // 2]].contiguous(), None


class DepthwiseConv(torch.autograd.Function):
    """One filter per channel: x [V, *sizes, batch, channels], weight [V, channels, taps]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, kernel: int) -> Tensor:
        x, weight, kernels = x.contiguous(), weight.contiguous(), kernels_for(x)
        ctx.kernel = kernel
        ctx.save_for_backward(x, weight)
        if kernels is not None:
            found: Tensor = kernels.depthwise(x, weight, kernel)
            return found
        around, total = _padded(x, kernel), torch.zeros_like(x)
        for tap, window in enumerate(_windows(x.shape[1:-2], kernel)):
            total.addcmul_(around[:, *window], spread(weight[:, :, tap], x))
        return total

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        kernel, dy, kernels = ctx.kernel, dy.contiguous(), kernels_for(dy)
        if kernels is not None:
            return kernels.depthwise(dy, weight, kernel, back=True), kernels.depthwise_weights(x, dy, kernel), None
        around, given = _padded(x, kernel), _padded(torch.zeros_like(x), kernel)
        windows, axes, dw = _windows(x.shape[1:-2], kernel), tuple(range(1, x.dim() - 1)), torch.empty_like(weight)
        for tap, window in enumerate(windows):
            dw[:, :, tap] = (around[:, *window] * dy).sum(axes)
            given[:, *window].addcmul_(dy, spread(weight[:, :, tap], x))
        return given[:, *windows[len(windows) // 2]].contiguous(), dw, None


class Fork(torch.autograd.Function):
    """h itself, and some of its rows. Their gradients are added in place: h must have one reader, `Join`."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows)
        return h.view_as(h), h.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, dh: Tensor, chosen: Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        return dh.index_add_(0, rows, chosen), None


class Join(torch.autograd.Function):
    """What leaves a slot: h with some rows replaced, then new rows, then some rows of h a second time.

    One pass over memory in each direction; index_copy, cat and their gradients would make six.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor, changed: Tensor, added: Tensor, rows: Tensor, again: Tensor) -> Tensor:
        ctx.save_for_backward(rows, again)
        ctx.sizes = len(h), len(added)
        first, second = len(h), len(h) + len(added)
        out = h.new_empty((second + len(again), *h.shape[1:]))
        out[:first].copy_(h)
        out.index_copy_(0, rows, changed)
        out[first:second].copy_(added)
        out[second:].copy_(h.index_select(0, again))
        return out

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Any:
        rows, again = ctx.saved_tensors
        first, added = ctx.sizes
        second = first + added
        dh = given[:first].clone()
        dh.index_fill_(0, rows, 0.0)
        if len(again):
            dh.index_add_(0, again, given[second:])
        return dh, given.index_select(0, rows), given[first:second], None, None

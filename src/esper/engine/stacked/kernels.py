"""CUDA kernels (Triton) of what small networks spend their time on: norms, filters, patches, AdamW.

Each does in one pass over memory what takes ten or twenty calls of torch. They compute in float32 whatever the
activations are. `functions.py` and `adamw.py` have the same in plain torch, which tests compare these with, and which
other devices use. The programs are in `kernels_norms.py` and `kernels_filters.py`; here they get sizes and outputs.

Activations are [V, positions, batch, channels], contiguous. `widths` [V] and `extents` [V, 2] say which channels and
positions of a network are true; `columns` is the padded size of the last axis of positions.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from esper.engine.stacked import kernels_filters as filters
from esper.engine.stacked import kernels_norms as norms

_ROWS, _BLOCK = 64, 1024


def _power(count: int) -> int:
    return max(16, int(triton.next_power_of_2(count)))


def norm_rows(x: Tensor, affine: tuple[Tensor, Tensor] | None, widths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [V, rows, channels]: normalised, and mean and inverse deviation [V, rows]."""
    networks, rows, channels = x.shape
    y, mean = torch.empty_like(x), torch.empty((networks, rows), dtype=torch.float32, device=x.device)
    rstd, (w, b) = torch.empty_like(mean), affine or (x, x)
    grid = (networks, triton.cdiv(rows, _ROWS))
    norms.rows_forward[grid](
        x, w, b, y, mean, rstd, widths, rows, channels, _ROWS, _power(channels), affine is not None
    )
    return y, mean, rstd


def norm_rows_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, widths: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    networks, rows, channels = x.shape
    blocks = triton.cdiv(rows, _ROWS)
    dx, size = torch.empty_like(x), blocks if weight is not None else 0
    dw = torch.empty((networks, size, channels), dtype=torch.float32, device=x.device)
    db, w = torch.empty_like(dw), x if weight is None else weight
    norms.rows_backward[(networks, blocks)](
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
    norms.examples_forward[(networks, batch)](x, *affine, y, mean, rstd, widths, extents, columns, count, batch, *sizes)
    return y, mean, rstd


def norm_examples_backward(
    dy: Tensor, x: Tensor, affine: tuple[Tensor, Tensor], mean: Tensor, rstd: Tensor, shape: tuple[Any, ...], relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    networks, count, batch, channels = x.shape
    dx, dw = torch.empty_like(x), torch.empty((networks, batch, channels), dtype=torch.float32, device=x.device)
    db = torch.empty_like(dw)
    sizes = (channels, _positions(count, channels), _power(channels), relu)
    norms.examples_backward[(networks, batch)](x, *affine, dy, dx, dw, db, mean, rstd, *shape, count, batch, *sizes)
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
    norms.batch_forward[(networks,)](x, *affine, y, mean, variance, extents, columns, count, batch, *sizes, num_warps=8)
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
    norms.batch_backward[(networks,)](
        x, *affine, dy, dx, dw, db, mean, variance, *shape, count, batch, *sizes, num_warps=8
    )
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
    filters.filter[grid](x, weight, y, height, width, each, channels, kernel, x.dim() - 3, _BLOCK, back)
    return y


def depthwise_weights(x: Tensor, dy: Tensor, kernel: int) -> Tensor:
    """[V, channels, taps]"""
    height, width, batch, channels = _grid(x)
    blocks, taps = triton.cdiv(batch, 16), kernel ** (x.dim() - 3)
    dw = torch.empty((x.shape[0], blocks, channels, taps), dtype=torch.float32, device=x.device)
    grid = (x.shape[0], blocks, taps)
    sizes = (kernel, x.dim() - 3, 16, _power(channels))
    filters.filter_weights[grid](x, dy, dw, height, width, batch, channels, blocks, *sizes)
    return dw.sum(1)


def patches(x: Tensor, kernel: int) -> Tensor:
    """[V, *sizes, batch, taps · channels]"""
    height, width, batch, channels = _grid(x)
    taps = kernel ** (x.dim() - 3)
    y = torch.empty((*x.shape[:-1], taps * channels), dtype=x.dtype, device=x.device)
    grid = (x.shape[0], height * width, triton.cdiv(batch * channels, _BLOCK))
    filters.patches[grid](x, y, height, width, batch, channels, kernel, x.dim() - 3, _BLOCK, False)
    return y


def patches_backward(dy: Tensor, kernel: int) -> Tensor:
    taps = kernel ** (dy.dim() - 3)
    dx = torch.empty((*dy.shape[:-1], dy.shape[-1] // taps), dtype=dy.dtype, device=dy.device)
    height, width, batch, channels = _grid(dx)
    grid = (dx.shape[0], height * width, triton.cdiv(batch * channels, _BLOCK))
    filters.patches[grid](dx, dy, height, width, batch, channels, kernel, dx.dim() - 3, _BLOCK, True)
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
    filters.adamw[(m, blocks)](weights, *moments, gradient, real, table, update, squares, m, width, blocks, _BLOCK)


def adamw_blocks(width: int) -> int:
    return int(triton.cdiv(width, _BLOCK))

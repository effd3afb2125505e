"""What networks compute, for V of them at once: activations are [V, *sizes, batch, channels], weights [V, out, in].

Channels are the last axis in every layout, so that a map of single positions is one batched product of matrices, and
vectors, sequences, series and images share all code; sizes stand before the batch, so that pooling by each network's
own factor is one more product. Channels beyond a network's true width, and positions beyond its true sizes, are zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from esper.engine.stacked.functions import DepthwiseConv, Extent, Norm, Patches, spread


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Each position by itself."""
    flat = x.reshape(x.shape[0], -1, x.shape[-1])
    out = torch.bmm(flat, weight.mT) if bias is None else torch.baddbmm(bias[:, None], flat, weight.mT)
    return out.view(*x.shape[:-1], weight.shape[1])


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """weight [V, out, in, *kernel], odd kernels; sizes are kept."""
    kernel = weight.shape[3]
    if kernel == 1:
        return linear(x, weight.flatten(2), bias)
    patches = apply(Patches, x, kernel)
    return linear(patches, weight.flatten(3).permute(0, 1, 3, 2).flatten(2), bias)


def convolve_depthwise(x: Tensor, weight: Tensor) -> Tensor:
    """weight [V, channels, 1, *kernel]: one filter per channel."""
    return apply(DepthwiseConv, x, weight.flatten(2), weight.shape[3])


def normalise(
    x: Tensor, affine: tuple[Tensor, Tensor] | None, extent: Extent, *, examples: bool = False, relu: bool = False
) -> Tensor:
    """Zero mean and unit variance over channels, or over channels and positions of `examples`; then scale and shift,
    [V, channels] each, if there are any; then perhaps a ReLU."""
    weight, bias = affine or (None, None)
    return apply(Norm, x, weight, bias, extent, examples, relu)


def apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    found: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return found


def means(x: Tensor, counts: Tensor | None) -> Tensor:
    """[V, *sizes, batch, channels] → [V, batch, channels]; `counts` [V, 1, 1] are the true positions."""
    flat = x.flatten(1, -3)
    return flat.mean(1) if counts is None else flat.sum(1) / counts


def pool_average(x: Tensor, matrix: Tensor, sizes: Sequence[int]) -> Tensor:
    """matrix [V, pooled positions, positions] says how much of each position each pooled one takes."""
    flat = torch.bmm(matrix.to(x.dtype), x.reshape(x.shape[0], matrix.shape[2], -1))
    return flat.view(x.shape[0], *sizes, *x.shape[-2:])


def pool_largest(x: Tensor, windows: Tensor, valid: Tensor, sizes: Sequence[int]) -> Tensor:
    """windows [V, pooled positions, most] are the positions of each window, repeated where it is small."""
    networks, count, most = windows.shape
    flat = x.flatten(1, -3)
    index = windows.flatten(1)[:, :, None, None].expand(-1, -1, *x.shape[-2:])
    # One place gets the gradient where several share the maximum, as in torch's pooling.
    found = flat.gather(1, index).view(networks, count, most, *x.shape[-2:]).max(2).values
    return (found * valid).view(networks, *sizes, *x.shape[-2:])


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    heads: Tensor | None,
    scale: Tensor,
    *,
    causal: bool,
    hidden: Tensor | None = None,
) -> Tensor:
    """Attention between positions, each [V, positions, batch, channels]; gives the same shape.

    `heads` [V, H, channels] says which channels belong to which head (networks may have fewer than H heads: the others
    are empty); None is one head. `scale` [V] multiplies the products. `hidden` [V, positions] is added to the products
    with each position: very negative where there is none.
    """
    networks, count, batch, channels = query.shape
    query = query * spread(scale, query)
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))  # [V, batch, positions, channels]
    if hidden is not None:  # one more channel instead of a mask, for which torch's fast forms are few
        query = torch.cat([query, query.new_ones(*query.shape[:-1], 1)], -1)
        extra = hidden.to(key.dtype)[:, None, :, None].expand(-1, batch, -1, -1)
        key, value = torch.cat([key, extra], -1), F.pad(value, (0, 1))
        heads = None if heads is None else F.pad(heads, (0, 1), value=1.0)
    if query.is_cuda and query.shape[-1] % 8:  # else torch takes a slow form
        more = -query.shape[-1] % 8
        query, key, value = (F.pad(t, (0, more)) for t in (query, key, value))
        heads = None if heads is None else F.pad(heads, (0, more))
    if heads is None:
        query, key, value = (t.reshape(networks * batch, 1, count, t.shape[-1]) for t in (query, key, value))
        seen = _attention(query, key, value, causal)
        seen = seen.view(networks, batch, count, -1)
    else:
        split = query.unsqueeze(2) * heads[:, None, :, None].to(query.dtype)  # [V, batch, H, positions, channels]
        query = split.flatten(0, 1)
        key, value = (t.unsqueeze(2).expand_as(split).flatten(0, 1) for t in (key, value))
        seen = _attention(query, key, value, causal)
        seen = (seen.view(split.shape) * heads[:, None, :, None].to(seen.dtype)).sum(2)
    return seen[..., :channels].transpose(1, 2)


def _attention(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    if not query.is_cuda:
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=1.0)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):  # the flash form fails for so many rows
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=1.0)


def head_count(channels: Tensor) -> Tensor:
    """[V] of attention seeds: the most of 1, 2 and 4 heads that divide the channels and have at least 8 each."""
    found = torch.ones_like(channels)
    for heads in (2, 4):
        found = torch.where((channels % heads == 0) & (channels >= 8 * heads), heads, found)
    return found


def head_channels(channels: Tensor, padded: int, dtype: torch.dtype) -> Tensor | None:
    """[V, H, padded] for `attend`; None where every network has one head."""
    heads = head_count(channels)
    most = int(heads.max())
    if most == 1:
        return None
    place = torch.arange(padded, device=channels.device)
    owner = place // (channels // heads)[:, None]  # [V, padded]
    owner = torch.where(place < channels[:, None], owner, most)
    return (owner[:, None] == torch.arange(most, device=channels.device)[:, None]).to(dtype)


def rotation(channels: Tensor, padded: int, time: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """What `rotate` needs: cosines and sines [V, time, 1, padded], and who turns with whom [V, padded, padded].

    As `growth.blueprints.sequence.rotated` within every head: channel j turns with channel j + half.
    """
    size = channels // head_count(channels)  # of a head
    half = (size // 2)[:, None]
    channel = torch.arange(padded, device=channels.device).expand(len(channels), padded)
    within = channel % size[:, None]
    turns = (within < 2 * half) & (channel < channels[:, None])
    speed = 10000.0 ** (-(within % half.clamp(min=1)).float() / half.clamp(min=1))  # float32, as the plain seed has it
    angle = torch.arange(time, device=channels.device)[:, None] * speed[:, None]  # [V, time, padded]
    cosine = torch.where(turns[:, None], angle.cos(), 1.0)
    sine = torch.where(turns[:, None], angle.sin(), 0.0)
    first = within < half
    partner = torch.where(turns, torch.where(first, channel + half, channel - half), channel)
    sign = torch.where(first, -1.0, 1.0) * turns
    swap = F.one_hot(partner, padded).mT.to(dtype) * sign[:, None].to(dtype)  # column j takes from its partner
    return cosine[:, :, None].to(dtype), sine[:, :, None].to(dtype), swap


def rotate(x: Tensor, cosine: Tensor, sine: Tensor, swap: Tensor) -> Tensor:
    """x [V, time, batch, channels], turned by its position."""
    return x * cosine + linear(x, swap.mT) * sine


def position_codes(extents: Tensor, padded: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Sines and cosines of each axis's relative position [V, positions, codes], as `ConvAttention.place` has them.

    `extents` [V, axes] are the true sizes.
    """
    codes = []
    networks, device = len(extents), extents.device
    for axis, size in enumerate(padded):
        waves = math.pi * 2.0 ** torch.arange(4, device=device)
        phase = waves[:, None] * _steps(extents[:, axis], size)[:, None]  # [V, waves, size]
        code = torch.cat([torch.sin(phase), torch.cos(phase)], 1)  # [V, codes, size]
        code = code.view(networks, -1, *(size if other == axis else 1 for other in range(len(padded))))
        codes.append(code.expand(-1, -1, *padded).flatten(2))
    return torch.cat(codes, 1).mT.to(dtype)


def _steps(sizes: Tensor, padded: int) -> Tensor:
    """[V, padded]: `linspace(0, 1, size)`, zeros after it. From torch's own, whose rounding no formula has."""
    table = [F.pad(torch.linspace(0, 1, size, device=sizes.device), (0, padded - size)) for size in range(padded + 1)]
    return torch.stack(table)[sizes]

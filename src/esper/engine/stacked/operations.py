"""What networks compute, for V of them at once: activations are [V, batch, *sizes, channels], weights [V, out, in].

Channels are the last axis in every layout, so that a map of single positions is one batched product of matrices, a norm
of an example reduces neighbouring numbers, and vectors, sequences, series and images share all code. Channels beyond a
network's true width are zero and stay so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

EPSILON = 1e-5
"""Of every norm, as torch has it."""


def spread(column: Tensor, like: Tensor) -> Tensor:
    """A column [V] or [V, channels], ready to meet activations."""
    if column.dim() == 1:
        return column.view(-1, *[1] * (like.dim() - 1))
    return column.view(column.shape[0], *[1] * (like.dim() - 2), column.shape[1])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Each position by itself."""
    flat = x.reshape(x.shape[0], -1, x.shape[-1])
    out = torch.bmm(flat, weight.mT) if bias is None else torch.baddbmm(bias[:, None], flat, weight.mT)
    return out.view(*x.shape[:-1], weight.shape[1])


def shifts(x: Tensor, kernel: int) -> list[Tensor]:
    """x [V, batch, *sizes, channels] as each tap of a kernel sees it, in the order of torch's kernels."""
    reach, axes = kernel // 2, x.dim() - 3
    padded = F.pad(x, (0, 0, *(reach, reach) * axes))
    if axes == 1:
        return [padded[:, :, i : i + x.shape[2]] for i in range(kernel)]
    height, width = x.shape[2:4]
    return [padded[:, :, i : i + height, j : j + width] for i in range(kernel) for j in range(kernel)]


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """weight [V, out, in, *kernel], odd kernels; sizes are kept."""
    kernel = weight.shape[3]
    if kernel == 1:
        return linear(x, weight.flatten(2), bias)
    patches = torch.cat(shifts(x, kernel), -1)  # [V, batch, *sizes, taps · in]
    return linear(patches, weight.flatten(3).permute(0, 1, 3, 2).flatten(2), bias)


def convolve_depthwise(x: Tensor, weight: Tensor) -> Tensor:
    """weight [V, channels, 1, *kernel]: one filter per channel."""
    taps = weight.flatten(2)  # [V, channels, taps]
    total: Tensor | None = None
    for tap, seen in enumerate(shifts(x, weight.shape[3])):
        factor = spread(taps[:, :, tap], x)
        total = seen * factor if total is None else torch.addcmul(total, seen, factor)
    assert total is not None
    return total


def normalise(
    x: Tensor, weight: Tensor, bias: Tensor, axes: Sequence[int], counts: Tensor, mask: Tensor | None
) -> Tensor:
    """Zero mean and unit variance over `axes`, then scale and shift [V, channels].

    `counts` [V, 1, …] says how many true numbers there are; `mask` [V, 1, …, channels] which channels are true, None if
    all of them are.
    """
    centred = x - x.sum(axes, keepdim=True) / counts
    if mask is not None:
        centred = centred * mask
    variance = centred.square().sum(axes, keepdim=True) / counts
    return torch.addcmul(spread(bias, x), centred * (variance + EPSILON).rsqrt(), spread(weight, x))


def plain_norm(x: Tensor, counts: Tensor, mask: Tensor | None) -> Tensor:
    """Over channels, without scale and shift."""
    centred = x - x.sum(-1, keepdim=True) / counts
    if mask is not None:
        centred = centred * mask
    variance = centred.square().sum(-1, keepdim=True) / counts
    return centred * (variance + EPSILON).rsqrt()


def pool(x: Tensor, factor: int, kind: str) -> Tensor:
    """Neighbourhoods of `factor` positions along each axis; what is left over at the end is dropped, as torch does."""
    if factor == 1:
        return x
    for axis in range(2, x.dim() - 1):
        size = x.shape[axis] // factor
        x = x.narrow(axis, 0, size * factor).unflatten(axis, (size, factor))
        # One place gets the gradient where several share the maximum, as in torch's pooling.
        x = x.mean(axis + 1) if kind == "average" else x.max(axis + 1).values
    return x


def positions(x: Tensor) -> Tensor:
    """[V, batch, *sizes, channels] → [V, batch, positions, channels]."""
    return x.flatten(2, -2) if x.dim() > 3 else x.unsqueeze(2)


def attend(query: Tensor, key: Tensor, value: Tensor, heads: Tensor | None, scale: Tensor, *, causal: bool) -> Tensor:
    """Attention between positions, each [V, batch, positions, channels]; gives the same shape.

    `heads` [V, H, channels] says which channels belong to which head (networks may have fewer than H heads: the others
    are empty); None is one head. `scale` [V] multiplies the products.
    """
    networks, batch, count, channels = query.shape
    query = query * scale.view(-1, 1, 1, 1)
    if heads is None:
        parts = (t.reshape(networks * batch, 1, count, channels) for t in (query, key, value))
        return F.scaled_dot_product_attention(*parts, is_causal=causal, scale=1.0).view(value.shape)
    number = heads.shape[1]
    split = query.unsqueeze(2) * heads.view(networks, 1, number, 1, channels)  # [V, batch, H, positions, channels]
    query = split.reshape(networks * batch, number, count, channels)
    key, value = (t.unsqueeze(2).expand_as(split).reshape(query.shape) for t in (key, value))
    seen = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=1.0)
    return (seen.view(split.shape) * heads.view(networks, 1, number, 1, channels)).sum(2)


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
    """What `rotate` needs: cosines and sines [V, 1, time, padded], and who turns with whom [V, padded, padded].

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
    return cosine[:, None].to(dtype), sine[:, None].to(dtype), swap


def rotate(x: Tensor, cosine: Tensor, sine: Tensor, swap: Tensor) -> Tensor:
    """x [V, batch, time, channels], turned by its position."""
    return x * cosine + linear(x, swap.mT) * sine


def places(sizes: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Sines and cosines of each axis's relative position [positions, codes], as `ConvAttention.place` has them."""
    codes = []
    for axis, size in enumerate(sizes):
        waves = math.pi * 2.0 ** torch.arange(4, device=device)
        phase = waves[:, None] * torch.linspace(0, 1, size, device=device)  # [waves, size]
        code = torch.cat([torch.sin(phase), torch.cos(phase)])
        code = code.reshape(-1, *(size if other == axis else 1 for other in range(len(sizes))))
        codes.append(code.expand(-1, *sizes).flatten(1))
    return torch.cat(codes).mT.to(dtype)

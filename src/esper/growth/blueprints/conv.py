"""Seeds for feature maps: conv1d [batch, channels, length] and conv2d [batch, channels, height, width].

One class serves both layouts. Every norm is a GroupNorm of one group, that is, over a whole example, unless the host
around the slot has another (see `parts.py`): no seed depends on what else is in the batch where its host does not.

With `causal`, no position of a series reads a later one: convolutions are padded on the left alone, and norms and
averages, which would carry the future into every position, are taken per position or over the past.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from esper.growth.blueprints.parts import activation_for, norm_for
from esper.growth.blueprints.registry import blueprint
from esper.growth.blueprints.sequence import rotated


class CausalConv1d(nn.Conv1d):
    """A convolution that reads each position and the ones before it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.pad(x, (self.kernel_size[0] - 1, 0)))


@blueprint("norm", "conv1d", "conv2d")
class ConvNorm(nn.Module):
    """Per-example normalisation, mixed in channel by channel."""

    # h + tanh(mix)·(norm(h) − h). The mix starts at 0 and has a gradient at once; the norm's own scale and shift follow
    # from the second step. The plainer h + norm(h) with a zero scale could never take the example's own scale away.
    def __init__(self, channels: int, layout: str, causal: bool = False) -> None:
        super().__init__()
        self.norm = norm_for(channels, layout, causal)  # in every style its own: it is what this seed adds
        self.mix = nn.Parameter(torch.zeros(channels, *[1] * {"conv1d": 1, "conv2d": 2}[layout]))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(h)
        return h + torch.tanh(self.mix) * (normed - h)


@blueprint("squeeze_excite", "conv1d", "conv2d")
class SqueezeExcite(nn.Module):
    """Rescales each channel by 0 to 2, decided from the averages of all channels."""

    def __init__(self, channels: int, layout: str, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal
        hidden = max(1, channels // 4)
        # SiLU, not ReLU: with one or two hidden units a ReLU is often off for every example, and then nothing learns.
        last = nn.Linear(hidden, channels)
        self.decide = nn.Sequential(nn.Linear(channels, hidden), nn.SiLU(), last)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        if self.causal:  # averages over the past, one for each position
            flat = h.flatten(2)
            counts = torch.arange(1, flat.shape[2] + 1, device=h.device, dtype=h.dtype)
            means = (flat.cumsum(2) / counts).transpose(1, 2)  # [batch, positions, channels]
            return h * (2 * torch.sigmoid(self.decide(means))).transpose(1, 2).reshape(h.shape)
        scale = 2 * torch.sigmoid(self.decide(h.flatten(2).mean(2)))  # [batch, channels]; exactly 1 at birth
        return h * scale.reshape(*scale.shape, *[1] * (h.dim() - 2))


class ConvResidual(nn.Module):
    """h + body(h) with a body whose last layer starts at zero: the frame of the convolutional blueprints below."""

    # Width 5 in 1-D: on ordered motifs 92 to 93 % where width 3 reaches 88 to 90 and 7 adds nothing sure.
    WIDTH = {"conv1d": 5, "conv2d": 3}  # noqa: RUF012  (an annotation would need an import in exported models)

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)
        for parameter in body[-1].parameters():
            nn.init.zeros_(parameter)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        change: torch.Tensor = self.body(h)
        return h + change

    @staticmethod
    def conv(
        layout: str,
        inputs: int,
        outputs: int,
        width: int = 1,
        groups: int = 1,
        bias: bool = True,
        causal: bool = False,
    ) -> nn.Module:
        """A convolution that keeps every size, odd or even, down to 1."""
        if causal and layout == "conv1d" and width > 1:
            return CausalConv1d(inputs, outputs, width, groups=groups, bias=bias)
        kind = nn.Conv1d if layout == "conv1d" else nn.Conv2d
        return kind(inputs, outputs, width, padding=width // 2, groups=groups, bias=bias)


@blueprint("depthwise", "conv1d", "conv2d")
class Depthwise(ConvResidual):
    """One small filter per channel, then a 1×1 mix: a cheap look at neighbours."""

    def __init__(self, channels: int, layout: str, causal: bool = False, style: dict[str, Any] | None = None) -> None:
        width = self.WIDTH[layout]
        super().__init__(
            self.conv(layout, channels, channels, width, groups=channels, bias=False, causal=causal),
            norm_for(channels, layout, causal, style),
            activation_for("ReLU", style),
            self.conv(layout, channels, channels),
        )


@blueprint("pointwise", "conv1d", "conv2d")
class Pointwise(ConvResidual):
    """Two 1×1 convolutions, twice as wide inside: relates channels, not neighbours."""

    def __init__(self, channels: int, layout: str, causal: bool = False, style: dict[str, Any] | None = None) -> None:
        super().__init__(
            self.conv(layout, channels, 2 * channels, bias=False),
            norm_for(2 * channels, layout, causal, style),
            activation_for("ReLU", style),
            self.conv(layout, 2 * channels, channels),
        )


@blueprint("wide", "conv1d", "conv2d", expansion=4)
@blueprint("conv", "conv1d", "conv2d", expansion=1)
class ConvPair(ConvResidual):
    """Two full convolutions with a norm between them."""

    def __init__(
        self, channels: int, layout: str, expansion: int, causal: bool = False, style: dict[str, Any] | None = None
    ) -> None:
        width, hidden = self.WIDTH[layout], expansion * channels
        super().__init__(
            self.conv(layout, channels, hidden, width, bias=False, causal=causal),
            norm_for(hidden, layout, causal, style),
            activation_for("ReLU", style),
            self.conv(layout, hidden, channels, width, causal=causal),
        )


@blueprint("bottleneck", "conv1d", "conv2d")
class Bottleneck(ConvResidual):
    """Squeezes to a quarter of the channels, convolves there, and widens again."""

    def __init__(self, channels: int, layout: str, causal: bool = False, style: dict[str, Any] | None = None) -> None:
        hidden = min(channels, max(4, channels // 4))
        super().__init__(
            self.conv(layout, channels, hidden, bias=False),
            norm_for(hidden, layout, causal, style),
            activation_for("ReLU", style),
            self.conv(layout, hidden, hidden, self.WIDTH[layout], bias=False, causal=causal),
            norm_for(hidden, layout, causal, style),
            activation_for("ReLU", style),
            self.conv(layout, hidden, channels),
        )


@blueprint("attention", "conv1d", "conv2d")
class ConvAttention(nn.Module):
    """Self-attention over all positions: relates what is far apart.

    Over the past alone, positions are rotary: a code of the relative place would depend on how much is still to come.
    """

    WAVES = 4  # per axis, a sine and a cosine each
    MOST_KEYS = 1024  # a larger map is looked at through its local averages, so that the cost stays linear in its size

    def __init__(self, channels: int, layout: str, causal: bool = False, style: dict[str, Any] | None = None) -> None:
        super().__init__()
        axes = {"conv1d": 1, "conv2d": 2}[layout]
        self.causal = causal
        self.heads = max(n for n in (1, 2, 4) if channels % n == 0 and (n == 1 or channels >= 8 * n))
        self.norm = norm_for(channels, layout, causal, style)
        features = channels if causal else channels + 2 * self.WAVES * axes
        self.query = nn.Linear(features, channels, bias=False)
        self.key_value = nn.Linear(features, 2 * channels, bias=False)
        self.out = nn.Linear(channels, channels)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        x = keys = self.norm(h)
        if not self.causal:
            place = self.place(h.shape[2:], h.device).to(x.dtype)
            x = torch.cat([x, place.expand(x.shape[0], *place.shape)], 1)  # [batch, features, *sizes]
            keys = self.coarse(x)
        query = self.split(self.query(x.flatten(2).transpose(1, 2)))  # [batch, heads, positions, channels per head]
        key, value = map(self.split, self.key_value(keys.flatten(2).transpose(1, 2)).chunk(2, -1))
        if self.causal:
            query, key = rotated(query), rotated(key)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        change: torch.Tensor = self.out(seen.transpose(1, 2).flatten(2))  # [batch, positions, channels]
        return h + change.transpose(1, 2).reshape(h.shape)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, positions, channels] → [batch, heads, positions, channels per head]."""
        return x.reshape(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def coarse(self, x: torch.Tensor) -> torch.Tensor:
        """x itself, or averages over neighbourhoods just large enough to leave at most MOST_KEYS positions or so."""
        axes = x.dim() - 2
        step = math.ceil((math.prod(x.shape[2:]) / self.MOST_KEYS) ** (1 / axes))
        if step == 1:
            return x
        return F.avg_pool1d(x, step, ceil_mode=True) if axes == 1 else F.avg_pool2d(x, step, ceil_mode=True)

    @staticmethod
    def place(sizes: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """Sines and cosines of each axis's relative position: the same code from first to last at any size."""
        codes = []
        for axis, size in enumerate(sizes):
            waves = math.pi * 2.0 ** torch.arange(ConvAttention.WAVES, device=device)
            phase = waves[:, None] * torch.linspace(0, 1, size, device=device)  # [waves, size]
            code = torch.cat([torch.sin(phase), torch.cos(phase)])  # [2 waves, size]
            code = code.reshape(-1, *(size if other == axis else 1 for other in range(len(sizes))))
            codes.append(code.expand(-1, *sizes))
        return torch.cat(codes)  # [2 waves · axes, *sizes]

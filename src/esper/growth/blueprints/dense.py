"""Seeds that act on the last axis alone: dense [batch, channels], and each position of a sequence by itself.

What never looks at another position is causal without further care, so one class serves both layouts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from esper.growth.blueprints.parts import activation_for, feature_norm_for
from esper.growth.blueprints.registry import blueprint


@blueprint("norm", "sequence", "dense")
class FeatureNorm(nn.Module):
    """Normalisation over the channels of one position, mixed in channel by channel."""

    def __init__(self, channels: int, layout: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.mix = nn.Parameter(torch.zeros(channels))  # as in ConvNorm: it has a gradient at once, and can replace h

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(h)
        return h + torch.tanh(self.mix) * (normed - h)


@blueprint("lora_large", "sequence", rank=32)
@blueprint("lora", "sequence", "dense", rank=8)
class LowRank(nn.Module):
    """A linear correction of low rank: h + up(down(h))."""

    def __init__(self, channels: int, layout: str, rank: int) -> None:
        super().__init__()
        rank = min(rank, channels)
        self.down = nn.Linear(channels, rank, bias=False)
        self.up = nn.Linear(rank, channels, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        change: torch.Tensor = self.up(self.down(h))
        return h + change


@blueprint("mlp", "sequence", "dense", expansion=4)
@blueprint("mlp_small", "sequence", "dense", expansion=2)
class FeatureMLP(nn.Module):
    """A residual MLP with one hidden layer.

    After a layer it reads, normalised, what the layer gives. Beside a linear layer it reads the `source` features that
    this layer reads, as they are: hidden units that a narrow layer lacks. After it, what the layer has lost would stay
    lost. It has about as many parameters here as there, so fewer units where it reads much.
    """

    def __init__(
        self, channels: int, layout: str, expansion: int, style: dict[str, Any] | None = None, source: int = 0
    ) -> None:
        super().__init__()
        self.reads_input = source > 0
        self.norm = nn.Identity() if source else feature_norm_for(channels, layout, style)
        source = source or channels
        hidden = max(1, round(expansion * channels * 2 * channels / (source + channels)))
        self.up = nn.Linear(source, hidden)
        self.act = activation_for("GELU", style)
        self.down = nn.Linear(hidden, channels)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, h: torch.Tensor, x: torch.Tensor | None = None) -> torch.Tensor:
        change: torch.Tensor = self.down(self.act(self.up(self.norm(h if x is None else x))))
        return h + change

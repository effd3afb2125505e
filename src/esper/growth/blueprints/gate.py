"""What stands around a blueprint's module in a seed: a learned gate, and another order of axes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from esper.growth.blueprints.registry import SlotShape


class Gated(nn.Module):
    """h + g(h)·(body(h) − h), with g between 0 and 1 learned from h itself: the blend "gated"."""

    def __init__(self, body: nn.Module, channels: int, layout: str, causal: bool = False) -> None:
        super().__init__()
        self.body = body
        self.layout = layout
        self.causal = causal
        self.reads_mask = getattr(body, "reads_mask", False)
        self.reads_input = getattr(body, "reads_input", False)
        hidden = max(4, channels // 4)
        last = nn.Linear(hidden, 1)
        self.decide = nn.Sequential(nn.Linear(channels, hidden), nn.SiLU(), last)
        # Mostly open (0.88): the seed must learn before the gate can learn where it helps.
        nn.init.constant_(last.bias, 2.0)

    def gate(self, h: torch.Tensor) -> torch.Tensor:
        """One value per example, broadcastable to h; in a sequence, or where `causal`, one per position from itself."""
        is_map, axes = self.layout.startswith("conv"), h.dim()
        if is_map:
            h = h.movedim(1, -1) if self.causal else h.flatten(2).mean(2)
        # Normalised, because activations of any size pass through a slot and a saturated gate stops learning.
        opening: torch.Tensor = torch.sigmoid(self.decide(F.layer_norm(h, h.shape[-1:])))  # [batch, (positions,) 1]
        if not is_map:
            return opening
        return opening.movedim(-1, 1) if self.causal else opening.reshape(-1, *[1] * (axes - 1))

    def forward(self, h: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        changed: torch.Tensor = self.body(h) if other is None else self.body(h, other)
        return h + self.gate(h) * (changed - h)


class ChannelsLast(nn.Module):
    """A module for [batch, channels, height, width], for maps [batch, height, width, channels]."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = self.body(h.movedim(-1, 1))
        return changed.movedim(1, -1)


def enclosed(body: nn.Module, shape: SlotShape, blend: str) -> nn.Module:
    """A blueprint's module with all that its blend and its slot need around it."""
    if blend == "gated":
        body = Gated(body, shape.channels, shape.layout, shape.visibility != "both")
    return ChannelsLast(body) if shape.channels_last else body

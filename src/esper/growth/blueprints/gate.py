"""The learned gate of the blend "gated": how much of a seed each example (or each position of a sequence) gets."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Gated(nn.Module):
    """h + g(h)·(body(h) − h), with g between 0 and 1 learned from h itself."""

    def __init__(self, body: nn.Module, channels: int, layout: str) -> None:
        super().__init__()
        self.body = body
        self.layout = layout
        hidden = max(4, channels // 4)
        last = nn.Linear(hidden, 1)
        self.decide = nn.Sequential(nn.Linear(channels, hidden), nn.SiLU(), last)
        # Mostly open (0.88): the seed must learn before the gate can know where it helps.
        nn.init.constant_(last.bias, 2.0)

    def gate(self, h: torch.Tensor) -> torch.Tensor:
        """One value per example, broadcastable to h; in a sequence one per position, from that position alone."""
        features = h.flatten(2).mean(2) if self.layout.startswith("conv") else h  # [batch, (time,) channels]
        # Normalised, because activations of any size pass through a slot and a saturated gate stops learning.
        opening = torch.sigmoid(self.decide(F.layer_norm(features, features.shape[-1:])))  # [batch, (time,) 1]
        return opening.reshape(-1, *[1] * (h.dim() - 1)) if self.layout.startswith("conv") else opening

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = self.body(h)
        return h + self.gate(h) * (changed - h)

"""Seeds for [batch, time, channels] that look at other positions, and rotary positions for all that attend."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from esper.growth.blueprints.parts import feature_norm_for
from esper.growth.blueprints.registry import blueprint


def rotated(x: torch.Tensor) -> torch.Tensor:
    """x [..., time, channels], turned by its position: a product of two such depends on their distance alone."""
    half = x.shape[-1] // 2  # an odd last channel stays as it is
    speed = 10000.0 ** (-torch.arange(half, device=x.device) / max(half, 1))
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * speed  # [time, half]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = [a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos(), rest]
    return torch.cat(turned, -1).to(x.dtype)


@blueprint("attention", "sequence")
class SequenceAttention(nn.Module):
    """Self-attention: each position reads the others, or in a causal host the ones before it."""

    reads_mask = True

    def __init__(self, channels: int, layout: str, causal: bool = True, style: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.causal = causal
        self.heads = max(n for n in (1, 2, 4) if channels % n == 0 and (n == 1 or channels >= 8 * n))
        self.norm = feature_norm_for(channels, layout, style)
        self.query_key_value = nn.Linear(channels, 3 * channels, bias=False)
        self.out = nn.Linear(channels, channels)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, h: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """`mask`: True where a position (third axis) may read another (last axis), as [batch, 1, 1 or time, time]."""
        projected: torch.Tensor = self.query_key_value(self.norm(h))  # [batch, time, 3 channels]
        heads = projected.reshape(*h.shape[:2], 3 * self.heads, -1).transpose(1, 2)
        query, key, value = heads.chunk(3, 1)  # each [batch, heads, time, channels per head]
        if mask is not None:
            itself = torch.eye(h.shape[1], dtype=torch.bool, device=h.device)  # padding reads itself, never nothing
            mask = (mask & itself.new_ones(itself.shape).tril() if self.causal else mask) | itself
        seen = F.scaled_dot_product_attention(
            rotated(query), rotated(key), value, attn_mask=mask, is_causal=self.causal and mask is None
        )
        change: torch.Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return h + change

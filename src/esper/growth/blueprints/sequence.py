"""Seeds for [batch, time, channels] that look at other positions: strictly causal, never at a later one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from esper.growth.blueprints.registry import blueprint


@blueprint("attention", "sequence")
class CausalAttention(nn.Module):
    """Causal self-attention: each position reads the ones before it."""

    def __init__(self, channels: int, layout: str) -> None:
        super().__init__()
        self.heads = max(n for n in (1, 2, 4) if channels % n == 0 and (n == 1 or channels >= 8 * n))
        self.norm = nn.LayerNorm(channels)
        self.query_key_value = nn.Linear(channels, 3 * channels, bias=False)
        self.out = nn.Linear(channels, channels)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.query_key_value(self.norm(h))  # [batch, time, 3 channels]
        heads = projected.reshape(*h.shape[:2], 3 * self.heads, -1).transpose(1, 2)
        query, key, value = heads.chunk(3, 1)  # each [batch, heads, time, channels per head]
        seen = F.scaled_dot_product_attention(self.rotate(query), self.rotate(key), value, is_causal=True)
        change: torch.Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return h + change

    @staticmethod
    def rotate(x: torch.Tensor) -> torch.Tensor:
        """Rotary positions: a product of rotated query and key depends on their distance, at any length."""
        half = x.shape[-1] // 2  # an odd last channel stays as it is
        speed = 10000.0 ** (-torch.arange(half, device=x.device) / max(half, 1))
        angle = torch.arange(x.shape[-2], device=x.device)[:, None] * speed  # [time, half]
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        turned = [a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos(), rest]
        return torch.cat(turned, -1).to(x.dtype)

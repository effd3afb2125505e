"""Rotary positions, for seeds that attend to the past or to both sides at any length."""

from __future__ import annotations

import torch


def rotated(x: torch.Tensor) -> torch.Tensor:
    """x [..., time, channels], turned by its position: a product of two such depends on their distance alone."""
    half = x.shape[-1] // 2  # an odd last channel stays as it is
    speed = 10000.0 ** (-torch.arange(half, device=x.device) / max(half, 1))
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * speed  # [time, half]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = [a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos(), rest]
    return torch.cat(turned, -1).to(x.dtype)

"""Norms and activations of seeds: a blueprint's own, or those of the host around the slot (`Style`).

A class takes them as `style`, plain data: "activation" and "norm" are names of `torch.nn` (a batch norm without the
number of its axes), "groups" is a group norm's. What is missing is the blueprint's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

ACTIVATIONS = (
    "ReLU",
    "ReLU6",
    "LeakyReLU",
    "ELU",
    "SELU",
    "CELU",
    "GELU",
    "SiLU",
    "Mish",
    "Hardswish",
    "Softplus",
    "Tanh",
)
NORMS = ("BatchNorm", "GroupNorm", "LayerNorm", "RMSNorm")


class ChannelNorm(nn.Module):
    """Normalises over the channels of each position by itself."""

    def __init__(self, channels: int, rms: bool = False) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(channels) if rms else nn.LayerNorm(channels)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(h.movedim(1, -1))
        return normed.movedim(-1, 1)


class GroupNorm(nn.GroupNorm):
    """Torch's, for maps in any order in memory.

    On a CPU torch ends the process (a segmentation fault) in the gradient of its own for a map in channels-last order
    that needs no gradient, such as the input of an incubating seed. So there every map is put into the usual order
    first: looking at `requires_grad` would give `torch.jit.trace` another graph in every mode.
    """

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return super().forward(h.contiguous() if h.is_cpu else h)


def activation_for(own: str, style: dict[str, Any] | None = None) -> nn.Module:
    """The host's, or the blueprint's own."""
    name = (style or {}).get("activation", own)
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r:.60}")
    kind: type[nn.Module] = getattr(nn, name)
    return kind()


def norm_kind(style: dict[str, Any] | None) -> str:
    """The host's norm; empty for the blueprint's own."""
    name: str = (style or {}).get("norm", "")
    if name and name not in NORMS:
        raise ValueError(f"unknown norm {name!r:.60}")
    return name


def norm_for(channels: int, layout: str, causal: bool, style: dict[str, Any] | None = None) -> nn.Module:
    """For feature maps. By itself a GroupNorm of one group, that is, over a whole example.

    What is `causal` is normalised per position: any other norm would carry the future into every position.
    """
    kind = norm_kind(style)
    if kind == "RMSNorm":
        return ChannelNorm(channels, rms=True)
    if causal or kind == "LayerNorm":
        return ChannelNorm(channels)
    if kind == "BatchNorm":
        return nn.BatchNorm1d(channels) if layout == "conv1d" else nn.BatchNorm2d(channels)
    groups = max(1, int((style or {}).get("groups", 1)))
    # Never one channel per group: on a map of one pixel it would have a single value to normalise.
    return GroupNorm(groups if channels % groups == 0 and channels > groups else 1, channels)


def feature_norm_for(channels: int, layout: str, style: dict[str, Any] | None = None) -> nn.Module:
    """For what has its channels last. By itself a LayerNorm."""
    kind = norm_kind(style)
    if kind == "BatchNorm" and layout == "dense":  # in a sequence it would look at other positions
        return nn.BatchNorm1d(channels)
    return nn.RMSNorm(channels) if kind == "RMSNorm" else nn.LayerNorm(channels)

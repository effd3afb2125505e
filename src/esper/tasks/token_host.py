"""A host for vectors and sequences whose stages may lack a nonlinearity or attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from esper.growth.standalone import portable_host


class TokenStage(nn.Module):
    """A linear map of each position, then optionally ReLU, then optionally causal attention added to it."""

    def __init__(self, inputs: int, width: int, bends: bool, attends: bool) -> None:
        super().__init__()
        self.project = nn.Linear(inputs, width)
        self.bends = bends
        self.attends = attends
        if attends:
            self.norm = nn.LayerNorm(width)
            self.query_key_value = nn.Linear(width, 3 * width, bias=False)
            self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.project(x)  # [batch, (time,) width]
        if self.bends:
            x = F.relu(x)
        if self.attends:
            # With an axis for heads, even if there is one: without it torch takes a path of half the speed.
            query, key, value = self.query_key_value(self.norm(x)).unsqueeze(1).chunk(3, -1)
            seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self.out(seen.squeeze(1))
        return x


@portable_host
class TokenHost(nn.Module):
    """Stages for vectors [batch, features] or sequences [batch, time, features], then a mean over time and a head.

    `bends[i]` and `attends[i]` say whether stage i has a ReLU and attention; `pools[i]` is the factor by which its
    output is averaged along time (1: not at all). Hosts without one of them have a fault that growth can repair.
    """

    def __init__(
        self,
        features: int,
        widths: list[int],
        classes: int,
        bends: list[bool],
        attends: list[bool],
        pools: list[int],
    ) -> None:
        super().__init__()
        self.config: dict[str, object] = {
            "features": features,
            "widths": list(widths),
            "classes": classes,
            "bends": list(bends),
            "attends": list(attends),
            "pools": list(pools),
        }
        if not widths or not len(widths) == len(bends) == len(attends) == len(pools):
            raise ValueError(f"TokenHost needs one of bends, attends and pools per width; got {self.config}")
        inputs = [features, *widths]
        self.stages = nn.ModuleList(TokenStage(inputs[i], w, bends[i], attends[i]) for i, w in enumerate(widths))
        self.pools = list(pools)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage, factor in zip(self.stages, self.pools, strict=True):
            x = stage(x)
            if factor > 1:
                x = x.reshape(x.shape[0], -1, factor, x.shape[2]).mean(2)
        logits: torch.Tensor = self.head(x.mean(1) if x.dim() == 3 else x)
        return logits  # [batch, classes]

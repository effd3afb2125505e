"""A ResNet of twenty layers for small images, as in the paper that introduced them."""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        stride = 1 if before == width else 2
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        short = [nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width)]
        self.short = nn.Sequential(*short) if before != width else nn.Identity()

    def forward(self, h: Tensor) -> Tensor:
        return F.relu(self.body(h) + self.short(h))


def resnet_20(width: int) -> nn.Module:
    widths = [width] * 4 + [2 * width] * 3 + [4 * width] * 3
    blocks = [ResidualBlock(a, b) for a, b in pairwise(widths)]
    stem = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))

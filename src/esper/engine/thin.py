"""Convolutions over few channels, such as the three of a picture, in bfloat16.

Tensor cores take channels by eights. For a picture, cuDNN falls back to a kernel that keeps a whole GPU busy for three
times as long as the next convolution: 115 of the 659 µs of GPU time that one network's environment-step takes in the
benchmark (compiled, each kernel counted by the share of the GPU that it can fill; docs/performance.md). With channels
of zeros added to the picture and to the weights it is an ordinary convolution, with the same result.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS = 8
"""Fewer input channels than this are filled up."""


class ThinConv2d(nn.Conv2d):
    """A convolution that adds the missing channels when it calculates in bfloat16; in all else what it was."""

    esper_plain_class = nn.Conv2d
    """What it is again in an exported model (`growth/export.py`)."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if weight.dtype is torch.bfloat16:
            missing = (0, 0, 0, 0, 0, CHANNELS - weight.shape[1])
            input, weight = F.pad(input.to(weight.dtype), missing), F.pad(weight, missing)
        output: Tensor = super()._conv_forward(input, weight, bias)
        return output


def fill_up_channels(host: nn.Module) -> None:
    """Make the convolutions of few channels such ones. Weights, names and hooks stay; subclasses are left alone."""
    for module in host.modules():
        if type(module) is nn.Conv2d and module.groups == 1 and module.in_channels < CHANNELS:
            module.__class__ = ThinConv2d

"""Convolutions of few channels in bfloat16: of a picture's three, and of small networks' eight to 32.

The common kind, 3×3 over every pixel, has kernels of its own (`small_conv.py`): cuDNN's take two to four times as long
(docs/performance.md). For any other kind, tensor cores take channels by eights, so channels of zeros are added to the
picture and to the weights. The result is the same but for rounding. Where the kernels cannot be built, cuDNN makes all
of them, and the log says why.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.errors import first_line

try:
    from esper.engine.small_conv import MOST_CHANNELS, by_pixel, small_conv2d
except ImportError:  # no GPU here, or one that has to do without these kernels
    MOST_CHANNELS = 0

log = logging.getLogger(__name__)

CHANNELS = 8
"""Fewer input channels than this are filled up."""


class PaddedConv2d(nn.Conv2d):
    """A convolution of few input channels, filled up with zeros in bfloat16; in all else what it was."""

    esper_plain_class = nn.Conv2d
    """What it is again in an exported model (`growth/export.py`)."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if weight.dtype is torch.bfloat16 and self.in_channels < CHANNELS:
            missing = (0, 0, 0, 0, 0, CHANNELS - self.in_channels)
            input, weight = F.pad(input.to(weight.dtype), missing), F.pad(weight, missing)
        output: Tensor = super()._conv_forward(input, weight, bias)
        return output


class SmallConv2d(PaddedConv2d):
    """One for which there are kernels that work here (`is_small`, `kernels_work`)."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if weight.dtype is torch.bfloat16 and input.is_cuda and _fits(input):
            # A picture is cast as it is read. What a layer made, that layer had better write in half precision.
            known = input if self.in_channels < CHANNELS else input.to(weight.dtype)
            found: Tensor = small_conv2d(by_pixel(known), weight, bias)
            return found
        return super()._conv_forward(input, weight, bias)


def _fits(x: Tensor) -> bool:
    """A batch of images, whose numbers can be counted in 32 bits."""
    return x.dim() == 4 and x.shape[0] * x.shape[2] * x.shape[3] * MOST_CHANNELS < 2**31


def is_small(conv: nn.Conv2d) -> bool:
    """Whether `small_conv2d` can make it."""
    settings = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups, conv.padding_mode)
    ordinary = settings == ((3, 3), (1, 1), (1, 1), (1, 1), 1, "zeros")
    return ordinary and max(conv.in_channels, conv.out_channels) <= MOST_CHANNELS


def use_few_channel_convs(network: nn.Module) -> None:
    """Make its convolutions of few channels such ones. Weights, names and hooks stay; subclasses are left alone."""
    for module in network.modules():
        if type(module) is not nn.Conv2d:
            continue
        if kernels_work(module.weight.device) and is_small(module):
            module.__class__ = SmallConv2d
        elif module.groups == 1 and module.in_channels < CHANNELS:
            module.__class__ = PaddedConv2d


@cache
def kernels_work(device: torch.device) -> bool:
    """Decided once for each device, when its first network is prepared: a capture is no time to find out."""
    fault = _fault(device)
    if fault:
        log.warning("%s: cuDNN makes small convolutions, at a half to a quarter of the speed", fault)
    return not fault


def _fault(device: torch.device) -> str:
    """Why the kernels cannot be used there; empty if they can."""
    if MOST_CHANNELS == 0:
        return "Triton is not installed"
    try:
        _try_kernels(device)
    except torch.cuda.OutOfMemoryError:
        raise  # of no kernel's making
    except Exception as error:  # no C compiler, a driver or a GPU that Triton cannot use: each has a kind of its own
        return f"Triton's kernels do not work on {device} ({type(error).__name__}: {first_line(error)})"
    return ""


def _try_kernels(device: torch.device) -> None:
    """All of them, forwards and backwards, on an image of zeros."""
    with torch.cuda.device(device), torch.enable_grad():
        shapes = (1, 8, 8, 8), (8, 8, 3, 3), (8,)
        x, weight, bias = (torch.zeros(s, dtype=torch.bfloat16, device=device, requires_grad=True) for s in shapes)
        torch.autograd.grad(small_conv2d(by_pixel(x), weight, bias).sum(), (x, weight, bias))
        torch.cuda.synchronize()  # an error on the device is raised only here

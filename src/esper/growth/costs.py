"""FLOPs of one example's forward pass, counted.

Everything that shows FLOPs takes them from here. As in `torch.utils.flop_counter`, a multiply-add counts as two, and
what is neither a matrix product, a convolution nor an attention (norms, activations, sums) as nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from esper.growth.blueprints import SlotShape
from esper.growth.probe import call, untouched, with_batch
from esper.growth.randomness import preserved_rng
from esper.growth.seed import Seed


def flops_per_example(model: nn.Module, example: Any) -> int:
    """Floating-point operations of one example's forward pass: matrix products, convolutions and attention."""
    counter = FlopCounterMode(display=False)
    with untouched(model), sdpa_kernel(SDPBackend.MATH), _without_fused_layers(), counter:
        call(model, with_batch(example, 2))
    return int(counter.get_total_flops()) // 2


def countable_flops(model: nn.Module, example: Any) -> int | None:
    """The same; None for a pass that torch cannot count, such as one that takes gradients of its own."""
    try:
        return flops_per_example(model, example)
    except Exception:  # torch's counter fails in ways of its own, and a model is no worse for that
        return None


@contextmanager
def _without_fused_layers() -> Iterator[None]:
    """Attention and recurrent layers in parts: the counter has entries for these, and fused ones count as nothing."""
    fastpath, onednn = torch.backends.mha.get_fastpath_enabled(), torch._C._get_mkldnn_enabled()
    cudnn = torch.backends.cudnn.enabled
    torch.backends.mha.set_fastpath_enabled(False)
    torch._C._set_mkldnn_enabled(False)
    torch._C._set_cudnn_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        torch._C._set_mkldnn_enabled(onednn)
        torch._C._set_cudnn_enabled(cudnn)


@cache
def seed_flops(blueprint: str, shape: SlotShape, blend: str = "linear") -> int:
    """FLOPs of one example's pass through such a seed."""

    def on(device: str) -> int:
        with preserved_rng(torch.device("cpu")), torch.device(device):
            seed = Seed(blueprint, shape, blend)
            return flops_per_example(seed, shape.inputs(2) if seed.reads_input else shape.example(2))

    try:
        return on("meta")  # takes no memory and no time
    except Exception:  # a blueprint of a user's may look at values; the number is the same
        return on("cpu")

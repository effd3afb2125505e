"""How precisely a GPU calculates. A CPU always calculates in the precision of the tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import StrEnum

import torch


class Precision(StrEnum):
    FP32 = "fp32"
    """Single precision throughout."""
    TF32 = "tf32"
    """Products of matrices and convolutions round their inputs to 10 bits, and add in single precision."""
    BF16 = "bf16"
    """Passes in bfloat16, images channels last; weights, optimizer, losses and statistics stay in single precision."""


BF16_DEVICES = frozenset({"cuda"})
"""Where bfloat16 is faster than single precision."""


def uses_bf16(precision: Precision, device: torch.device) -> bool:
    """Whether passes are made in bfloat16."""
    return precision is Precision.BF16 and device.type in BF16_DEVICES


@contextmanager
def arithmetic(precision: Precision, device: torch.device) -> Iterator[None]:
    with ExitStack() as stack:
        if uses_bf16(precision, device):
            # No cache of cast weights: it would outlive the capture of a CUDA graph.
            stack.enter_context(torch.autocast(device.type, torch.bfloat16, cache_enabled=False))
        if device.type == "cuda":
            stack.enter_context(_rounding(precision is not Precision.FP32))
        yield


@contextmanager
def _rounding(rounded: bool) -> Iterator[None]:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    matmul.allow_tf32 = cudnn.allow_tf32 = rounded
    cudnn.benchmark = True  # shapes repeat thousands of times, and what cuDNN guesses for small ones is often slow
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before

"""How precisely a GPU calculates. A CPU always calculates in the precision of the tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from enum import StrEnum

import torch


class Precision(StrEnum):
    FP32 = "fp32"
    """Single precision throughout."""
    TF32 = "tf32"
    """Products of matrices and convolutions round their inputs to 10 bits, and add in single precision."""
    BF16 = "bf16"
    """Passes in bfloat16, images channels last; weights, optimizer, losses and statistics stay in single precision."""


@contextmanager
def arithmetic(precision: Precision, device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    rounded = precision is not Precision.FP32
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    matmul.allow_tf32 = cudnn.allow_tf32 = rounded
    cudnn.benchmark = True  # shapes repeat thousands of times, and what cuDNN guesses for small ones is often slow
    # No cache of cast weights: it would outlive the capture of a CUDA graph.
    half = torch.autocast("cuda", torch.bfloat16, cache_enabled=False) if precision is Precision.BF16 else nullcontext()
    try:
        with half:
            yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before

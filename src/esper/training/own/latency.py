"""How long a forward pass takes here and now, on request: wall-clock times belong to a machine, not to a model."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from esper.growth.probe import call, untouched

WARM_UP = 3
PASSES = 20
"""Of which the median counts."""


def latency(model: nn.Module, example: Any) -> float:
    """Milliseconds of one forward pass of this batch, in evaluation mode, as PyTorch runs it; the median of some."""
    device = next(model.parameters()).device
    inputs = tree_map_only(Tensor, lambda tensor: tensor.to(device), example)
    seconds = []
    with untouched(model):
        for _ in range(WARM_UP + PASSES):
            _wait_for(device)
            start = time.perf_counter()
            call(model, inputs)
            _wait_for(device)
            seconds.append(time.perf_counter() - start)
    return 1000.0 * median(seconds[WARM_UP:])


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)

"""What the update needs from other ranks: averages, and nothing else. One process is the case where they are itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Reducer(Protocol):
    """Averages over all ranks. Every rank must call it the same number of times, in the same order."""

    @property
    def ranks(self) -> int: ...

    def mean(self, tensor: Tensor) -> Tensor:
        """The average over ranks, as a new tensor (or the same one if there is a single rank)."""

    def mean_in_place(self, tensors: Sequence[Tensor]) -> None: ...


class SingleProcess:
    """The only rank there is."""

    ranks = 1

    def mean(self, tensor: Tensor) -> Tensor:
        return tensor

    def mean_in_place(self, tensors: Sequence[Tensor]) -> None:
        return


class ProcessGroup:
    """All ranks of the initialised default group; gradients travel as one flat tensor."""

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise RuntimeError("ProcessGroup needs torch.distributed.init_process_group first (torchrun sets it up)")
        self.ranks = dist.get_world_size()

    def mean(self, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total / self.ranks

    def mean_in_place(self, tensors: Sequence[Tensor]) -> None:
        flat = self.mean(torch.cat([tensor.flatten() for tensor in tensors]))
        for tensor, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

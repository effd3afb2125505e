"""The counted numbers of one draw, for engines that train one network at a time: first weights and minibatches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from esper.tasks.counted import Purpose, integers, uniforms

Uniforms = Callable[[int, int], Tensor]
"""(first, count) → [count] float32 in [0, 1)"""


class CountedInit(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Within, `Tensor.uniform_` takes the next of the given numbers: modules are filled in the order in which torch
    would draw their weights, whatever the order of their parameters, and layers that start at zero still use up theirs.
    """

    def __init__(self, uniforms: Uniforms) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uniforms = uniforms
        self.used = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.ops.aten.uniform_.default:
            return func(*args, **(kwargs or {}))
        return self._fill(*args)

    def _fill(self, tensor: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
        if tensor.is_meta:  # only sizes are asked for
            return tensor
        drawn = self.uniforms(self.used, tensor.numel())
        self.used += tensor.numel()
        return tensor.copy_(scaled_uniform(drawn, low, high).reshape(tensor.shape))


def scaled_uniform(drawn: Tensor, low: float, high: float) -> Tensor:
    """Uniform numbers from `low` to `high`: bit for bit what torch makes of the same numbers.

    torch rounds both ends to float32, and the result once.
    """
    ends = torch.tensor([low, high], dtype=torch.float32, device=drawn.device).double()
    return (drawn.double() * (ends[1] - ends[0]) + ends[0]).to(drawn.dtype)


@dataclass(frozen=True, slots=True)
class DrawNumbers:
    """A draw's numbers by its key. `esper.tasks.problems.Problems` has the same numbers for many draws at once."""

    key: int

    @property
    def _keys(self) -> Tensor:
        return torch.tensor([self.key], dtype=torch.int64, device="cpu")  # a host may be built on the meta device

    def host(self) -> CountedInit:
        """Within, the host is built."""
        return CountedInit(lambda first, count: uniforms(self._keys, Purpose.HOST, count, first)[0])

    def seed(self, number: int) -> CountedInit:
        """Within, the network's seed of this number (from 1 on) is built."""
        start = number << 32
        return CountedInit(lambda first, count: uniforms(self._keys, Purpose.SEED, count, start + first)[0])

    def examples(self, first: int, count: int, below: int) -> Tensor:
        """[count] int64: which examples the minibatches hold, from the `first` one of the whole run on."""
        return integers(self._keys, Purpose.MINIBATCH, count, below, first)[0]

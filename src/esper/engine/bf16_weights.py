"""Weights in bfloat16 beside those in single precision, cast all at once.

Autocast casts a weight wherever it is used, and its gradient back: in a small network that is a fifth of all kernels.
Here the layers whose weights autocast would cast hold bfloat16 copies while passes are made; one call casts all of them
after an update, and one all of their gradients. The numbers are autocast's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from esper.engine.few_channel_conv import PaddedConv2d, SmallConv2d

CAST = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, PaddedConv2d, SmallConv2d)
"""Layers that do nothing with their weights but what autocast does in bfloat16; their subclasses may do more."""


def _is_plain(module: nn.Module) -> bool:
    """Old-style weight and spectral norms make the weight in a hook, from parameters that autocast leaves alone."""
    return type(module) in CAST and not module._forward_pre_hooks and set(module._parameters) <= {"weight", "bias"}


class Bf16Weights:
    """The copies of one model's weights."""

    def __init__(self, model: nn.Module) -> None:
        holders = [(m, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None]
        uses = {id(p): sum(p is other for _, _, other in holders) for _, _, p in holders}
        self._places = [
            (module, name, parameter)
            for module, name, parameter in holders
            if _is_plain(module) and parameter.dtype is torch.float32 and uses[id(parameter)] == 1
        ]
        self._weights: list[Tensor] = [parameter for _, _, parameter in self._places]
        self._copies: list[Tensor] = [
            nn.Parameter(torch.empty_like(p, dtype=torch.bfloat16), requires_grad=p.requires_grad)
            for p in self._weights
        ]
        self._copy_of = {id(p): copy for p, copy in zip(self._weights, self._copies, strict=True)}
        self._weight_of = {id(copy): p for p, copy in zip(self._weights, self._copies, strict=True)}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, the layers hold the copies. Optimizers and lists of parameters made before keep the weights."""
        self.refresh()
        try:
            for (module, name, _), copy in zip(self._places, self._copies, strict=True):
                module._parameters[name] = copy  # type: ignore[assignment]  # a Parameter in a list of tensors
            yield
        finally:
            for module, name, weight in self._places:
                module._parameters[name] = weight

    def refresh(self) -> None:
        """The weights have changed."""
        if self._copies:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, self._weights)

    def hand_over(self) -> None:
        """Give the gradients of the copies to the weights, in single precision."""
        ready = [(weight, copy.grad) for weight, copy in zip(self._weights, self._copies, strict=True)]
        found = [(weight, gradient) for weight, gradient in ready if gradient is not None]
        if not found:
            return
        gradients = [torch.empty_like(weight) for weight, _ in found]
        torch._foreach_copy_(gradients, [gradient for _, gradient in found])
        for (weight, _), gradient in zip(found, gradients, strict=True):
            weight.grad = gradient
        for copy in self._copies:
            copy.grad = None

    def copies_of(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """What stands in the layers for these; parameters without a copy stand for themselves."""
        return [self._copy_of.get(id(parameter), parameter) for parameter in parameters]

    def weights_of(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The other way round."""
        return [self._weight_of.get(id(parameter), parameter) for parameter in parameters]

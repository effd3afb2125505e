"""The gradient of every parameter, for the detailed level: vectorised, with one transfer for all of an update.

`GradientWatch` hooks an optimizer, so that the code that trains is the same without it. It reads gradients as the
optimizer does, after clipping; the norms before clipping are metrics of every update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from esper.telemetry.alarms import EXPLODING, VANISHING


def one_device(tensors: Sequence[Tensor]) -> torch.device:
    """The device they share. Norms over tensors on several devices would need a transfer for each: refused (R153)."""
    devices = sorted({str(tensor.device) for tensor in tensors})
    if len(devices) != 1:
        raise ValueError(f"parameters lie on several devices ({', '.join(devices)}): one agent lives on one")
    return tensors[0].device


class GradientWatch:
    """While entered and enabled, notes each parameter's gradient at every step of an optimizer. A parameter without a
    gradient counts as zero gradient."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        network: nn.Module,
        clip_norm: float,
        *,
        enabled: bool = True,
        limits: tuple[float, float] = (VANISHING, EXPLODING),
    ) -> None:
        self._optimizer = optimizer
        self._names, self._parameters = zip(*network.named_parameters(), strict=True)
        self._vanishing, self._exploding = (limit * clip_norm for limit in limits)
        self._enabled = enabled
        self._steps: list[Tensor] = []

    def __enter__(self) -> GradientWatch:
        if self._enabled:
            self._handle = self._optimizer.register_step_pre_hook(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if self._enabled:
            self._handle.remove()

    def _note(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """[2, P] on their device: norm and largest absolute entry of each parameter's gradient."""
        norms = torch.zeros(2, len(self._parameters), device=one_device(self._parameters))
        with_gradient = [i for i, parameter in enumerate(self._parameters) if parameter.grad is not None]
        if with_gradient:
            gradients = [self._parameters[i].grad.detach() for i in with_gradient]
            both = torch.stack((*torch._foreach_norm(gradients), *torch._foreach_norm(gradients, torch.inf)))
            norms[:, with_gradient] = both.float().view(2, -1)
        self._steps.append(norms)

    def metrics(self) -> dict[str, float]:
        """By logged name, over the steps since the last call; empty without a step.

        `gradient/PARAMETER` is its mean norm, `gradient_largest` the largest entry of any (NaN if one is), and the
        other two count parameters whose mean norm is beyond the limits of the alarms (R120).
        """
        if not self._steps:
            return {}
        steps, self._steps = torch.stack(self._steps), []  # [S, 2, P]
        norm, largest = steps[:, 0].mean(0), steps[:, 1].max()
        vanishing = (norm < self._vanishing).sum()
        exploding = (~(norm <= self._exploding)).sum()  # NaN is here
        flat = torch.cat(
            (norm, torch.stack((largest, vanishing.float(), exploding.float())))
        ).tolist()  # the one transfer
        names = [*(f"gradient/{name}" for name in self._names), "gradient_largest"]
        return dict(zip([*names, "gradients_vanishing", "gradients_exploding"], flat, strict=True))

"""Gradient statistics per parameter, for the detailed level: vectorised, with one transfer for all of them.

`GradientWatch` listens to an optimizer, so that the code that trains need not know it. It sees gradients as the
optimizer does, after clipping; the global norm before clipping is a metric of every update.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class GradientStatistics:
    """Of one set of parameters; those without a gradient count as zero gradient."""

    names: tuple[str, ...]
    norms: tuple[float, ...]
    largest: float
    """Largest absolute entry; NaN if any is."""
    vanishing: tuple[str, ...]
    exploding: tuple[str, ...]
    """NaN and infinity are here."""

    def metrics(self) -> dict[str, float]:
        """By logged name."""
        named = {f"gradient/{name}": norm for name, norm in zip(self.names, self.norms, strict=True)}
        return named | {
            "gradient_largest": self.largest,
            "gradients_vanishing": float(len(self.vanishing)),
            "gradients_exploding": float(len(self.exploding)),
        }


def on_one_device(tensors: Sequence[Tensor]) -> torch.device:
    """Their device. Norms over several would need a transfer for each and could not be stacked: refused (R153)."""
    devices = sorted({str(tensor.device) for tensor in tensors})
    if len(devices) != 1:
        raise ValueError(
            f"these parameters lie on {len(devices)} devices ({', '.join(devices)}): collect the statistics of each "
            "device's parameters on their own"
        )
    return tensors[0].device


def parameter_norms(parameters: Sequence[nn.Parameter]) -> Tensor:
    """[2, P] on their device: norm and largest absolute entry of each parameter's gradient."""
    device = on_one_device([parameter.data for parameter in parameters])
    norms = torch.zeros(2, len(parameters), device=device)
    with_gradient = [i for i, parameter in enumerate(parameters) if parameter.grad is not None]
    if with_gradient:
        gradients = [parameter.grad.detach() for parameter in parameters if parameter.grad is not None]
        both = torch.stack((*torch._foreach_norm(gradients), *torch._foreach_norm(gradients, torch.inf)))
        norms[:, with_gradient] = both.float().view(2, -1)
    return norms


def gradient_statistics(
    named: Iterable[tuple[str, nn.Parameter]], vanishing: float, exploding: float
) -> GradientStatistics:
    """Of the gradients that are there now, with one transfer. The limits derive from the clip norm (R120)."""
    names, parameters = zip(*named, strict=True)
    return _statistics(names, parameter_norms(parameters), vanishing, exploding)


def _statistics(names: tuple[str, ...], norms: Tensor, vanishing: float, exploding: float) -> GradientStatistics:
    norm, largest = norms
    flat = torch.cat((norm, norm < vanishing, ~(norm <= exploding), largest.max()[None])).tolist()  # the one transfer
    count = len(names)
    return GradientStatistics(
        names=names,
        norms=tuple(flat[:count]),
        largest=flat[-1],
        vanishing=tuple(name for name, is_so in zip(names, flat[count : 2 * count], strict=True) if is_so),
        exploding=tuple(name for name, is_so in zip(names, flat[2 * count : 3 * count], strict=True) if is_so),
    )


class GradientWatch:
    """While entered, notes each parameter's gradient at every step of an optimizer: the mean norm and the extremes."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named: Iterable[tuple[str, nn.Parameter]],
        vanishing: float,
        exploding: float,
    ) -> None:
        self._optimizer = optimizer
        self._names, self._parameters = zip(*named, strict=True)
        self._limits = vanishing, exploding
        self._sum: Tensor | None = None
        self._most: Tensor | None = None
        self._steps = 0

    def __enter__(self) -> GradientWatch:
        self._handle = self._optimizer.register_step_pre_hook(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        self._handle.remove()

    def _note(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        norms = parameter_norms(self._parameters)
        self._sum = norms if self._sum is None else self._sum + norms
        self._most = norms if self._most is None else torch.maximum(self._most, norms)  # keeps NaN
        self._steps += 1

    def drain(self) -> GradientStatistics | None:
        """Over the steps since the last call; None without a step. Norms are means, `largest` is of all steps."""
        if self._sum is None or self._most is None:
            return None
        norms = torch.stack((self._sum[0] / self._steps, self._most[1]))
        self._sum = self._most = None
        self._steps = 0
        return _statistics(self._names, norms, *self._limits)

"""A moving average of the weights of a network that grows: seeds join it when they are planted, and leave with it.

`torch.optim.swa_utils.AveragedModel` pairs two lists of parameters, which would be of two networks here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from esper.growth.model import GrowingModel
from esper.growth.plain import grafted, plain_model
from esper.growth.seed import Seed

Averages = dict[str, Tensor]
"""By the name of the parameter: the host's own, and `SLOT/NAME` of a seed."""


class WeightAverage:
    """An exponential moving average, as `get_ema_multi_avg_fn(decay)` makes it; the first update is copied."""

    def __init__(self, model: GrowingModel, decay: float) -> None:
        if not 0.0 < decay < 1.0:
            raise ValueError(
                f"average= is the decay of a moving average, between 0 and 1, such as 0.999; not {decay!r}"
            )
        self._model, self._decay = model, decay
        self._averages: Averages = {}
        self._kept: Averages = {}
        self._seeds: dict[int, Seed | None] = {}
        """Those whose weights are in the average: another one in the same slot begins anew."""

    def update(self) -> None:
        """After an update of the weights."""
        for slot in self._model.slots:
            if self._seeds.get(slot.index) is not slot.seed:
                self._averages = {n: v for n, v in self._averages.items() if not n.startswith(f"{slot.index}/")}
                self._seeds[slot.index] = slot.seed
        current = dict(self._named())
        known = [name for name in current if name in self._averages]
        if known:
            pairs = [self._averages[name] for name in known], [current[name] for name in known]
            torch._foreach_lerp_(*pairs, 1.0 - self._decay)
        self._averages = {name: self._averages.get(name, value.clone()) for name, value in current.items()}

    def keep(self) -> None:
        """As it is at the beginning of an epoch, in case the epoch is undone."""
        self._kept = {name: value.clone() for name, value in self._averages.items()}

    def undo(self) -> None:
        self._averages = self._kept
        self._seeds = {}  # a rollback may have taken seeds away: those that are there now begin anew

    def model(self) -> nn.Module:
        """The network as it is now, with averaged weights, in evaluation mode. Buffers are those of now."""
        plain = plain_model(self._model).eval()
        seeds = {slot.path: str(slot.index) for slot in self._model.joined}
        earlier = {path: len(found) for path, found in _by_path(self._model.host).items()}
        targets = dict(plain.named_parameters())
        for path, found in _by_path(plain).items():
            for seed in found[earlier.get(path, 0) :]:
                targets |= {f"{seeds[path]}/{name}": p for name, p in seed.named_parameters()}
        with torch.no_grad():
            for name, value in self._averages.items():
                if (target := targets.get(name)) is not None:  # incubating seeds are in no plain model
                    target.copy_(value)
        return plain

    def state(self) -> Averages:
        return {name: value.clone() for name, value in self._averages.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        device = self._model.device
        self._averages = {name: value.to(device, copy=True) for name, value in state.items()}
        self._seeds = {slot.index: slot.seed for slot in self._model.slots}

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._model.host.named_parameters():
            yield name, parameter.detach()
        for slot in self._model.slots:
            if slot.seed is not None:
                for name, parameter in slot.seed.body.named_parameters():
                    yield f"{slot.index}/{name}", parameter.detach()


def _by_path(model: nn.Module) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for path, one in grafted(model):
        found.setdefault(path, []).append(one.seed)
    return found

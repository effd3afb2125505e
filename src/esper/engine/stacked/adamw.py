"""AdamW for many networks at once: each has its own rate, warm-up, decay and number of steps.

All of these are known before an epoch begins, so they are tables with one line per update. An update reads its line:
a CUDA graph of one update can be replayed for the whole epoch. Networks that make fewer updates than others stand still
for the rest: weights, moments and step counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.engine.prepare import DECAY
from esper.engine.stacked.functions import kernels_for

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
"""torch's defaults, which every built-in task uses."""


@dataclass(frozen=True, slots=True)
class Course:
    """Where networks [m] are in their training, float64 or int64."""

    rate: Tensor
    weight_decay: Tensor
    updates: Tensor
    """Per epoch."""
    total: Tensor
    """Updates of the whole run, over whose last part the rate falls to zero."""
    made: Tensor
    """Updates that the network has made."""

    def of(self, networks: Tensor) -> Course:
        return Course(*(getattr(self, name)[networks] for name in self.__slots__))


@dataclass(slots=True)
class Moments:
    """What is trained, with Adam's running averages, and the steps [m] that it has made."""

    values: Tensor
    """[3, m, P]: the weights, the average of gradients, the average of their squares."""
    steps: Tensor

    @classmethod
    def of(cls, weights: Tensor) -> Moments:
        steps = torch.zeros(len(weights), dtype=torch.int64, device=weights.device)
        return cls(torch.stack([weights, torch.zeros_like(weights), torch.zeros_like(weights)]), steps)

    @property
    def weights(self) -> Tensor:
        return self.values[0]

    @property
    def first(self) -> Tensor:
        return self.values[1]

    @property
    def second(self) -> Tensor:
        return self.values[2]

    def select(self, rows: Tensor, width: int) -> Moments:
        """Copies of some rows and their first columns, to work on."""
        return Moments(self.values[:, :, :width].index_select(1, rows), self.steps[rows])

    def write(self, rows: Tensor, worked: Moments, healthy: Tensor) -> None:
        """Take over the rows that are `healthy`."""
        kept = self.values[:, :, : worked.values.shape[2]]
        kept.index_copy_(1, rows, torch.where(healthy[:, None], worked.values, kept.index_select(1, rows)))
        self.steps.index_copy_(0, rows, torch.where(healthy, worked.steps, self.steps[rows]))

    def plant(self, rows: Tensor, weights: Tensor) -> None:
        """Something new begins in these rows."""
        self.values[1:, rows] = 0.0
        self.values[0, rows, : weights.shape[1]] = weights.to(self.values.dtype)
        self.steps[rows] = 0


def rate_table(course: Course, steps: Tensor, young: Tensor, updates: int, dtype: torch.dtype) -> Tensor:
    """[updates, m, 6]: what each update needs to know of each row; `updates` is the most of any network in the epoch.

    `steps` [m] that each row has made; `young` [m] bool: its rate rises over its first epoch, as a seed's does.
    """
    update = torch.arange(updates, device=steps.device)[:, None]  # [updates, 1]
    active = update < course.updates
    step = (steps + torch.minimum(update + 1, course.updates)).double()
    share = ((course.total - course.made - update) / (DECAY * course.total.double())).clamp(0.0, 1.0)
    rate = course.rate * share * active * torch.where(young, (step / course.updates).clamp(max=1.0), 1.0)
    correction = (1.0 - BETA2**step).sqrt()
    columns = [rate * correction / (1.0 - BETA1**step), EPSILON * correction, 1.0 - rate * course.weight_decay]
    moving, last = active.double(), (update == course.updates - 1).double()
    columns += [(1.0 - BETA1) * moving, (1.0 - BETA2) * moving, last]
    return torch.stack(columns, -1).to(dtype)


class EpochUpdates:
    """An epoch's updates of one set of weights."""

    def __init__(self, worked: Moments, table: Tensor, made: Tensor, real: Tensor, *, same: bool) -> None:
        """`table` is the rows' part of `rate_table`, `made` [m] the updates that each row will have made; `real` [m, P]
        is what is no padding; `same`: all rows make all updates."""
        self._kernels = kernels_for(worked.values)
        blocks = 1
        if self._kernels is not None:
            self._real: Tensor | None = real.contiguous()
            blocks = self._kernels.adamw_blocks(real.shape[1])
        else:
            self._real = None if bool(real.all()) else real.to(worked.values.dtype)
        self.worked, self._table, self._made, self._same = worked, table.contiguous(), made, same
        self.leaf = worked.weights.detach().requires_grad_()
        """In the memory of `worked`."""
        self._squares = torch.zeros((len(real), blocks), dtype=worked.values.dtype, device=real.device)

    @property
    def gradient(self) -> Tensor:
        """[m] squared norm of the gradient at the last update of each row."""
        return self._squares.sum(1)

    @torch.no_grad()
    def step(self, gradient: Tensor, update: Tensor) -> None:
        """One update; `update` [1] is its number."""
        if self._kernels is not None:
            moments = self.worked.first, self.worked.second
            given = gradient.contiguous()
            self._kernels.adamw(self.leaf, moments, given, self._real, self._table, update, self._squares)
            return
        size, small, kept, new1, new2, last = self._table.index_select(0, update)[0].unsqueeze(-1).unbind(1)  # [m, 1]
        w = self.worked
        gradient = gradient if self._real is None else gradient * self._real
        w.first.lerp_(gradient, 1.0 - BETA1 if self._same else new1)
        square = gradient.square()
        w.second.lerp_(square, 1.0 - BETA2 if self._same else new2)
        self._squares.copy_(torch.where(last > 0, square.sum(1, keepdim=True), self._squares))
        self.leaf.mul_(kept).addcdiv_(w.first * -size, w.second.sqrt().add_(small))

    def finish(self) -> Moments:
        return Moments(self.worked.values, self.worked.steps + self._made)

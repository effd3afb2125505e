"""N growing networks between two epochs, as columns: all that observations, masks and rewards are made of.

The slots' columns are the engine's own (`esper.slot_columns`) and change with it; the networks' columns are filled in
`record`. NaN is what was not measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from esper.engine.eager import EpochRecord
from esper.growth.blueprints import LAYOUTS, blueprint_names
from esper.growth.model import GrowingModel
from esper.lifecycle import Stage
from esper.slot_columns import PLANTED, SlotColumns

_LAYOUTS = tuple(LAYOUTS)
HISTORY = 4
"""Past epochs whose results are kept besides the current one's."""


@dataclass(slots=True)
class World:
    """Columns of networks are [N], those of slots [N, S]; float64 unless noted."""

    slots: SlotColumns
    layout: Tensor
    """[N, S] int64: index into `LAYOUTS`."""
    channels: Tensor
    """[N, S]"""
    position: Tensor
    """[N, S]: place in the forward pass; 0 is the first slot, 1 the last."""
    costs: Tensor
    """[N, S, B]: parameters of each blueprint, with a gate; NaN where it does not fit."""
    host_parameters: Tensor
    budget: Tensor
    """Most parameters in all; infinity is no limit."""
    max_seeds: Tensor
    """Most seeds at a time; infinity is no limit."""
    horizon: Tensor
    """int64: epochs in all."""
    epoch: Tensor
    """int64: epochs done."""
    over: Tensor
    """bool: the episode has ended."""
    accuracy: Tensor
    """[N, 1 + HISTORY]: of the validation set, the latest first."""
    loss: Tensor
    """[N, 1 + HISTORY]"""
    best: Tensor
    """Highest accuracy so far."""
    best_epoch: Tensor
    """int64: when that was first reached."""
    train_loss: Tensor
    host_gradient: Tensor
    op: Tensor
    """int64: the last operation that was decided on; -1 before the first."""
    changed: Tensor
    """bool: whether it had an effect."""

    @classmethod
    def begin(cls, models: Sequence[GrowingModel], columns: SlotColumns, horizons: Sequence[int]) -> World:
        """Before the first epoch; `columns` are the slots of these models."""
        networks, slots = columns.present.shape
        names = blueprint_names()
        world = cls(
            slots=columns,
            layout=torch.zeros((networks, slots), dtype=torch.int64),
            channels=torch.zeros((networks, slots), dtype=torch.float64),
            position=torch.zeros((networks, slots), dtype=torch.float64),
            costs=torch.full((networks, slots, len(names)), math.nan, dtype=torch.float64),
            host_parameters=_column([model.host_parameters for model in models]),
            budget=_column([math.inf if model.budget is None else model.budget for model in models]),
            max_seeds=_column([math.inf if model.max_seeds is None else model.max_seeds for model in models]),
            horizon=torch.tensor(list(horizons)),
            epoch=torch.zeros(networks, dtype=torch.int64),
            over=torch.zeros(networks, dtype=torch.bool),
            accuracy=torch.full((networks, 1 + HISTORY), math.nan, dtype=torch.float64),
            loss=torch.full((networks, 1 + HISTORY), math.nan, dtype=torch.float64),
            best=_column([-math.inf] * networks),
            best_epoch=torch.zeros(networks, dtype=torch.int64),
            train_loss=_column([math.nan] * networks),
            host_gradient=_column([math.nan] * networks),
            op=torch.full((networks,), -1),
            changed=torch.zeros(networks, dtype=torch.bool),
        )
        for row, model in enumerate(models):
            count = len(model.slots)
            world.layout[row, :count] = torch.tensor([_LAYOUTS.index(slot.shape.layout) for slot in model.slots])
            world.channels[row, :count] = _column([slot.shape.channels for slot in model.slots])
            world.position[row, :count] = torch.arange(count, dtype=torch.float64) / max(1, count - 1)
            costs = [[model.costs(slot).get(name, math.nan) for name in names] for slot in model.slots]
            world.costs[row, :count] = torch.tensor(costs, dtype=torch.float64).reshape(count, len(names))
        return world

    def snapshot(self) -> World:
        """As it is now: only the original goes on to change."""
        return World(**{field.name: getattr(self, field.name).clone() for field in fields(self)})

    # -- what follows from the columns --------------------------------------------------------------------------------

    @property
    def planted(self) -> Tensor:
        """[N, S] bool: there is a seed."""
        return self.slots.within(PLANTED)

    @property
    def parameters(self) -> Tensor:
        return self.host_parameters + self.slots.size.sum(1)

    @property
    def acting_parameters(self) -> Tensor:
        """Of the host and the seeds that take part in its output: what a person would take home."""
        return self.host_parameters + (self.slots.size * (self.slots.alpha > 0.0)).sum(1)

    @property
    def seeds_left(self) -> Tensor:
        return self.max_seeds - self.planted.sum(1)

    @property
    def growable(self) -> Tensor:
        """[N, S, B] bool: what may germinate: in an empty slot, what fits it, the budget and the number of seeds."""
        free = (self.slots.stage == Stage.DORMANT) & (self.seeds_left > 0)[:, None]
        room = (self.budget - self.parameters)[:, None, None]
        return free[..., None] & (self.costs <= room)

    # -- what an epoch brings -----------------------------------------------------------------------------------------

    def record(self, records: Sequence[EpochRecord | None]) -> None:
        """Take in an epoch of every network that has a record; an undone epoch ends its episode."""
        happened = [record for record in records if record is not None]
        if not happened:
            return
        rows = torch.tensor([record is not None for record in records]).nonzero().flatten()
        accuracy = _column([record.measured.accuracy for record in happened])
        for history, latest in (
            (self.accuracy, accuracy),
            (self.loss, _column([record.measured.loss for record in happened]).nan_to_num(math.inf, posinf=math.inf)),
        ):
            history[rows] = torch.cat((latest[:, None], history[rows, :-1]), 1)
        better = accuracy > self.best[rows]
        self.best[rows] = torch.where(better, accuracy, self.best[rows])
        self.best_epoch[rows] = torch.where(better, self.epoch[rows], self.best_epoch[rows])
        self.train_loss[rows] = _column([record.trained.loss for record in happened])
        self.host_gradient[rows] = _column([record.trained.host_gradient for record in happened])
        self.op[rows] = torch.tensor([int(record.effect.action.op) for record in happened])
        self.changed[rows] = torch.tensor([record.effect.changed for record in happened])
        self.epoch[rows] += 1


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)

"""N growing networks between two epochs, as columns: all that observations, masks, rewards and rules are made of.

The slots' columns are the engine's own (`esper.slot_columns`) and change with it. The networks' columns are replaced in
`record` and `end`, never written into, so a snapshot shares them. All lie on one device, and nothing here waits for
it, except where a world is made. NaN is what was not measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.actions import Op
from esper.engine.epoch import EpochColumns
from esper.env.rent import RENT_RATE
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
    path: Tensor
    """[N, S] int64: name of the slot's module, index into `paths`."""
    paths: tuple[str, ...]
    """Every path once: rules that go by names look each one up once, however many networks there are."""
    costs: Tensor
    """[N, S, B]: parameters of each blueprint, with a gate; NaN where it does not fit."""
    host_parameters: Tensor
    budget: Tensor
    """Most parameters in all; infinity is no limit."""
    max_seeds: Tensor
    """Most seeds at a time; infinity is no limit."""
    rent: Tensor
    """Points that one more host-size of parameters must earn, in this episode; see `env.rent`."""
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
    bests: Tensor
    """[N, T]: the highest accuracy up to the end of each epoch."""
    train_loss: Tensor
    host_gradient: Tensor
    op: Tensor
    """int64: the last operation that was decided on; -1 before the first."""
    changed: Tensor
    """bool: whether it had an effect."""
    tried: Tensor
    """[N, S, B] int64: seeds of each blueprint that were planted so far."""

    @classmethod
    def start(
        cls,
        slots: SlotColumns,
        *,
        layout: Tensor,
        channels: Tensor,
        position: Tensor,
        costs: Tensor,
        host_parameters: Tensor,
        budget: Tensor,
        max_seeds: Tensor,
        horizon: Tensor,
        path: Tensor | None = None,
        paths: Sequence[str] | None = None,
        rent: float | Tensor = RENT_RATE,
    ) -> World:
        """Before the first epoch. Without `paths`, slots have those of the stages of generated hosts."""
        networks, width = slots.present.shape
        device = slots.present.device

        def column(value: float, dtype: torch.dtype = torch.float64, *more: int) -> Tensor:
            return torch.full((networks, *more), value, dtype=dtype, device=device)

        return cls(
            slots=slots,
            layout=layout,
            channels=channels,
            position=position,
            path=torch.arange(width, device=device).expand(networks, -1) if path is None else path,
            paths=tuple(f"stages.{i}" for i in range(width)) if paths is None else tuple(paths),
            costs=costs,
            host_parameters=host_parameters,
            budget=budget,
            max_seeds=max_seeds,
            rent=rent.to(device, torch.float64) if isinstance(rent, Tensor) else column(rent),
            horizon=horizon,
            epoch=column(0, torch.int64),
            over=column(False, torch.bool),
            accuracy=column(math.nan, torch.float64, 1 + HISTORY),
            loss=column(math.nan, torch.float64, 1 + HISTORY),
            best=column(-math.inf),
            best_epoch=column(0, torch.int64),
            bests=column(math.nan, torch.float64, max(1, int(horizon.max()))),
            train_loss=column(math.nan),
            host_gradient=column(math.nan),
            op=column(-1, torch.int64),
            changed=column(False, torch.bool),
            tried=column(0, torch.int64, *costs.shape[1:]),
        )

    @classmethod
    def of_models(
        cls,
        models: Sequence[GrowingModel],
        columns: SlotColumns,
        horizons: Sequence[int],
        rent: float | Tensor = RENT_RATE,
    ) -> World:
        """Of networks that are modules of their own; `columns` are their slots."""
        networks, width = columns.present.shape
        names = blueprint_names()
        paths = tuple(dict.fromkeys(slot.path for model in models for slot in model.slots))
        layout = torch.zeros((networks, width), dtype=torch.int64)
        path = torch.zeros((networks, width), dtype=torch.int64)
        channels = torch.zeros((networks, width), dtype=torch.float64)
        position = torch.zeros((networks, width), dtype=torch.float64)
        costs = torch.full((networks, width, len(names)), math.nan, dtype=torch.float64)
        for row, model in enumerate(models):
            count = len(model.slots)
            layout[row, :count] = torch.tensor([_LAYOUTS.index(slot.shape.layout) for slot in model.slots])
            path[row, :count] = torch.tensor([paths.index(slot.path) for slot in model.slots])
            channels[row, :count] = _column([slot.shape.channels for slot in model.slots])
            position[row, :count] = torch.arange(count, dtype=torch.float64) / max(1, count - 1)
            prices = [[model.costs(slot).get(name, math.nan) for name in names] for slot in model.slots]
            costs[row, :count] = torch.tensor(prices, dtype=torch.float64).reshape(count, len(names))
        return cls.start(
            columns,
            layout=layout,
            channels=channels,
            position=position,
            costs=costs,
            host_parameters=_column([model.host_parameters for model in models]),
            budget=_column([math.inf if model.budget is None else model.budget for model in models]),
            max_seeds=_column([math.inf if model.max_seeds is None else model.max_seeds for model in models]),
            horizon=torch.tensor(list(horizons)),
            path=path,
            paths=paths,
            rent=rent,
        )

    def snapshot(self) -> World:
        """As it is now: only the original goes on to change."""
        return replace(self, slots=self.slots.clone())

    def select(self, rows: Tensor) -> World:
        """Copies of some rows."""
        chosen = {name: getattr(self, name)[rows] for name in _TENSORS}
        return World(slots=self.slots.select(rows), paths=self.paths, **chosen)

    @classmethod
    def together(cls, parts: Sequence[World]) -> World:
        """Copies of worlds of one network each, as one; padded to the most slots and epochs among them."""
        paths = tuple(dict.fromkeys(path for part in parts for path in part.paths))
        joined: dict[str, Tensor] = {}
        for name in _TENSORS:
            tensors = [getattr(part, name) for part in parts]
            if name == "path":
                numbers = [torch.tensor([paths.index(path) for path in part.paths]) for part in parts]
                tensors = [number[own] for number, own in zip(numbers, tensors, strict=True)]
            joined[name] = torch.cat([_widened(t, max(other.shape[1:2] for other in tensors)) for t in tensors])
        slots = SlotColumns.together([part.slots for part in parts])
        return cls(slots=slots, paths=paths, **joined)

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

    def record(self, epoch: EpochColumns) -> None:
        """Take in an epoch of every network that played one."""
        played, device = epoch.played, epoch.played.device

        def latest(new: Tensor, old: Tensor) -> Tensor:
            return torch.where(played if new.dim() == 1 else played[:, None], new, old)

        loss = epoch.loss.nan_to_num(math.inf, posinf=math.inf)
        self.accuracy = latest(torch.cat((epoch.accuracy[:, None], self.accuracy[:, :-1]), 1), self.accuracy)
        self.loss = latest(torch.cat((loss[:, None], self.loss[:, :-1]), 1), self.loss)
        better = played & (epoch.accuracy > self.best)
        self.best = torch.where(better, epoch.accuracy, self.best)
        self.best_epoch = torch.where(better, self.epoch, self.best_epoch)
        now = torch.arange(self.bests.shape[1], device=device) == self.epoch[:, None]  # [N, T]
        self.bests = torch.where(now & played[:, None], self.best[:, None], self.bests)
        self.train_loss = latest(epoch.train_loss, self.train_loss)
        self.host_gradient = latest(epoch.host_gradient, self.host_gradient)
        self.op = latest(epoch.op, self.op)
        self.changed = latest(epoch.changed, self.changed)
        slot, blueprint = (torch.arange(count, device=device) for count in self.tried.shape[1:])
        planted = played & epoch.changed & (epoch.op == Op.GERMINATE)
        where = planted[:, None] & (slot == epoch.slot[:, None])  # [N, S]
        self.tried = self.tried + (where[..., None] & (blueprint == epoch.blueprint[:, None, None]))
        self.epoch = self.epoch + played

    def end(self, ended: Tensor) -> None:
        """Mark the episodes [N] that are over."""
        self.over = self.over | ended


_TENSORS = tuple(field.name for field in fields(World) if field.name not in ("slots", "paths"))


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _widened(tensor: Tensor, width: Sequence[int]) -> Tensor:
    """Padded along its second axis, if it has one, with what is absent."""
    if not width or width[0] == tensor.shape[1]:
        return tensor
    empty = math.nan if tensor.is_floating_point() else 0
    return F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, width[0] - tensor.shape[1]), value=empty)

"""What a controller reads when it decides: readable records of networks between two epochs. Legality is part of them.

Rule-based controllers read them; the learned policy reads the same columns as tensors (`Situations.tensors`). All of it
was measured; what was not is None.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, overload

import torch

from esper.actions import BLENDS, Action, Op
from esper.engine.eager import EpochRecord
from esper.engine.learner import Learner
from esper.env.epoch_records import epoch_columns
from esper.env.observation import encode, legal_actions
from esper.env.rent import RENT_RATE
from esper.env.spaces import ActionMasks, Observation, stack_rows
from esper.env.world import World
from esper.growth.blueprints import Layout, blueprint_names
from esper.growth.model import GrowingModel
from esper.lifecycle import Contrast, Stage
from esper.slot_views import contrast_of


@dataclass(frozen=True, slots=True)
class SlotView:
    """One slot as a controller sees it."""

    index: int
    path: str
    layout: Layout
    channels: int
    position: float
    """Place in the forward pass: 0 is the first slot, 1 the last."""
    stage: Stage
    blueprint: str | None
    blend: str | None
    alpha: float
    age: int
    dwell: int
    retiring: bool
    seeds_before: int
    """Seeds that grew here and were removed."""
    parameters: int
    """Of the seed that is there now."""
    gradient: float | None
    shadow_benefit: Contrast | None
    contribution: Contrast | None
    staleness: int
    """Epochs since shadow benefit or contribution was last measured."""
    costs: Mapping[str, int]
    """Parameters of each blueprint that fits here, affordable or not."""
    growable: frozenset[str]
    """Blueprints that may germinate here now."""
    prunable: bool
    fossilizable: bool

    def allows(self, op: Op) -> bool:
        """Whether the operation is possible here now. WAIT is not an operation on a slot."""
        if op is Op.GERMINATE:
            return bool(self.growable)
        return self.prunable if op is Op.PRUNE else op is Op.FOSSILIZE and self.fossilizable


@dataclass(frozen=True, slots=True)
class Situation:
    """One network between two epochs."""

    epoch: int
    """Epochs done."""
    horizon: int
    """Epochs in all."""
    history: Sequence[EpochRecord]
    parameters: int
    host_parameters: int
    budget: int | None
    seeds_left: int | None
    """Seeds that may still be planted at a time; None is no limit."""
    slots: tuple[SlotView, ...]
    rent: float = RENT_RATE
    """Points that one more host-size of parameters must earn."""
    tensors: tuple[Observation, ActionMasks] | None = field(default=None, compare=False, repr=False)
    """The same for a learned policy: one row."""
    source: tuple[World, int] | None = field(default=None, compare=False, repr=False)
    """The columns that this is a view of, and its row; for rules, valid until the world moves on."""

    @property
    def remaining(self) -> int:
        return self.horizon - self.epoch

    def allows(self, action: Action) -> bool:
        """Whether the action would have its effect. WAIT always does."""
        if action.slot is None:
            return True
        slot = self.slots[action.slot]
        return slot.allows(action.op) and (action.op is not Op.GERMINATE or action.blueprint in slot.growable)

    def slots_for(self, op: Op) -> list[SlotView]:
        """The slots where the operation is possible now."""
        return [slot for slot in self.slots if slot.allows(op)]


class Situations(Sequence[Situation]):
    """The situations of all networks of a world, made when they are read: before the world moves on."""

    def __init__(
        self,
        world: World,
        models: Sequence[GrowingModel],
        histories: Sequence[Sequence[EpochRecord]],
    ) -> None:
        self._world, self._models, self._histories = world, models, histories
        self._epoch = world.epoch

    @property
    def world(self) -> World:
        if self._world.epoch is not self._epoch:  # a world replaces its columns
            raise RuntimeError("these situations are of an earlier step: read them before the environment moves on")
        return self._world

    @cached_property
    def tensors(self) -> tuple[Observation, ActionMasks]:
        """[N, …] as a learned policy reads them."""
        return encode(self._world)

    def __len__(self) -> int:
        return len(self._models)

    @overload
    def __getitem__(self, row: int) -> Situation: ...

    @overload
    def __getitem__(self, row: slice) -> list[Situation]: ...

    def __getitem__(self, row: int | slice) -> Situation | list[Situation]:
        return self._all[row]

    @cached_property
    def _all(self) -> list[Situation]:
        columns = _lists(self.world)
        return [self._situation(row, columns) for row in range(len(self))]

    def _situation(self, row: int, columns: Mapping[str, Any]) -> Situation:
        model, seen = self._models[row], self.tensors
        left = columns["seeds_left"][row]
        return Situation(
            epoch=columns["epoch"][row],
            horizon=columns["horizon"][row],
            history=tuple(self._histories[row]),
            parameters=int(columns["parameters"][row]),
            host_parameters=model.host_parameters,
            budget=model.budget,
            seeds_left=None if math.isinf(left) else int(left),
            slots=tuple(_slot_views(model, row, columns)),
            rent=columns["rent"][row],
            tensors=(seen[0].map(lambda t: t[row : row + 1]), seen[1].map(lambda t: t[row : row + 1])),
            source=(self._world, row),
        )


_OF_SLOTS = (
    *("stage", "blueprint", "blend", "size", "alpha", "age", "dwell", "retiring", "pruned", "gradient", "shadow"),
    *("contribution", "measured_age", "prunable", "fossilizable"),
)
_OF_WORLD = ("position", "parameters", "seeds_left", "epoch", "horizon", "growable", "rent")


def _lists(world: World) -> dict[str, Any]:
    """Every column that a view shows, as nested lists: one conversion each, however many networks there are."""
    found = {name: getattr(world.slots, name).tolist() for name in _OF_SLOTS}
    return found | {name: getattr(world, name).tolist() for name in _OF_WORLD}


def _slot_views(model: GrowingModel, row: int, columns: Mapping[str, Any]) -> Iterator[SlotView]:
    """Positional, and with tables in place of constructors: a step of many networks makes hundreds of these."""
    names = blueprint_names()
    values = zip(*(columns[name][row] for name in (*_OF_SLOTS, "position", "growable")), strict=True)
    for slot, value in zip(model.slots, values, strict=False):  # columns may be padded
        stage, blueprint, blend, size, alpha, age, dwell, retiring, pruned, gradient, *rest = value
        shadow, contribution, measured_age, prunable, fossilizable, position, growable = rest
        yield SlotView(
            slot.index,
            slot.path,
            slot.shape.layout,
            slot.shape.channels,
            position,
            _STAGES[stage],
            None if blueprint < 0 else names[blueprint],
            None if blend < 0 else BLENDS[blend],
            alpha,
            age,
            dwell,
            retiring,
            pruned,
            size,
            None if math.isnan(gradient) else gradient,
            contrast_of(shadow),
            contrast_of(contribution),
            age - measured_age,
            model.costs(slot),
            _chosen(names, tuple(growable)),
            prunable,
            fossilizable,
        )


_STAGES = tuple(Stage)


@lru_cache(4096)
def _chosen(names: tuple[str, ...], flags: tuple[bool, ...]) -> frozenset[str]:
    return frozenset(name for name, free in zip(names, flags, strict=False) if free)


class Observer:
    """One network before each of its epochs. An epoch is taken in once, so looking costs the same at any age."""

    def __init__(self, learner: Learner, horizon: int, rent: float = RENT_RATE) -> None:
        self._learner, self._horizon, self._rent = learner, horizon, rent
        self._world: World | None = None  # made when it is needed: a state that is loaded may change what seeds cost
        self._taken_in = 0

    def observe(self, history: Sequence[EpochRecord]) -> Situation:
        """As it is now, with its past; valid until the next call. `history` is that of the last call, continued."""
        model = self._learner.model
        slots = model.lifecycle.columns.clone()
        world = self._world or World.of_models([model], slots, [self._horizon], self._rent)
        self._world, world.slots = world, slots
        for record in history[self._taken_in :]:
            world.epoch = torch.full_like(world.epoch, self._taken_in)
            world.record(epoch_columns([record], world.slots))
            self._taken_in += 1
        world.epoch = torch.full_like(world.epoch, self._learner.epoch)
        world.over = world.epoch >= world.horizon
        return Situations(world, [model], [history])[0]


def observe(learner: Learner, horizon: int, history: Sequence[EpochRecord] = (), rent: float = RENT_RATE) -> Situation:
    """One network as it is now, with its past."""
    return Observer(learner, horizon, rent).observe(history)


def as_tensors(situations: Sequence[Situation]) -> tuple[Observation, ActionMasks]:
    """[N, …] of situations, wherever they come from, padded to the most slots among them."""
    if isinstance(situations, Situations):
        return situations.tensors
    rows = [situation.tensors for situation in situations if situation.tensors is not None]
    if len(rows) != len(situations):
        raise ValueError("a learned policy reads tensors, which a situation made by hand lacks: use observe()")
    return stack_rows(rows)


def world_of(situations: Sequence[Situation]) -> tuple[World, ActionMasks]:
    """The columns behind situations, wherever they come from, and what is legal there; padded like `as_tensors`."""
    if isinstance(situations, Situations):
        return situations.world, situations.tensors[1]
    sources = [situation.source for situation in situations if situation.source is not None]
    if len(sources) != len(situations):
        raise ValueError("a rule reads columns, which a situation made by hand lacks: use observe()")
    for situation, (world, row) in zip(situations, sources, strict=True):
        if int(world.epoch[row]) != situation.epoch:
            raise RuntimeError("these situations are of an earlier step: read them before the environment moves on")
    first = sources[0][0]
    if all(world is first for world, _ in sources):
        together = first.select(torch.tensor([row for _, row in sources]))
    else:
        together = World.together([world.select(torch.tensor([row])) for world, row in sources])
    return together, legal_actions(together)

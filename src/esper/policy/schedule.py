"""A fixed schedule, read from a small TOML file: the plan is made before the run and does not depend on it.

    name = "conv first"
    [[grow]]
    epoch = 2              # as soon as possible from this epoch on
    slot = "stages.0"      # a path, a pattern ("*" is every slot) or an index
    blueprint = "conv"     # or a table by layout: { conv1d = "conv", dense = "mlp" }
    blend = "linear"       # optional

Each seed is fossilized as soon as its gate lets it; nothing is ever pruned.
"""

from __future__ import annotations

import fnmatch
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from esper.actions import BLENDS, Op
from esper.env.situation import Situation
from esper.env.spaces import ActionMasks
from esper.env.world import World
from esper.growth.blueprints import LAYOUTS, SlotShape, blueprint_names, fitting
from esper.policy.controller import RuleController, first


@dataclass(frozen=True, slots=True)
class Planting:
    """One entry of a schedule."""

    epoch: int
    slot: str | int
    blueprints: dict[str, str]
    """By layout."""
    blend: str = "linear"


@dataclass(frozen=True, slots=True)
class _Plan:
    """The entries of a schedule as columns, for networks of certain paths."""

    epoch: Tensor
    """[P]"""
    index: Tensor
    """[P] the slot; -1 where it is named by its path."""
    named: Tensor
    """[P, paths] bool"""
    blueprint: Tensor
    """[P, layouts]; -1 where the entry has none."""
    blend: Tensor
    """[P]"""


_NOTHING = Planting(0, -1, {})
"""Concerns no slot: an empty schedule has one entry like any other."""


class FixedSchedule(RuleController):
    """Plants what the schedule says, when it says so, and keeps what passes its gate."""

    def __init__(self, name: str, plantings: Sequence[Planting]) -> None:
        super().__init__()
        self.name = name
        self.plantings = tuple(plantings) or (_NOTHING,)
        self._plan: _Plan | None = None
        self._planted: Tensor | None = None
        """[N, P, S] bool: entries that were followed in this episode."""

    def reset(self, seeds: Sequence[int]) -> None:
        super().reset(seeds)
        self._plan = self._planted = None

    def state_dict(self) -> dict[str, Any]:
        return {"planted": self._planted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._planted = state["planted"]

    def choose(self, world: World, masks: ActionMasks) -> tuple[Tensor, Tensor]:
        """Keep the first seed that may be kept; else the first entry that is due and possible, at its first slot."""
        if self._plan is None:
            self._plan = self._columns(world)
        if self._planted is None:
            shape = (*world.layout.shape[:1], len(self.plantings), *world.layout.shape[1:])
            self._planted = torch.zeros(shape, dtype=torch.bool, device=world.layout.device)
        plan, (networks, entries, slots) = self._plan, self._planted.shape
        keep, kept = first(masks.slot[:, Op.FOSSILIZE])
        blueprint = plan.blueprint[:, world.layout].transpose(0, 1)  # [N, P, S]
        places = torch.arange(slots, device=plan.index.device)
        concerned = plan.named[:, world.path].transpose(0, 1) | (plan.index[:, None] == places)
        # [N, S, B] at the blueprint of each entry and slot: [N, P, S]
        grows = masks.blueprint.transpose(1, 2).gather(1, blueprint.clamp(min=0)) & (blueprint >= 0)
        due = (world.epoch[:, None] >= plan.epoch)[..., None]
        plant, place = first((due & concerned & grows & ~self._planted).flatten(1))
        plant = plant & ~keep
        entry, slot = place // max(1, slots), place % max(1, slots)
        followed = torch.arange(entries * slots, device=place.device) == place[:, None]  # [N, P · S]
        self._planted = self._planted | (followed & plant[:, None]).view(networks, entries, slots)
        seed = blueprint.flatten(1).gather(1, place[:, None]).squeeze(1) if slots else place
        op = torch.where(keep, int(Op.FOSSILIZE), plant * int(Op.GERMINATE))
        actions = (torch.where(keep, kept, slot * plant), seed * plant, plan.blend[entry] * plant, op)
        return torch.stack(actions, -1), op

    def reason(self, action: Sequence[int], code: int, situation: Situation) -> str:
        return _REASONS[Op(code)]

    def _columns(self, world: World) -> _Plan:
        """Looked up once per episode: the paths and layouts that networks have do not change in it."""
        numbers, device = {name: i for i, name in enumerate(blueprint_names())}, world.layout.device
        whole = [one.slot if isinstance(one.slot, int) else -1 for one in self.plantings]
        named = [
            [isinstance(one.slot, str) and fnmatch.fnmatchcase(path, one.slot) for path in world.paths]
            for one in self.plantings
        ]
        blueprints = [[numbers.get(one.blueprints.get(layout, ""), -1) for layout in LAYOUTS] for one in self.plantings]
        return _Plan(
            epoch=torch.tensor([one.epoch for one in self.plantings], device=device),
            index=torch.tensor(whole, device=device),
            named=torch.tensor(named, dtype=torch.bool, device=device).reshape(len(whole), len(world.paths)),
            blueprint=torch.tensor(blueprints, device=device),
            blend=torch.tensor([BLENDS.index(one.blend) for one in self.plantings], device=device),
        )


_REASONS = {
    Op.FOSSILIZE: "on schedule: its gate has passed",
    Op.GERMINATE: "on schedule",
    Op.WAIT: "nothing on the schedule is due and possible",
}


def default_schedule() -> FixedSchedule:
    text = resources.files("esper.policy").joinpath("default_schedule.toml").read_text("utf-8")
    return parse_schedule(tomllib.loads(text), "the built-in schedule", "schedule")


def parse_schedule(document: dict[str, Any], source: str, name: str) -> FixedSchedule:
    """From a TOML document; `source` is named in messages, `name` stands for a name that the document lacks."""
    _only_keys(document, {"name", "grow"}, source)
    entries = document.get("grow")
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{source} needs at least one [[grow]] entry")
    plantings = [_planting(entry, f"{source}, entry {i + 1}") for i, entry in enumerate(entries)]
    return FixedSchedule(str(document.get("name", name)), plantings)


def _planting(entry: Any, where: str) -> Planting:
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: an entry must be a table with epoch, slot and blueprint, not {entry!r}")
    _only_keys(entry, {"epoch", "slot", "blueprint", "blend"}, where)
    epoch, slot = entry.get("epoch"), entry.get("slot")
    if not isinstance(epoch, int) or isinstance(epoch, bool) or epoch < 0:
        raise ValueError(f"{where}: epoch must be a whole number from 0, not {epoch!r}")
    if not isinstance(slot, str | int) or isinstance(slot, bool) or (isinstance(slot, int) and slot < 0):
        raise ValueError(f"{where}: slot must be a path, a pattern or an index, not {slot!r}")
    named = entry.get("blueprint")
    blueprints = named if isinstance(named, dict) else dict.fromkeys(LAYOUTS, named)
    if not blueprints:
        raise ValueError(f"{where}: blueprint names no layout; the layouts are {', '.join(LAYOUTS)}")
    for layout, name in blueprints.items():
        if layout not in LAYOUTS:
            raise ValueError(f"{where}: unknown layout {layout!r}; the layouts are {', '.join(LAYOUTS)}")
        if name not in blueprint_names():
            raise ValueError(f"{where}: unknown blueprint {name!r}; there are {', '.join(blueprint_names())}")
        if isinstance(named, dict) and name not in {b.name for b in fitting(SlotShape(layout, 1))}:
            raise ValueError(f"{where}: blueprint {name!r} does not fit a {layout} slot")
    blend = entry.get("blend", "linear")
    if blend not in BLENDS:
        raise ValueError(f"{where}: unknown blend {blend!r}; choose one of {', '.join(BLENDS)}")
    return Planting(epoch, slot, {str(k): str(v) for k, v in blueprints.items()}, blend)


def _only_keys(table: dict[str, Any], known: set[str], where: str) -> None:
    for key in table:
        if key not in known:
            raise ValueError(f"{where}: unknown key {key!r}; the keys are {', '.join(sorted(known))}")

"""A fixed schedule, read from a small TOML file: the plan is made before the run and never looks at it.

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
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from esper.actions import BLENDS, Action, Op
from esper.env.situation import Situation, SlotView
from esper.growth.blueprints import LAYOUTS, SlotShape, blueprint_names, fitting
from esper.policy.controller import RuleController


@dataclass(frozen=True, slots=True)
class Planting:
    """One entry of a schedule."""

    epoch: int
    slot: str | int
    blueprints: dict[str, str]
    """By layout."""
    blend: str = "linear"

    def concerns(self, slot: SlotView) -> bool:
        if isinstance(self.slot, int):
            return slot.index == self.slot
        return fnmatch.fnmatchcase(slot.path, self.slot)


class FixedSchedule(RuleController[set[tuple[int, int]]]):
    """Plants what the schedule says, when it says so, and keeps what passes its gate."""

    def __init__(self, name: str, plantings: Sequence[Planting]) -> None:
        super().__init__()
        self.name = name
        self.plantings = tuple(plantings)

    def new_memory(self, seed: int) -> set[tuple[int, int]]:
        return set()

    def rule(self, situation: Situation, memory: set[tuple[int, int]]) -> Action:
        for slot in situation.slots_for(Op.FOSSILIZE):
            return Action(Op.FOSSILIZE, slot.index, reason="on schedule: its gate has passed")
        for number, planting in enumerate(self.plantings):
            for slot in situation.slots:
                due = situation.epoch >= planting.epoch and planting.concerns(slot)
                blueprint = planting.blueprints.get(slot.layout)
                if due and blueprint in slot.growable and (number, slot.index) not in memory:
                    memory.add((number, slot.index))
                    return Action(Op.GERMINATE, slot.index, blueprint, planting.blend, reason="on schedule")
        return Action(reason="nothing on the schedule is due and possible")


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

"""`esper.slots`: where a model could grow, what a seed could see there, and what each kind of seed would cost."""

from __future__ import annotations

import fnmatch
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

from torch import nn

from esper.growth.attach import check_model
from esper.growth.auto_slots import AUTO, pick
from esper.growth.blueprints import SlotShape, fitting
from esper.growth.candidates import find_candidates
from esper.growth.costs import countable_flops, seed_flops
from esper.growth.probe import AttachError, probe
from esper.growth.seed import parameter_count
from esper.growth.style import find_styles
from esper.growth.tensors import count_parameters
from esper.growth.visibility import check_words, visible_slots
from esper.tables import Report, Rows, quantity

SHAPES_ABREAST = 5
"""Columns of the table of costs: more would not fit a terminal."""


@dataclass(frozen=True, slots=True)
class SeedCost:
    """What a kind of seed would add at a slot."""

    blueprint: str
    parameters: int
    flops: int
    """Floating-point operations of one example's forward pass."""


@dataclass(frozen=True, slots=True)
class FoundSlot:
    """One place where a model can grow; may be passed in `slots=`."""

    path: str
    module: str
    """The class of the module whose output this is."""
    shape: SlotShape
    """Layout, channels, sizes, what a seed may read (`visibility`), and the host's `style` that it follows."""
    auto: bool
    """Whether `slots="auto"` chooses it."""

    @property
    def costs(self) -> tuple[SeedCost, ...]:
        """Of each kind of seed that fits."""
        return seed_costs(self.shape)


@dataclass(frozen=True, slots=True)
class SlotList(Sequence[FoundSlot]):
    """The slots of a model in the order of its forward pass. A part of it, or one of them, may be passed in `slots=`.

    `found[0]`, `found[:3]`, and by path or pattern `found["h.*"]`; `found.auto` is what `slots="auto"` chooses.
    """

    model: str
    parameters: int
    flops: int | None
    """Of one example's forward pass; None where they could not be counted."""
    slots: tuple[FoundSlot, ...]
    refused: Mapping[str, str]
    """By path: why this module is no slot."""

    def __len__(self) -> int:
        return len(self.slots)

    def __iter__(self) -> Iterator[FoundSlot]:
        return iter(self.slots)

    @overload
    def __getitem__(self, key: int) -> FoundSlot: ...

    @overload
    def __getitem__(self, key: slice | str) -> SlotList: ...

    def __getitem__(self, key: int | slice | str) -> FoundSlot | SlotList:
        if isinstance(key, str):  # as in `slots=`: `*` stands for one part of a path
            chosen = [s for s in self.slots if s.path.count(".") == key.count(".") and fnmatch.fnmatchcase(s.path, key)]
            if not chosen:
                why = f": {self.refused[key]}" if key in self.refused else ""
                raise KeyError(f"{key!r} is none of these slots{why}")
            return replace(self, slots=tuple(chosen))
        return replace(self, slots=self.slots[key]) if isinstance(key, slice) else self.slots[key]

    @property
    def auto(self) -> SlotList:
        return replace(self, slots=tuple(slot for slot in self.slots if slot.auto))

    def __str__(self) -> str:
        return str(self._report())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self._report()._repr_html_()

    def _report(self) -> Report:
        flops = "" if self.flops is None else f", {quantity(self.flops)} FLOPs per example"
        title = (
            f"{self.model}: {self.parameters:,} parameters{flops}; {len(self.slots)} slot{'s' * (len(self.slots) != 1)}"
        )
        chosen = f"● chosen by slots={AUTO!r}" if self.auto else f"slots={AUTO!r} chooses none of them"
        count = len(self.refused)
        others = "1 other module cannot be a slot" if count == 1 else f"{count} other modules cannot be slots"
        note = f"{chosen}; {others} (reasons: `.refused`)"
        headings = ("", "slot", "module", "shape", "visibility", "style")
        rows = tuple(_row(name, group) for name, group in _groups(self.slots, self.refused))
        return Report((Rows(title, headings, rows, ("slot", "shape", "style"), note), *self._costs()))

    def _costs(self) -> Iterator[Rows]:
        """A column for each kind of slot."""
        kinds = {_kind(slot.shape): slot.costs for slot in self.slots}
        for start in range(0, len(kinds), SHAPES_ABREAST):
            part = dict(list(kinds.items())[start : start + SHAPES_ABREAST])
            names = dict.fromkeys(cost.blueprint for costs in part.values() for cost in costs)
            by_name = [{cost.blueprint: cost for cost in costs} for costs in part.values()]
            rows = tuple((name, *(_cost(costs.get(name)) for costs in by_name)) for name in names)
            yield Rows("What a seed adds: parameters / FLOPs per example", ("seed", *part), rows, tuple(part))


def slots(
    model: nn.Module,
    example: Any,
    *,
    layouts: Mapping[str, str] | None = None,
    visibility: str | Mapping[str, str] | None = None,
) -> SlotList:
    """Where `model` could grow, as a table that prints; the arguments are as in `esper.attach`.

    A Sequential and its last layer are one place, and one of them is listed.
    """
    if not isinstance(model, nn.Module):
        raise AttachError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    check_model(model)
    check_words(visibility)
    seen = probe(model, example)
    places = find_candidates(model, seen, layouts or {})
    chosen = set(pick(model, seen, places))
    hidden = {outer if inner in chosen else inner: inner for inner, outer in places.outer.items()}
    shapes = {path: shape for path, shape in places.shapes.items() if fitting(shape) and path not in hidden}
    may_read, refused = visible_slots(model, example, shapes, seen, visibility) if shapes else ({}, {})
    styles = find_styles(model, example, shapes)
    found = [
        FoundSlot(
            path=path,
            module=type(model.get_submodule(path)).__name__,
            shape=replace(shapes[path], visibility=may_read[path], style=styles[path]),
            auto=path in chosen,
        )
        for path in shapes
        if path in may_read
    ]
    other = {path: places.outer[inner] if path == inner else inner for path, inner in hidden.items()}
    same = {path: f"slot {path!r} gives the same tensor as {listed!r}" for path, listed in other.items()}
    return SlotList(
        model=type(model).__name__,
        parameters=count_parameters(model),
        flops=countable_flops(model, example),
        slots=tuple(found),
        refused=places.refused | refused | same,
    )


# -- costs --------------------------------------------------------------------------------------------------------


def seed_costs(shape: SlotShape) -> tuple[SeedCost, ...]:
    """Of each kind of seed that fits, without the gate that one of the blends adds."""
    return tuple(
        SeedCost(one.name, parameter_count(one.name, shape), seed_flops(one.name, shape)) for one in fitting(shape)
    )


# -- what people see ----------------------------------------------------------------------------------------------


def _groups(found: Sequence[FoundSlot], refused: Mapping[str, str]) -> list[tuple[str, list[FoundSlot]]]:
    """Slots that are alike but for a number in their path are one row, with the pattern that names them all."""
    alike: defaultdict[tuple[Any, ...], list[FoundSlot]] = defaultdict(list)
    for slot in found:
        pattern = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", slot.path)
        alike[pattern, slot.module, slot.shape, slot.auto].append(slot)
    groups: list[tuple[str, list[FoundSlot]]] = []
    paths = [slot.path for slot in found] + list(refused)
    for (pattern, *_), group in alike.items():
        named = {p for p in paths if p.count(".") == pattern.count(".") and fnmatch.fnmatchcase(p, pattern)}
        if len(group) > 1 and named == {slot.path for slot in group}:  # else the pattern would name others, too
            groups.append((pattern, group))
        else:
            groups += [(slot.path, [slot]) for slot in group]
    order = {slot.path: place for place, slot in enumerate(found)}
    return sorted(groups, key=lambda row: order[row[1][0].path])


def _row(name: str, group: Sequence[FoundSlot]) -> tuple[str, ...]:
    first = group[0]
    count = f" (×{len(group)})" if len(group) > 1 else ""
    sees = "–" if first.shape.layout == "dense" else first.shape.visibility
    style = str(first.shape.style) or "–"
    return ("●" if first.auto else "", name + count, first.module, str(first.shape), sees, style)


def _kind(shape: SlotShape) -> str:
    """What costs depend on: of the styles, an RMSNorm has fewer parameters than other norms."""
    seen = "" if shape.visibility == "both" else f", {shape.visibility}"
    beside = f" from {shape.source}" if shape.source else ""
    return str(shape) + beside + seen + (", RMSNorm" if shape.style.norm == "RMSNorm" else "")


def _cost(cost: SeedCost | None) -> str:
    return "–" if cost is None else f"{cost.parameters:,} / {quantity(cost.flops)}"

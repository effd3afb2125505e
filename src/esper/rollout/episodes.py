"""`Episodes`: the one record of what was played, as tensors [N, T, …]. Every row is one episode from its first step.

`play` makes it, the agent learns from it, recordings keep it. Two actions per step, because they answer different
questions: `action` is what was done, which the reward and the next observation belong to; `label` is what the
controller decided, which cloning copies. They differ where exploration noise replaced a decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from esper.env.spaces import ActionMasks, Observation
from esper.env.steps import StepFacts, StepInfo
from esper.rollout.facts import Facts

_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True)
class Episodes:
    """N episodes of at most T steps and S slots. What lies beyond an episode's length means nothing."""

    observation: Observation
    """As the environment gave it: not normalised."""
    masks: ActionMasks
    action: Tensor
    """[N, T, heads] int64: what was done."""
    label: Tensor
    """[N, T, heads] int64: what the controller decided."""
    reward: Tensor
    """[N, T] float32: for what was done."""
    terminated: Tensor
    """[N, T] bool: nothing follows. Only an episode's last step may be; one that is not was cut short."""
    lengths: Tensor
    """[N] int64"""
    draw: Tensor
    """[N] int64: draw id of the problem."""
    controller: Tensor
    """[N] int64: index into `controllers`."""
    controllers: tuple[str, ...]
    final: Observation | None = None
    """[N, …] after the last step: what the return of an episode that was cut short goes on from."""
    log_prob: Tensor | None = None
    """[N, T, heads] of the action, under the policy that drew it; 0 for heads without effect."""
    value: Tensor | None = None
    """[N, T] the critic's output while acting, in the units of its normaliser."""
    reports: tuple[tuple[StepInfo, ...], ...] = ()
    """[N][length] what happened, for people and the store, from an engine that keeps records of each network; never
    written to a recording."""
    facts: Facts | None = None
    """The same as columns, from every engine; `rollout/render.py` makes reports of them where there are none."""

    def __len__(self) -> int:
        return self.lengths.shape[0]

    @property
    def steps(self) -> int:
        return int(self.lengths.sum())

    @property
    def valid(self) -> Tensor:
        """[N, T] bool: the steps that happened."""
        return self._step < self.lengths[:, None]

    @property
    def last(self) -> Tensor:
        """[N, T] bool: the last step of each episode."""
        return self._step == self.lengths[:, None] - 1

    @property
    def _step(self) -> Tensor:
        return torch.arange(self.reward.shape[1], device=self.lengths.device)

    def returns(self) -> Tensor:
        """[N] sum of rewards."""
        return (self.reward * self.valid).sum(1)

    def select(self, rows: Tensor) -> Episodes:
        chosen = map_tensors(self, lambda tensor: tensor[rows])
        return replace(chosen, reports=tuple(self.reports[row] for row in rows.tolist()) if self.reports else ())

    def to(self, device: torch.device | str) -> Episodes:
        return map_tensors(self, lambda tensor: tensor.to(device))

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that is there, by name: `observation.overall`, …, `controller`; facts are for people only."""
        return named_tensors(replace(self, facts=None))

    @staticmethod
    def of(
        tensors: dict[str, Tensor], controllers: Sequence[str], reports: Any = (), facts: Facts | None = None
    ) -> Episodes:
        """The inverse of `tensors`."""
        parts: dict[str, Any] = {"observation": {}, "masks": {}, "final": {}}
        for name, tensor in tensors.items():
            owner, _, field = name.rpartition(".")
            (parts[owner] if owner else parts)[field] = tensor
        parts["observation"], parts["masks"] = Observation(**parts["observation"]), ActionMasks(**parts["masks"])
        parts["final"] = Observation(**parts["final"]) if parts["final"] else None
        return Episodes(**parts, controllers=tuple(controllers), reports=reports, facts=facts)


def named_tensors(record: Any, prefix: str = "") -> dict[str, Tensor]:
    """Every tensor of a record, by name; those of the records in it as `owner.name`."""
    found: dict[str, Tensor] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, Tensor):
            found[prefix + field.name] = value
        elif is_dataclass(value):
            found |= named_tensors(value, f"{field.name}.")
    return found


def map_tensors(record: _Record, f: Callable[[Tensor], Tensor]) -> _Record:
    """The same record with `f` of every tensor in it, also inside the records it holds. A policy's table of the heads
    that each operation uses belongs to no row and stays."""

    def mapped(value: Any) -> Any:
        if isinstance(value, Tensor):
            return f(value)
        return map_tensors(value, f) if is_dataclass(value) else value

    names = (field.name for field in fields(record) if field.name != "uses")  # type: ignore[arg-type]
    return replace(record, **{name: mapped(getattr(record, name)) for name in names})  # type: ignore[type-var]


def stack_steps(records: Sequence[_Record]) -> _Record:
    """Records of single steps [N, …] as one of [N, T, …]: every tensor is allocated once, at its size."""
    return combine(records, lambda column: torch.stack(column, 1))


def combine(records: Sequence[_Record], f: Callable[[list[Tensor]], Tensor]) -> _Record:
    """One record of several: `f` of the tensors that have the same place in each, also inside the records they hold."""

    def combined(column: list[Any]) -> Any:
        return f(column) if isinstance(column[0], Tensor) else combine(column, f)

    columns = {field.name: [getattr(record, field.name) for record in records] for field in fields(records[0])}  # type: ignore[arg-type]
    return replace(records[0], **{name: combined(column) for name, column in columns.items()})  # type: ignore[type-var]


def join(parts: Sequence[Episodes]) -> Episodes:
    """One after another, padded to the longest episode and the most slots among them; what one lacks, all lose."""
    names = tuple(dict.fromkeys(name for part in parts for name in part.controllers))
    steps = max(part.reward.shape[1] for part in parts)
    slots = max(part.masks.slot.shape[-1] for part in parts)
    padded = []
    for part in parts:
        index = torch.tensor([names.index(name) for name in part.controllers], device=part.controller.device)
        wide = {name: _padded(name, tensor, steps, slots) for name, tensor in part.tensors().items()}
        padded.append(wide | {"controller": index[part.controller]})
    shared = [name for name in padded[0] if all(name in part for part in padded)]
    reports = sum((part.reports for part in parts), ()) if all(part.reports for part in parts) else ()
    found = [part.facts for part in parts if part.facts is not None]
    facts = _join_facts(found) if len(found) == len(parts) else None
    return Episodes.of({name: torch.cat([part[name] for part in padded]) for name in shared}, names, reports, facts)


def _join_facts(parts: Sequence[Facts]) -> Facts:
    """The same for facts; their slots may be fewer than those of the masks."""
    paths = tuple(dict.fromkeys(one for part in parts for one in part.paths))
    kinds = tuple(dict.fromkeys(one for part in parts for one in part.kinds))
    steps = max(part.played.shape[1] for part in parts)
    slots = max(part.steps.stage.shape[2] for part in parts)

    def renumbered(index: Tensor, own: tuple[Any, ...], every: tuple[Any, ...]) -> Tensor:
        table = torch.tensor([*(every.index(one) for one in own), -1], device=index.device)
        return table[index]  # -1, which is not known, is the last entry

    def widened(part: Facts) -> StepFacts:
        terms = part.steps.reward.terms  # [N, T, terms]: the only axis after time that is not the slots'
        whole = {1: steps, 2: slots}
        return map_tensors(part.steps, lambda t: _widened(t, whole if t.dim() > 2 and t is not terms else {1: steps}))

    return Facts(
        steps=combine([widened(part) for part in parts], torch.cat),
        host_parameters=torch.cat([part.host_parameters for part in parts]),
        rules=torch.cat([part.rules for part in parts]),
        host=torch.cat([renumbered(part.host, part.paths, paths) for part in parts]),
        paths=paths,
        kind=torch.cat([renumbered(part.kind, part.kinds, kinds) for part in parts]),
        kinds=kinds,
    )


def _widened(tensor: Tensor, sizes: Mapping[int, int]) -> Tensor:
    """With zeros (False: absent, illegal) up to these sizes, by axis."""
    shape = [sizes.get(axis, size) for axis, size in enumerate(tensor.shape)]
    if shape == list(tensor.shape):
        return tensor
    wide = tensor.new_zeros(shape)
    wide[tuple(slice(size) for size in tensor.shape)] = tensor
    return wide


_SLOT_AXIS = {"slots": 2, "blueprints": 2, "costs": 2, "present": 2, "slot": 3, "blueprint": 2, "blend": 2}


def _padded(name: str, tensor: Tensor, steps: int, slots: int) -> Tensor:
    """A tensor of episodes with room for so many steps and slots."""
    if name in ("lengths", "draw", "controller"):
        return tensor
    owner, _, field = name.rpartition(".")
    sizes = {} if owner == "final" else {1: steps}
    axis = _SLOT_AXIS.get(field, 0) - (owner == "final")
    if axis > 0 and tensor.shape[axis]:  # a policy that sees a plain vector has no slots to pad
        sizes[axis] = slots
    return _widened(tensor, sizes)


def minibatches(rows: int, count: int, generator: torch.Generator) -> Iterator[Tensor]:
    """One permutation of the rows, cut into at most `count` nearly equal parts."""
    order = torch.randperm(rows, generator=generator, device=generator.device)
    yield from torch.tensor_split(order, min(count, rows))

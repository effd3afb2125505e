"""What happened in episodes, as columns: all that people and the store are shown, without a Python object per step.

The stacked world gives one `StepFacts` per step; `facts_of` makes the same of the reports of a per-network engine.
`rollout/render.py` turns chosen episodes back into records with sentences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from esper.engine.epoch import EpochColumns
from esper.engine.governor import FAULTS
from esper.env.learner_env import StepInfo
from esper.env.observation import to_tensor
from esper.env.reward.config import TERMS
from esper.env.reward.reward import RewardColumns
from esper.env.reward.suspicion import KINDS
from esper.env.step_facts import StepFacts
from esper.env.world import World
from esper.lifecycle import LIVE, Contrast, Rules, Stage
from esper.slot_columns import CONTRAST, RULES


@dataclass(frozen=True, slots=True)
class Facts:
    """N episodes of at most T steps and S slots."""

    steps: StepFacts
    """[N, T, …]"""
    host_parameters: Tensor
    """[N]"""
    rules: Tensor
    """[N, rules] float64: the fields of `Rules`, as in `SlotColumns.rules`."""
    host: Tensor
    """[N] int64: index into `paths`."""
    paths: tuple[tuple[str, ...], ...]
    """Of the slots of each sort of host."""
    kind: Tensor
    """[N] int64: index into `kinds`; -1 where it is not known."""
    kinds: tuple[str, ...] = ()
    """Kinds of problems of the family. For analysis only."""

    @property
    def played(self) -> Tensor:
        """[N, T] bool"""
        return self.steps.epoch.played

    @property
    def lengths(self) -> Tensor:
        """[N] int64"""
        return self.played.sum(1)

    def at_the_end(self, column: Tensor) -> Tensor:
        """[N, …] what a column [N, T, …] says of the last step of each episode."""
        rows = torch.arange(column.shape[0], device=column.device)
        return column[rows, self.lengths - 1]

    def rewards(self) -> Tensor:
        """[N, terms] summed over episodes."""
        return torch.where(self.played[..., None], self.steps.reward.terms, 0.0).sum(1)

    def transitions(self) -> tuple[Tensor, Tensor, Tensor]:
        """Stages [N, T, S]: when a step began, after the governor took away what was unfinished, after the epoch."""
        after, trained = self.steps.stage, self.steps.epoch.stage
        before = torch.cat((torch.full_like(after[:, :1], Stage.DORMANT), after[:, :-1]), 1)
        unfinished = (trained[..., None] == torch.tensor(sorted(LIVE), device=trained.device)).any(-1)
        undone = self.steps.epoch.undone[..., None] & unfinished
        return before, torch.where(undone, int(Stage.PRUNED), trained), after

    def entered(self) -> Tensor:
        """[stages] int64: how many seeds entered each stage."""
        before, left, after = self.transitions()
        trained, played = self.steps.epoch.stage, self.played[..., None]
        # Germinating and beginning to learn happen in one step: a seed that was just planted enters two stages.
        planted = played & (before == Stage.DORMANT) & (trained == Stage.TRAINING)
        targets = [to[played & (source != to)] for source, to in ((before, trained), (trained, left), (left, after))]
        count = torch.bincount(torch.cat(targets), minlength=len(Stage))
        count[Stage.GERMINATED] += planted.sum()
        return count


def facts_from(steps: StepFacts, world: World, kinds: Sequence[str] = ()) -> Facts:
    """Of episodes [N, T, …] that have just been played; `kinds` [N] are those of their problems, if they are known."""
    names = tuple(dict.fromkeys(kinds))
    host, count = world.path.new_zeros(len(world.path)), world.slots.present.sum(1)
    own = [
        tuple(world.paths[i] for i in row[:slots])
        for row, slots in zip(world.path.tolist(), count.tolist(), strict=True)
    ]
    paths = tuple(dict.fromkeys(own))
    host = torch.tensor([paths.index(one) for one in own], device=world.path.device)
    kind = torch.tensor([names.index(one) for one in kinds] or [-1] * len(own), device=world.path.device)
    return Facts(steps, world.host_parameters, world.slots.rules, host, paths, kind, names)


# -- from the reports of per-network engines ---------------------------------------------------------------------------


def facts_of(reports: Sequence[Sequence[StepInfo]], rules: Rules | None = None) -> Facts:
    """The same episodes as columns. What only people read (reasons of a controller, shadow losses) is not in them."""
    hosts = tuple(dict.fromkeys(row[0].slots for row in reports))
    steps, slots = max(map(len, reports)), max(map(len, hosts))
    limits = [float(getattr(rules or Rules(), name)) for name in RULES]
    blank = _blank(slots)
    rows = [[_numbers(info, slots) for info in row] + [blank] * (steps - len(row)) for row in reports]
    columns = {name: _column([[step[name] for step in row] for row in rows]) for name in blank}

    def part(owner: str) -> dict[str, Tensor]:
        return {name.removeprefix(owner): t for name, t in columns.items() if name.startswith(owner)}

    return Facts(
        steps=StepFacts(
            EpochColumns(**part("epoch.")), RewardColumns(**part("reward.")), columns["stage"], columns["parameters"]
        ),
        host_parameters=_column([float(row[0].host_parameters) for row in reports]),
        rules=torch.tensor([limits] * len(reports), dtype=torch.float64),
        host=torch.tensor([hosts.index(row[0].slots) for row in reports]),
        paths=hosts,
        kind=torch.full((len(reports),), -1),
    )


def _column(values: Any) -> Tensor:
    """Numbers as float64; whole numbers and flags as what they are."""
    first = values
    while isinstance(first, list):
        first = first[0]
    return torch.tensor(values, dtype=torch.float64 if isinstance(first, float) else None)


def _numbers(info: StepInfo, slots: int) -> dict[str, Any]:
    record, reward = info.record, info.reward
    verdict, action = record.verdict, record.effect.action
    head = to_tensor([action])[0].tolist()  # in the order of HEAD_NAMES
    after = list(record.stages)
    for change in record.transitions:
        after[info.slots.index(change.slot)] = change.target
    begun = [[False] * len(KINDS) for _ in range(slots)]
    for finding in reward.events:
        begun[finding.slot][KINDS.index(finding.kind)] = True
    return {
        "epoch.played": True,
        "epoch.op": head[3],
        "epoch.slot": head[0],
        "epoch.blueprint": head[1],
        "epoch.blend": head[2],
        "epoch.changed": record.effect.changed,
        "epoch.train_loss": float(record.trained.loss),
        "epoch.host_gradient": float(record.trained.host_gradient),
        "epoch.seed_gradient": _by_slot(record.trained.seed_gradients, slots),
        "epoch.accuracy": float(record.measured.accuracy),
        "epoch.loss": float(record.measured.loss),
        "epoch.shadow": _contrasts(record.measured.shadow_benefits, slots),
        "epoch.contribution": _contrasts(record.measured.contributions, slots),
        "epoch.stage": _padded([int(stage) for stage in record.stages], slots, 0),
        "epoch.alpha": _padded([float(alpha) for alpha in record.alphas], slots, 0.0),
        "epoch.parameters": float(record.parameters),
        "epoch.fault": -1 if verdict is None else FAULTS.index(verdict.kind),
        "epoch.fault_seen": math.nan if verdict is None else float(verdict.seen),
        "epoch.fault_limit": math.nan if verdict is None else float(verdict.limit),
        "reward.terms": [float(reward.terms[name]) for name in TERMS],
        "reward.potential": math.nan,
        "reward.score": math.nan if reward.score is None else float(reward.score),
        "reward.findings": begun,
        "reward.contribution": _by_slot({one.slot: one.contribution for one in reward.events}, slots),
        "reward.improvement": _by_slot({one.slot: one.improvement for one in reward.events}, slots),
        "stage": _padded([int(stage) for stage in after], slots, 0),
        "parameters": float(info.parameters),
    }


def _blank(slots: int) -> dict[str, Any]:
    """A step that was not played."""
    nothing, none = math.nan, [math.nan] * slots
    contrast, zeros = [[math.nan] * len(CONTRAST)] * slots, [0] * slots
    numbers = ("train_loss", "host_gradient", "accuracy", "loss", "parameters", "fault_seen", "fault_limit")
    epoch: dict[str, Any] = {"played": False, "op": -1, "slot": 0, "blueprint": 0, "blend": 0, "changed": False}
    epoch |= {**dict.fromkeys(numbers, nothing), "fault": -1, "stage": zeros, "alpha": [0.0] * slots}
    epoch |= {"seed_gradient": none, "shadow": contrast, "contribution": contrast}
    reward: dict[str, Any] = {"terms": [0.0] * len(TERMS), "potential": nothing, "score": nothing}
    reward |= {"findings": [[False] * len(KINDS)] * slots, "contribution": none, "improvement": none}
    named = {f"epoch.{name}": value for name, value in epoch.items()}
    return named | {f"reward.{name}": v for name, v in reward.items()} | {"stage": zeros, "parameters": nothing}


def _padded(values: list[Any], slots: int, filling: float) -> list[Any]:
    return values + [filling] * (slots - len(values))


def _by_slot(values: Mapping[int, float], slots: int) -> list[float]:
    return [float(values.get(slot, math.nan)) for slot in range(slots)]


def _contrasts(found: Mapping[int, Contrast], slots: int) -> list[list[float]]:
    there = {slot: [float(getattr(one, name)) for name in CONTRAST] for slot, one in found.items()}
    return [there.get(slot, [math.nan] * len(CONTRAST)) for slot in range(slots)]

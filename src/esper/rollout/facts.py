"""What happened in episodes, as columns: all that people and the store are shown, without a Python object per step.

Every environment of growing networks gives one `StepFacts` per step. `rollout/render.py` turns chosen episodes into
records with sentences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.env.steps import StepFacts
from esper.env.world import World
from esper.lifecycle import LIVE, Stage


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
    names = tuple(dict.fromkeys(one for one in kinds if one))
    count = world.slots.present.sum(1)
    own = [
        tuple(world.paths[i] for i in row[:slots])
        for row, slots in zip(world.path.tolist(), count.tolist(), strict=True)
    ]
    paths = tuple(dict.fromkeys(own))
    host = torch.tensor([paths.index(one) for one in own], device=world.path.device)
    numbers = [names.index(one) if one else -1 for one in kinds] or [-1] * len(own)
    kind = torch.tensor(numbers, device=world.path.device)
    return Facts(steps, world.host_parameters, world.slots.rules, host, paths, kind, names)

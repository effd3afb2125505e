"""The slots of one network as people and modules read them: views of columns, with refusals, reasons and transitions.

The rules themselves are in `esper.slot_columns`; here is what turns them into sentences and records.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.lifecycle import (
    ENTERED_BY_ITSELF,
    GATES,
    LIVE,
    TRANSITIONS,
    Contrast,
    IllegalTransitionError,
    Rules,
    Stage,
    Transition,
)
from esper.slot_columns import CONTRAST, SlotColumns


@dataclass(frozen=True, slots=True)
class SlotLife:
    """One slot as it is now."""

    slots: Slots
    index: int
    name: str

    @property
    def stage(self) -> Stage:
        return Stage(int(self._of("stage")))

    @property
    def seed(self) -> int:
        """Number of the current or last seed of this network; 0 is none yet."""
        return int(self._of("seed"))

    @property
    def alpha(self) -> float:
        return self._of("alpha")

    @property
    def age(self) -> int:
        """Epochs since germination."""
        return int(self._of("age"))

    @property
    def dwell(self) -> int:
        """Epochs in this stage."""
        return int(self._of("dwell"))

    @property
    def retiring(self) -> bool:
        return bool(self._of("retiring"))

    @property
    def why_retiring(self) -> str:
        """The reason of the decision by which the seed is being ramped out."""
        return self.slots._why_retiring[self.index]

    @property
    def gradient(self) -> float | None:
        found = self._of("gradient")
        return None if math.isnan(found) else found

    @property
    def shadow_benefit(self) -> Contrast | None:
        return contrast_of(self.slots.columns.shadow[0, self.index].tolist())

    @property
    def contribution(self) -> Contrast | None:
        return contrast_of(self.slots.columns.contribution[0, self.index].tolist())

    @property
    def prunable(self) -> bool:
        return bool(self._of("prunable"))

    @property
    def fossilizable(self) -> bool:
        return bool(self._of("fossilizable"))

    def gate(self, target: Stage, dwell: int | None = None) -> str:
        """What stands between the seed and `target`, criterion by criterion; `dwell` stands in for the present one."""
        said = []
        for criterion in GATES[target]:
            value = self._of(criterion.column) if criterion.column != "dwell" or dwell is None else dwell
            limit = criterion.limit
            limit = float(self.slots.columns.rule(limit)[0, 0]) if isinstance(limit, str) else limit
            said.append(criterion.describe(value, limit))
        return ", ".join(said)

    def why_not(self, target: Stage) -> str:
        """Why a decision may not bring the slot into this stage; empty if it may."""
        stage, slot = self.stage, f"slot {self.name}"
        if target is Stage.GERMINATED:
            return "" if stage is Stage.DORMANT else f"{slot} is {stage.name}: only an empty slot can germinate"
        if target is Stage.FOSSILIZED:
            if stage is not Stage.HOLDING:
                return f"{slot} is {stage.name}: only a HOLDING seed can fossilize"
            return "" if self.fossilizable else f"{slot} may not fossilize: {self.gate(target)}"
        if stage not in LIVE:
            return f"{slot}: a {stage.name} slot has nothing to prune"
        if self.retiring:
            return f"{slot}: the seed is being ramped out already"
        least = self.slots.rules.prune_age
        return "" if self.age >= least else f"{slot}: the seed is {self.age} epochs old and may be pruned from {least}"

    def _of(self, column: str) -> float:
        found: float = getattr(self.slots.columns, column)[0, self.index].item()
        return found


class Slots:
    """All slots of one network."""

    def __init__(self, names: Sequence[str], rules: Rules | None = None) -> None:
        self.names = tuple(names)
        self.rules = rules or Rules()
        self.columns = SlotColumns.empty([len(self.names)], [self.rules])
        """Of one row; `SlotColumns.together` may have moved it into the columns of several networks."""
        self.lives = [SlotLife(self, index, name) for index, name in enumerate(self.names)]
        self.stages = [Stage.DORMANT] * len(self.names)
        """As plain values, of when `changes` last looked: for code that reads them in every pass."""
        self.alphas = [0.0] * len(self.names)
        self.born = 0
        """Seeds planted so far."""
        self._why_retiring = [""] * len(self.names)

    # -- what a controller may do -------------------------------------------------------------------------------------

    def germinate(
        self, index: int, blueprint: int, blend: int, size: int, *, epoch: int, reason: str = ""
    ) -> list[Transition]:
        where = self._allowed(index, Stage.GERMINATED)
        self.born += 1
        planted = (torch.tensor([[number]]) for number in (self.born, blueprint, blend, size))
        self.columns.germinate(where, *planted)
        return self.changes(epoch, reason)

    def prune(self, index: int, *, epoch: int, reason: str = "", at_once: bool = False) -> list[Transition]:
        """Remove the seed: over a ramp when the host relies on it, else now. `at_once` is for emergencies."""
        emergency = at_once and self.lives[index].stage in LIVE
        self.columns.prune(self._at(index) if emergency else self._allowed(index, Stage.PRUNED), at_once=at_once)
        self._why_retiring[index] = reason
        return self.changes(epoch, reason)

    def fossilize(self, index: int, *, epoch: int, reason: str = "") -> list[Transition]:
        self.columns.fossilize(self._allowed(index, Stage.FOSSILIZED))
        return self.changes(epoch, reason)

    # -- what happens by itself ---------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int) -> list[Transition]:
        if Stage.GERMINATED not in self.stages:  # most epochs
            return []
        self.columns.begin_epoch()
        return self.changes(epoch)

    def measure(
        self,
        gradients: Mapping[int, float],
        shadow_benefits: Mapping[int, Contrast],
        contributions: Mapping[int, Contrast],
    ) -> None:
        """What the epoch that ends now has shown, by slot. What was not measured keeps its last value."""
        self.columns.measure(*measured_columns([gradients], [shadow_benefits], [contributions], len(self.names)))

    def end_epoch(self, epoch: int) -> list[Transition]:
        self.columns.end_epoch()
        return self.changes(epoch)

    # -- records ------------------------------------------------------------------------------------------------------

    def changes(self, epoch: int, reason: str | None = None) -> list[Transition]:
        """The stage changes since this was last called; `reason` is that of a decision."""
        before, self.stages = self.stages, [_STAGES[number] for number in self.columns.stage[0].tolist()]
        self.alphas = self.columns.alpha[0].tolist()
        found = []
        for index, (source, target) in enumerate(zip(before, self.stages, strict=True)):
            if source is target:
                continue
            if target not in TRANSITIONS[source]:
                raise IllegalTransitionError(f"slot {self.names[index]}: {source.name} may not become {target.name}")
            why = self._reason(index, target) if reason is None else reason
            if source is Stage.HOLDING and target is Stage.BLENDING:
                why = f"ramping out: {why}"
            found.append(Transition(epoch, self.names[index], self.lives[index].seed, source, target, why))
        return found

    def _reason(self, index: int, target: Stage) -> str:
        if target is Stage.PRUNED:
            return self._why_retiring[index]
        if target in ENTERED_BY_ITSELF:
            return ENTERED_BY_ITSELF[target]
        return self.lives[index].gate(target, dwell=int(self.columns.stayed[0, index]))

    def _allowed(self, index: int, target: Stage) -> Tensor:
        refusal = self.lives[index].why_not(target)
        if refusal:
            raise IllegalTransitionError(refusal)
        return self._at(index)

    def _at(self, index: int) -> Tensor:
        where = torch.zeros_like(self.columns.present)
        where[0, index] = True
        return where


_STAGES = tuple(Stage)


def contrast_of(numbers: Sequence[float]) -> Contrast | None:
    """From the last axis of a column, in the order of `CONTRAST`."""
    return None if math.isnan(numbers[0]) else Contrast(*numbers)


def common_columns(networks: Sequence[Slots], width: int | None = None) -> SlotColumns:
    """Columns of all these networks, of which each one's own are a row from now on; padded to `width` slots."""
    columns = SlotColumns.together([slots.columns for slots in networks], width)
    for row, slots in enumerate(networks):
        slots.columns = columns.row(row, len(slots.names))
    return columns


def measured_columns(
    gradients: Sequence[Mapping[int, float]],
    shadow_benefits: Sequence[Mapping[int, Contrast]],
    contributions: Sequence[Mapping[int, Contrast]],
    slots: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """What was measured of N networks, by slot, as `SlotColumns.measure` takes it."""
    numbers = [[found.get(index, math.nan) for index in range(slots)] for found in gradients]
    gradient = torch.tensor(numbers, dtype=torch.float64).reshape(len(gradients), slots)
    return gradient, contrast_columns(shadow_benefits, slots), contrast_columns(contributions, slots)


def contrast_columns(found: Sequence[Mapping[int, Contrast]], slots: int) -> Tensor:
    """[N, slots, 3] of contrasts by slot; NaN where there is none."""
    numbers = [[_as_numbers(contrasts.get(index)) for index in range(slots)] for contrasts in found]
    return torch.tensor(numbers, dtype=torch.float64).reshape(len(found), slots, len(CONTRAST))


def _as_numbers(contrast: Contrast | None) -> tuple[float, float, float]:
    return _NOT_MEASURED if contrast is None else (contrast.accuracy, contrast.loss, contrast.error)


_NOT_MEASURED = (math.nan, math.nan, math.nan)

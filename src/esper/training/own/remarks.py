"""Remarks about a run, one plain sentence each: why nothing grew, that it ended at chance, that size was too dear.

Part of it is known before the first epoch (`outlook`), the rest at the end (`remarks`). Nothing here changes a run.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from esper.actions import Op
from esper.agent.policies import LearnedController
from esper.agent.removals import CLEARLY
from esper.engine.eager import EpochRecord
from esper.env.rent import RENT_RATE, seed_rent
from esper.errors import GrowthWarning
from esper.growth.model import GrowingModel
from esper.lifecycle import Contrast, Stage
from esper.policy.controller import Controller, NoGrowth
from esper.policy.heuristic import ROTATION, Heuristic
from esper.tasks.feed import IGNORED, Batch
from esper.training.own.history import History, SeedStory
from esper.training.own.objective import Constant

PACKAGE = f"{Path(__file__).parents[2]}{os.sep}"
SHOWN = 3
"""Slots or reasons that a sentence names at most."""
WORTH_A_REMARK = 2.0
"""Points of a removed seed: fewer are not worth a sentence."""
LEAST_EXPLAINED = 1.0
"""Percent of the variance that a regression must explain beyond the mean to have learnt something."""
FAR = 10.0
"""Root mean square of real targets beyond which an untrained network, which gives about 0, is slow to reach them."""

STILL_LEARNING = 10.0
"""Points by which a network that is nearly trained does not rise from the middle third of a run to the last."""


def warn_user(remark: str) -> None:
    """A warning that names the line from which Esper was called, however deep inside this is."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(remark, GrowthWarning, stacklevel=level)


# -- before the first epoch --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outlook:
    """A run before its first epoch."""

    controller: Controller
    epochs: int
    rent: float
    constant: Constant | None
    """Which prediction that never changes shows what chance is, for this metric; None where no such is known."""
    ignored: int
    """The class number that is left out."""
    affordable: tuple[tuple[str, str], ...]
    """(slot, blueprint): what fits and could be planted in the network as it is now."""
    why_nothing_can_grow: str
    """Empty where something can."""
    metric: str = "accuracy"
    """What is measured, in a word or two."""
    noticed: tuple[str, ...] = ()
    """Remarks about model and data (`unusual.py`)."""
    notes: tuple[str, ...] = ()
    """Remarks about what was chosen for the user: no reason for a warning."""

    @property
    def remarks(self) -> tuple[str, ...]:
        found = [*self.noticed, self.why_nothing_can_grow]
        learned = self.controller if isinstance(self.controller, LearnedController) else None
        if self.rent != RENT_RATE and learned is not None and not learned.reads_rent:
            found.append(
                f"The controller {learned.name} was trained with a rent of {RENT_RATE:g} and cannot read "
                f"another one: only the score, and what is kept at the end, are for a rent of {self.rent:g}."
            )
        return tuple(remark for remark in found if remark)


def outlook(
    model: GrowingModel,
    controller: Controller,
    epochs: int,
    rent: float,
    *,
    constant: Constant | None,
    ignored: int = IGNORED,
    metric: str = "accuracy",
    auto: bool = False,
    noticed: Sequence[str] = (),
    noted: Sequence[str] = (),
) -> Outlook:
    """`auto`: the slots were chosen by rule, and a note says which. `noticed` is warned of, `noted` only remarked."""
    affordable = tuple((slot.path, name) for slot in model.slots for name in sorted(model.growable(slot)))
    wanted = not isinstance(controller, NoGrowth)
    why = _why_nothing_can_grow(model, epochs) if wanted else ""
    chosen = ", ".join(slot.path for slot in model.slots)
    notes: tuple[str, ...] = (
        (f"slots='auto' chose {chosen}; esper.slots(model, example) lists every possible slot.",) if auto else ()
    )
    notes += tuple(filter(None, noted))
    warned = tuple(filter(None, noticed))
    return Outlook(controller, epochs, rent, constant, ignored, affordable, why, metric, warned, notes)


def _why_nothing_can_grow(model: GrowingModel, epochs: int) -> str:
    costs = [(cost, name, slot.path) for slot in model.slots for name, cost in model.costs(slot).items()]
    if model.max_seeds is not None and model.max_seeds < 1:
        return f"Nothing can grow: max_seeds is {model.max_seeds}."
    if not costs:
        slots = _listed([f"{slot.path} is {slot.shape.layout}" for slot in model.slots])
        allowed = "" if model.blueprints is None else f" that is allowed ({_listed(sorted(model.blueprints))})"
        return f"Nothing can grow: no blueprint{allowed} fits a slot ({slots})."
    if model.budget is not None and min(costs)[0] > model.budget - model.parameter_count:
        least, name, path = min(costs)
        room = model.budget - model.parameter_count
        return (
            f"Nothing can grow: the budget leaves room for {_counted(room, 'parameter')}, and the smallest seed, "
            f"{name} at {path}, needs {least:,}."
        )
    rules = model.lifecycle.rules
    life = rules.training_epochs + rules.blending_epochs
    if epochs < life:
        return (
            f"The run is too short for a seed: it has {_counted(epochs, 'epoch')}, and a seed needs {life} "
            f"({rules.training_epochs} of incubation, {rules.blending_epochs} of blending)."
        )
    return ""


# -- at the end --------------------------------------------------------------------------------------------------------


class Targets:
    """Validation batches whose targets are looked at while a network is evaluated, so that no pass is added.

    They tell how many are of the most frequent class, where the metric is a share of classes; and mean and standard
    deviation, where it is the variance explained.
    """

    def __init__(self, batches: Callable[[], Iterable[Batch]], before: Outlook) -> None:
        self._batches, self._constant, self._ignored = batches, before.constant, before.ignored
        self.examples = 0
        self._counts: Counter[int] = Counter()
        """Of class numbers: how many of each."""
        self._sums = (0, 0.0, 0.0)
        """Of real numbers: their count, sum, and sum of squares."""

    def __call__(self) -> Iterator[Batch]:
        for batch in self._batches():
            self.examples += len(batch[1])
            if self._constant == "class":
                self._count(batch[1])
            if self._constant == "mean":
                values, (count, total, squares) = batch[1].double(), self._sums
                self._sums = (count + values.numel(), total + float(values.sum()), squares + float((values**2).sum()))
            yield batch

    def _count(self, targets: Tensor) -> None:
        values, counts = torch.unique(targets[targets != self._ignored], return_counts=True)
        self._counts.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))

    @property
    def most_frequent(self) -> float | None:
        """Percent of the targets that are of the most frequent class; None where they are no class numbers."""
        return 100.0 * max(self._counts.values()) / self._counts.total() if self._counts else None

    @property
    def far(self) -> str:
        """How far real targets are from 0, in words; empty where an untrained network is not far from them."""
        count, total, squares = self._sums
        if squares <= FAR**2 * count:
            return ""
        mean = total / count
        return f"a mean of {mean:.3g} and a standard deviation of {max(squares / count - mean**2, 0.0) ** 0.5:.3g}"


def remarks(before: Outlook, history: History, accuracy: float, untrained: float, targets: Targets) -> tuple[str, ...]:
    """All remarks about a run that has ended with this validation accuracy."""
    stories = history.seeds()
    acts = any(story.fate is not Stage.PRUNED for story in stories)  # in part, where a run was too short for a seed
    if isinstance(before.controller, NoGrowth) or (
        before.why_nothing_can_grow and not acts
    ):  # meant so, or said already
        return before.notes + before.remarks
    waited = all(record.effect.action.op is not Op.GERMINATE or not record.effect.changed for record in history.records)
    found = [_why_nothing_was_grown(before, history.records)] if waited else []
    planted = {(story.slot, story.blueprint) for story in stories}
    untried = [pair for pair in before.affordable if pair not in planted]
    if len(history.records) == before.epochs:  # a run that was stopped may not have got that far
        if targets.far and (at_chance := _at_chance(before, accuracy, targets)):
            found.append(
                f"The run ended at chance: {at_chance} The targets have {targets.far}, which is far from what an "
                "untrained network gives: standardise them, (y - mean) / deviation, with both from the training data."
            )
        elif untried:
            found.append(_learnt_nothing(before, accuracy, untrained, targets, untried))
    found += [_too_dear(history), _harmful(history)]
    return (*before.notes, *before.remarks, *(remark for remark in found if remark))


def still_learning(control: Sequence[float], metric: str) -> str:
    """Of the network without growth, by its figures after each epoch. Empty where it hardly rose any more."""
    third = len(control) // 3
    if third < 2:
        return ""
    middle, last = control[-2 * third : -third], control[-third:]
    rose = (sum(last) - sum(middle)) / third
    if not rose >= STILL_LEARNING:
        return ""
    return (
        f"The network without growth was still learning: from the middle third of the run to the last, its validation "
        f"{metric} rose by {rose:.1f} points. So a part of the gain may be speed alone: judge growth with more epochs, "
        "a larger learning rate or a smaller batch size."
    )


def _too_dear(history: History) -> str:
    """Of the removed seed that helped most: its price, where that is why it was removed. Empty if there is none."""
    dear = []
    for story in history.seeds():
        gain = _last_measured(history, story)
        if story.fate is Stage.PRUNED and gain is not None and story.parameters is not None:
            due = seed_rent(story.parameters, history.host_parameters, history.rent)
            if CLEARLY * gain.error < gain.accuracy < due and gain.accuracy >= WORTH_A_REMARK:
                dear.append((gain.accuracy, due, story))
    if not dear:
        return ""
    gained, due, story = max(dear, key=lambda found: found[0])
    return (
        f"{story.blueprint} at {story.slot} was removed although it added {gained:.1f} points: it has "
        f"{_counted(story.parameters or 0, 'parameter')}, the host {history.host_parameters:,}, and at a rent of "
        f"{history.rent:g} so many must add {due:.1f}. For accuracy at any size, set the rent to 0."
    )


def _harmful(history: History) -> str:
    """Of the kept seed that the final network would most gain from losing. Empty if there is none."""
    worst = min(
        (s for s in history.seeds() if s.value is not None and _loses(s.value.contribution)),
        key=lambda story: story.value.contribution.accuracy if story.value else 0.0,
        default=None,
    )
    if worst is None or worst.value is None:
        return ""
    lost = worst.value.contribution
    return (
        f"The final network would be better without {worst.blueprint} at {worst.slot}: by {-lost.accuracy:.1f} ± "
        f"{lost.error:.1f} points on the validation data. What is kept is permanent, and training went on after that "
        "decision: try another seed=, controller or choice of slots."
    )


def _loses(contribution: Contrast) -> bool:
    return contribution.accuracy <= -max(WORTH_A_REMARK, CLEARLY * contribution.error)


def _last_measured(history: History, story: SeedStory) -> Contrast | None:
    """What a seed was last measured to add before the controller removed it; None if it was not, or did not."""
    slot, past = history.slots.index(story.slot), history.kept_records[story.born : story.ended]
    actions = [record.effect.action for record in past]
    removed = [i for i, action in enumerate(actions) if (action.op, action.slot) == (Op.PRUNE, slot)]
    for record in reversed(past[: removed[0]] if removed else ()):
        for measured in (record.measured.contributions, record.measured.shadow_benefits):
            if slot in measured:
                return measured[slot]
    return None


def _why_nothing_was_grown(before: Outlook, records: Sequence[EpochRecord]) -> str:
    effects = [record.effect for record in records]
    who, waited = f"The controller {before.controller.name}", "chose to wait in every epoch"
    if len(records) < before.epochs:
        waited = f"chose to wait until the run was stopped, after {len(records)} of {before.epochs} epochs"
    refused = [effect.message for effect in effects if effect.action.op is Op.GERMINATE]
    if refused:
        return f"{who} tried to plant in {_counted(len(refused), 'epoch')} and was refused: {refused[-1]}."
    sure = [(effect.action.probability, i) for i, effect in enumerate(effects) if effect.action.probability is not None]
    if sure:
        _, least = min(sure)
        return f"{who} {waited}. It was least sure in epoch {least + 1}: {effects[least].action.reason}."
    reasons = Counter(effect.action.reason for effect in effects if effect.action.reason)
    if not reasons:
        return f"{who} {waited}, and gave no reason."
    counted = [f"{reason} (in {_counted(count, 'epoch')})" for reason, count in reasons.most_common(SHOWN)]
    return f"{who} {waited}: {'; '.join(counted)}."


def _learnt_nothing(
    before: Outlook, accuracy: float, untrained: float, targets: Targets, untried: Sequence[tuple[str, str]]
) -> str:
    """Empty where the network is better than chance, and than it was, by two standard errors."""
    margin = LEAST_EXPLAINED if before.constant == "mean" else _luck(untrained, targets)
    if at_chance := _at_chance(before, accuracy, targets):
        said = f"The run ended at chance: {at_chance}"
    elif accuracy <= untrained + margin:  # of a network that was trained before, say
        said = (
            f"The run did not clearly improve the network: the validation {before.metric} is {accuracy:.1f} %, and was "
            f"{untrained:.1f} % before training."
        )
    else:
        return ""
    ranks = {name: rank for rank, name in enumerate(ROTATION)}
    likely = sorted(untried, key=lambda pair: ranks.get(pair[1], len(ranks)))  # stable: slots stay in their order
    seeds = " and ".join(f"{name} at {slot}" for slot, name in likely[:2])
    remedy = "more epochs, smaller batches or a larger learning rate"
    if not isinstance(before.controller, Heuristic):
        remedy = f'controller "heuristic", {remedy}'
    if before.rent > 0.0 and isinstance(before.controller, LearnedController):
        remedy = f"a rent of 0 (accuracy at any size), {remedy}"
    return f"{said} Seeds that could be planted were not tried, such as {seeds}: try {remedy}."


def _at_chance(before: Outlook, accuracy: float, targets: Targets) -> str:
    """Against a prediction that never changes; empty where the network is better, or no such prediction is known."""
    ours = f"the validation {before.metric} is {accuracy:.1f} %"
    if before.constant == "mean":
        return f"{ours}, and predicting the mean gives 0.0 %." if accuracy <= LEAST_EXPLAINED else ""
    most = targets.most_frequent
    if most is None or not accuracy <= most + _luck(most, targets):
        return ""
    return f"{ours}, and the most frequent class alone gives {most:.1f} %."


def _luck(level: float, targets: Targets) -> float:
    """Two standard errors of a share of the examples."""
    share = min(1.0, max(0.0, level / 100.0))
    return 200.0 * float((share * (1.0 - share) / max(1, targets.examples)) ** 0.5)


def _listed(names: Sequence[str]) -> str:
    return (", ".join(names[:SHOWN]) or "none") + (", …" if len(names) > SHOWN else "")


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"

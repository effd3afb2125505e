"""The history of one run, as data: for `history.json`, for the plot, and to look up why something was grown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from esper.engine.counterfactual import SeedValue
from esper.engine.eager import EpochRecord
from esper.engine.governor import Verdict
from esper.env.rent import RENT_RATE
from esper.lifecycle import Contrast, Stage, Transition

FORMAT = 1


@dataclass(frozen=True, slots=True)
class History:
    """What happened to one learner, epoch by epoch."""

    controller: str
    slots: tuple[str, ...]
    host_parameters: int
    records: tuple[EpochRecord, ...]
    settled: tuple[Transition, ...] = ()
    """What was decided about unfinished seeds when the run ended."""
    rent: float = RENT_RATE
    """Points that one more host-size of parameters had to earn."""
    values: dict[str, SeedValue] = field(default_factory=dict)
    """By slot: what each seed that acts in the final network contributes to its score on the validation data."""

    @property
    def transitions(self) -> list[Transition]:
        return [t for record in self.records for t in record.transitions] + list(self.settled)

    def seeds(self) -> list[SeedStory]:
        """One story per seed, in the order of their birth."""
        stories: dict[int, list[Transition]] = {}
        for transition in self.transitions:
            stories.setdefault(transition.seed, []).append(transition)
        return [self._story(seed, stories[seed]) for seed in sorted(stories)]

    def _story(self, seed: int, transitions: list[Transition]) -> SeedStory:
        birth = transitions[0]
        effect = next(r.effect for r in self.records if birth in r.effect.transitions)
        action = effect.action
        ends = [t for t in transitions if t.target in (Stage.FOSSILIZED, Stage.PRUNED)]
        fate = ends[0] if ends else transitions[-1]
        return SeedStory(
            seed=seed,
            slot=birth.slot,
            blueprint=str(action.blueprint),
            blend=str(action.blend),
            born=birth.epoch,
            why_born=birth.reason,
            fate=fate.target,
            ended=fate.epoch,
            why_ended=fate.reason,
            settings=effect.settings,
            value=None if fate.target is Stage.PRUNED else self.values.get(birth.slot),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "controller": self.controller,
            "slots": list(self.slots),
            "host_parameters": self.host_parameters,
            "rent": self.rent,
            "epochs": [_record_json(record) for record in self.records],
            "transitions": [_transition_json(transition) for transition in self.transitions],
            "seeds": [_story_json(story) for story in self.seeds()],
        }


@dataclass(frozen=True, slots=True)
class SeedStory:
    """One seed from birth to its end, with the reasons."""

    seed: int
    slot: str
    blueprint: str
    blend: str
    born: int
    why_born: str
    fate: Stage
    """FOSSILIZED, PRUNED, or the stage in which the run left it."""
    ended: int
    why_ended: str
    settings: str
    """Whose learning rate and other settings of the optimizer it was trained with."""
    value: SeedValue | None = None
    """What it contributes to the final network; None if it does not act there."""


def _story_json(story: SeedStory) -> dict[str, Any]:
    value = None if story.value is None else {k: _contrast_json(Contrast(**c)) for k, c in asdict(story.value).items()}
    return {**asdict(story), "fate": story.fate.name, "value": value}


def _record_json(record: EpochRecord) -> dict[str, Any]:
    action = record.effect.action
    return {
        "epoch": record.epoch,
        "train_loss": _number(record.trained.loss),
        "val_loss": _number(record.measured.loss),
        "val_accuracy": _number(record.measured.accuracy),
        "parameters": record.parameters,
        "action": {
            "op": action.op.name,
            "slot": action.slot,
            "blueprint": action.blueprint,
            "blend": action.blend,
            "probability": action.probability,
        },
        "effect": {"changed": record.effect.changed, "message": record.effect.message},
        "verdict": None if record.verdict is None else _verdict_json(record.verdict),
        "stages": [stage.name for stage in record.stages],
        "alphas": list(record.alphas),
        "contributions": _contrasts_json(record.measured.contributions),
        "shadow_benefits": _contrasts_json(record.measured.shadow_benefits),
    }


def _contrasts_json(contrasts: Mapping[int, Contrast]) -> dict[int, dict[str, float | None]]:
    return {slot: _contrast_json(contrast) for slot, contrast in contrasts.items()}


def _contrast_json(contrast: Contrast) -> dict[str, float | None]:
    return {name: _number(value) for name, value in asdict(contrast).items()}


def _transition_json(transition: Transition) -> dict[str, Any]:
    return {**asdict(transition), "source": transition.source.name, "target": transition.target.name}


def _verdict_json(verdict: Verdict) -> dict[str, Any]:
    return {
        "kind": verdict.kind.value,
        "seen": _number(verdict.seen),
        "limit": _number(verdict.limit),
        "message": verdict.message,
    }


def _number(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None

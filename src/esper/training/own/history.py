"""The history of one run, as data: for `history.json`, for the plot, and to look up why something was grown."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from esper.actions import Op
from esper.engine.counterfactual import SeedValue
from esper.engine.eager import EpochRecord
from esper.env.rent import RENT_RATE
from esper.growth.blueprints import SlotShape
from esper.growth.costs import seed_flops
from esper.growth.seed import parameter_count
from esper.lifecycle import IN_FORWARD, Stage, Transition
from esper.plain_data import as_json

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
    shapes: tuple[SlotShape, ...] = ()
    """Of the slots."""
    host_flops: int | None = None
    """Of one example's forward pass through the host alone; None where they could not be counted."""
    untrained: float | None = None
    """Validation accuracy before the first update."""
    control: tuple[float, ...] = ()
    """Validation accuracy of the same host without growth, by epoch, if it was trained."""
    metric: str = "accuracy"
    """What the accuracies are, in a word or two."""
    kept: int | None = None
    """Epochs after which the network was what is kept, with `keep_best`; None: all of them."""

    @property
    def kept_records(self) -> tuple[EpochRecord, ...]:
        """The epochs that made the network that is kept."""
        return self.records[: self.kept]

    @property
    def transitions(self) -> list[Transition]:
        return [t for record in self.kept_records for t in record.transitions] + list(self.settled)

    def seed_cost(self, slot: str, blueprint: str, blend: str) -> tuple[int, int] | None:
        """Parameters and FLOPs per example that such a seed adds at a slot."""
        if not self.shapes:
            return None
        shape = self.shapes[self.slots.index(slot)]
        return parameter_count(blueprint, shape, blend), seed_flops(blueprint, shape, blend)

    def flops(self) -> list[int | None]:
        """By epoch: those of one example's pass through the network, the seeds that act in it included."""
        planted: dict[int, int] = {}
        found: list[int | None] = []
        for record in self.records:
            action = record.effect.action
            if action.op is Op.GERMINATE and record.effect.changed and action.slot is not None:
                cost = self.seed_cost(self.slots[action.slot], str(action.blueprint), str(action.blend))
                planted[action.slot] = 0 if cost is None else cost[1]
            acting = sum(planted[slot] for slot, stage in enumerate(record.stages) if stage in IN_FORWARD)
            found.append(None if self.host_flops is None else self.host_flops + acting)
        return found

    def seeds(self) -> list[SeedStory]:
        """One story per seed, in the order of their birth."""
        stories: dict[int, list[Transition]] = {}
        for transition in self.transitions:
            stories.setdefault(transition.seed, []).append(transition)
        return [self._story(seed, stories[seed]) for seed in sorted(stories)]

    def _story(self, seed: int, transitions: list[Transition]) -> SeedStory:
        birth = transitions[0]
        effect = next(r.effect for r in self.kept_records if birth in r.effect.transitions)
        action = effect.action
        ends = [t for t in transitions if t.target in (Stage.FOSSILIZED, Stage.PRUNED)]
        fate = ends[0] if ends else transitions[-1]
        cost = self.seed_cost(birth.slot, str(action.blueprint), str(action.blend))
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
            parameters=None if cost is None else cost[0],
            flops=None if cost is None else cost[1],
            value=None if fate.target is Stage.PRUNED else self.values.get(birth.slot),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "controller": self.controller,
            "slots": list(self.slots),
            "host_parameters": self.host_parameters,
            "host_flops_per_example": self.host_flops,
            "rent": self.rent,
            "untrained_accuracy": as_json(self.untrained),
            "control": as_json(self.control),
            "kept_epochs": len(self.kept_records),
            "epochs": [
                {**record_json(record), "flops_per_example": flops}
                for record, flops in zip(self.records, self.flops(), strict=True)
            ],
            "transitions": as_json(self.transitions),
            "seeds": as_json(self.seeds()),
        }


@dataclass(frozen=True, slots=True)
class SeedStory:
    """One seed from birth to its end, with the reasons."""

    seed: int
    slot: str
    blueprint: str
    blend: str
    born: int
    """Epochs that were over when it was planted."""
    why_born: str
    fate: Stage
    """FOSSILIZED, PRUNED, or the stage in which the run left it."""
    ended: int
    """Epochs that were over when it reached that stage."""
    why_ended: str
    settings: str
    """Whose learning rate and other settings of the optimizer it was trained with."""
    parameters: int | None = None
    flops: int | None = None
    """Of one example's forward pass."""
    value: SeedValue | None = None
    """What it contributes to the final network; None if it does not act there."""


def record_json(record: EpochRecord) -> dict[str, Any]:
    """An entry of `epochs`."""
    action = record.effect.action
    return {
        "epoch": record.epoch,
        "train_loss": as_json(record.trained.loss),
        "val_loss": as_json(record.measured.loss),
        "val_accuracy": as_json(record.measured.accuracy),
        "parameters": record.parameters,
        "action": {
            "op": action.op.name,
            "slot": action.slot,
            "blueprint": action.blueprint,
            "blend": action.blend,
            "probability": action.probability,
        },
        "effect": {"changed": record.effect.changed, "message": record.effect.message},
        "verdict": as_json(record.verdict),
        "stages": as_json(record.stages),
        "alphas": list(record.alphas),
        "contributions": as_json(record.measured.contributions),
        "shadow_benefits": as_json(record.measured.shadow_benefits),
    }


def transitions_json(record: EpochRecord) -> list[dict[str, Any]]:
    """Of one epoch, as entries of `transitions`."""
    return [as_json(transition) for transition in record.transitions]

"""What a controller knows when it decides: a readable record of one learner. Legality is part of it.

Rule-based controllers read it as it is; for the learned policy it becomes tensors. Everything here was measured; what
was not is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from esper.actions import Action, Effect, Op
from esper.engine.eager import EpochRecord
from esper.engine.learner import Learner
from esper.env.rent import RENT_RATE
from esper.growth.blueprints import Layout
from esper.growth.model import GrowingModel
from esper.growth.slot import Slot
from esper.lifecycle import Contrast, Stage


@dataclass(frozen=True, slots=True)
class SlotView:
    """One slot as a controller sees it."""

    index: int
    path: str
    layout: Layout
    channels: int
    position: float
    """Place in the forward pass: 0 is the first slot, 1 the last."""
    stage: Stage
    blueprint: str | None
    blend: str | None
    alpha: float
    age: int
    dwell: int
    retiring: bool
    seeds_before: int
    """Seeds that grew here and were removed."""
    parameters: int
    """Of the seed that is there now."""
    gradient: float | None
    shadow_benefit: Contrast | None
    contribution: Contrast | None
    staleness: int
    """Epochs since shadow benefit or contribution was last measured."""
    costs: Mapping[str, int]
    """Parameters of each blueprint that fits here, affordable or not."""
    growable: frozenset[str]
    """Blueprints that may germinate here now."""
    prunable: bool
    fossilizable: bool

    def allows(self, op: Op) -> bool:
        """Whether the operation is possible here now. WAIT is not an operation on a slot."""
        if op is Op.GERMINATE:
            return bool(self.growable)
        return self.prunable if op is Op.PRUNE else op is Op.FOSSILIZE and self.fossilizable


@dataclass(frozen=True, slots=True)
class Situation:
    """One learner between two epochs."""

    epoch: int
    """Epochs done."""
    horizon: int
    """Epochs in all."""
    history: Sequence[EpochRecord]
    parameters: int
    host_parameters: int
    budget: int | None
    seeds_left: int | None
    """Seeds that may still be planted at a time; None is no limit."""
    slots: tuple[SlotView, ...]
    rent: float = RENT_RATE
    """Points that one more host-size of parameters must earn. Learned policies do not read it."""

    @property
    def last_effect(self) -> Effect | None:
        return self.history[-1].effect if self.history else None

    @property
    def remaining(self) -> int:
        return self.horizon - self.epoch

    def allows(self, action: Action) -> bool:
        """Whether the action would have its effect. WAIT always does."""
        if action.slot is None:
            return True
        slot = self.slots[action.slot]
        return slot.allows(action.op) and (action.op is not Op.GERMINATE or action.blueprint in slot.growable)

    def slots_for(self, op: Op) -> list[SlotView]:
        """The slots where the operation is possible now."""
        return [slot for slot in self.slots if slot.allows(op)]


def observe(
    learner: Learner,
    horizon: int,
    history: Sequence[EpochRecord],
    before: Situation | None = None,
    rent: float = RENT_RATE,
) -> Situation:
    """What there is to know now. `before`, the same an epoch ago, spares the views of slots that are still empty."""
    model = learner.model
    parameters = model.parameter_count
    seeds_left = None if model.max_seeds is None else model.max_seeds - len(model.seeds)
    room = (model.budget, parameters, seeds_left)  # what may grow in an empty slot depends on nothing else
    known = before.slots if before is not None and (before.budget, before.parameters, before.seeds_left) == room else ()
    return Situation(
        epoch=learner.epoch,
        horizon=horizon,
        history=history,
        parameters=parameters,
        host_parameters=model.host_parameters,
        budget=model.budget,
        seeds_left=seeds_left,
        slots=tuple(
            view if view and _is_still_empty(model, slot, view) else _view(model, slot)
            for slot, view in zip_longest(model.slots, known)
        ),
        rent=rent,
    )


def _is_still_empty(model: GrowingModel, slot: Slot, view: SlotView) -> bool:
    """Nothing counts epochs in an empty slot; but new blueprints may have been registered."""
    return view.stage is slot.life.stage is Stage.DORMANT and view.costs is model.costs(slot)


def _view(model: GrowingModel, slot: Slot) -> SlotView:
    life = slot.life
    return SlotView(
        index=slot.index,
        path=slot.path,
        layout=slot.shape.layout,
        channels=slot.shape.channels,
        position=slot.index / max(1, len(model.slots) - 1),
        stage=life.stage,
        blueprint=life.blueprint if slot.seed is not None else None,
        blend=life.blend if slot.seed is not None else None,
        alpha=life.alpha,
        age=life.age,
        dwell=life.dwell,
        retiring=life.retiring,
        seeds_before=sum(transition.target is Stage.PRUNED for transition in life.history),
        parameters=0 if slot.seed is None else slot.seed.size,
        gradient=life.gradient,
        shadow_benefit=life.shadow_benefit,
        contribution=life.contribution,
        staleness=life.age - life.measured_age,
        costs=model.costs(slot),
        growable=model.growable(slot),
        prunable=life.prunable,
        fossilizable=life.fossilizable,
    )

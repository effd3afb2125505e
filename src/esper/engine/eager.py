"""The eager engine: N learners, one after the other, on any device. The reference for every faster engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from esper.actions import Action, Effect
from esper.engine.learner import Learner, TrainReport
from esper.engine.measure import Evaluation, gather
from esper.lifecycle import Stage, Transition


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """All that happened to one learner in one epoch."""

    epoch: int
    effect: Effect
    trained: TrainReport
    measured: Evaluation
    transitions: tuple[Transition, ...]
    """Every stage change of the epoch, those of the action included."""
    parameters: int
    """Size of the network that was measured."""
    stages: tuple[Stage, ...]
    """Of each slot, while the epoch was trained and measured."""
    alphas: tuple[float, ...]


class EagerEngine:
    """Advances all its learners by one epoch at a time."""

    def __init__(self, learners: Sequence[Learner]) -> None:
        self.learners = list(learners)

    def step(self, actions: Sequence[Action]) -> list[EpochRecord]:
        """Act, train, measure, move on; two device-to-host transfers for all learners together."""
        begun = [_begin(learner, action) for learner, action in zip(self.learners, actions, strict=True)]
        trained = gather([learner.train() for learner in self.learners])
        measured = gather([learner.evaluate() for learner in self.learners])
        return [
            _end(learner, effect, first, report, evaluation)
            for learner, (effect, first), report, evaluation in zip(
                self.learners, begun, trained, measured, strict=True
            )
        ]


def _begin(learner: Learner, action: Action) -> tuple[Effect, list[Transition]]:
    effect = learner.apply(action)
    return effect, learner.begin_epoch()


def _end(
    learner: Learner, effect: Effect, begun: list[Transition], trained: TrainReport, measured: Evaluation
) -> EpochRecord:
    epoch, model = learner.epoch, learner.model
    size = model.parameter_count
    stages = tuple(slot.life.stage for slot in model.slots)
    alphas = tuple(slot.life.alpha for slot in model.slots)
    ended = learner.end_epoch(trained, measured)
    return EpochRecord(epoch, effect, trained, measured, (*effect.transitions, *begun, *ended), size, stages, alphas)

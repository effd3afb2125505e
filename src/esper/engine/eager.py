"""The eager engine: N learners, one after the other, on any device. The reference for every faster engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from esper.actions import Action, Effect
from esper.engine.learner import Learner, TrainReport
from esper.engine.measure import Evaluation, gather
from esper.lifecycle import Transition


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


class EagerEngine:
    """Advances all its learners by one epoch at a time."""

    def __init__(self, learners: Sequence[Learner]) -> None:
        self.learners = list(learners)

    def step(self, actions: Sequence[Action]) -> list[EpochRecord]:
        """Act, train, measure, move on; two device-to-host transfers for all learners together."""
        effects = [learner.apply(action) for learner, action in zip(self.learners, actions, strict=True)]
        epochs = [learner.epoch for learner in self.learners]
        begun = [learner.begin_epoch() for learner in self.learners]
        trained = gather([learner.train() for learner in self.learners])
        measured = gather([learner.evaluate() for learner in self.learners])
        sizes = [learner.model.parameter_count for learner in self.learners]
        ended = [learner.end_epoch(t, m) for learner, t, m in zip(self.learners, trained, measured, strict=True)]
        return [
            EpochRecord(epoch, effect, t, m, (*effect.transitions, *first, *last), size)
            for epoch, effect, first, t, m, last, size in zip(
                epochs, effects, begun, trained, measured, ended, sizes, strict=True
            )
        ]

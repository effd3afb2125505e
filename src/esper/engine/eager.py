"""The eager engine: N learners, one after the other, on any device. The reference for every faster engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from esper.actions import Action, Effect
from esper.engine.governor import Governor, Verdict
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
    """The network at the end of the epoch; after a rollback, the restored one."""
    transitions: tuple[Transition, ...]
    """Every stage change of the epoch, those of the action included."""
    parameters: int
    """Size of the network that was measured."""
    stages: tuple[Stage, ...]
    """Of each slot, while the epoch was trained."""
    alphas: tuple[float, ...]
    verdict: Verdict | None = None
    """Why the epoch was undone; None for a healthy one."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """One learner's epoch between its action and its training."""

    epoch: int
    effect: Effect
    transitions: tuple[Transition, ...]
    parameters: int
    stages: tuple[Stage, ...]
    alphas: tuple[float, ...]


class EagerEngine:
    """Advances its learners by one epoch at a time. A learner that breaks is rolled back; the others do not notice."""

    def __init__(self, learners: Sequence[Learner], governors: Sequence[Governor | None] | None = None) -> None:
        """`governors`: one per learner, None to leave a learner unwatched; by default every learner has one."""
        self.learners = list(learners)
        self.governors = [Governor(learner) for learner in learners] if governors is None else list(governors)
        if len(self.governors) != len(self.learners):
            raise ValueError(f"{len(self.learners)} learners need as many governors, not {len(self.governors)}")

    @overload
    def step(self, actions: Sequence[Action]) -> list[EpochRecord]: ...

    @overload
    def step(self, actions: Sequence[Action], active: Sequence[bool]) -> list[EpochRecord | None]: ...

    def step(
        self, actions: Sequence[Action], active: Sequence[bool] | None = None
    ) -> list[EpochRecord] | list[EpochRecord | None]:
        """Act, train, measure, move on.

        A learner that is not `active` stays as it is, its action is ignored and its record is None.
        """
        records = list(self.stepping(actions, active))
        return [record for record in records if record is not None] if active is None else records

    def stepping(self, actions: Sequence[Action], active: Sequence[bool] | None = None) -> Iterator[EpochRecord | None]:
        """A step whose records come one by one, so that a caller can deal with one while a device works on others."""
        wanted = [True] * len(self.learners) if active is None else active
        rows = zip(self.learners, self.governors, actions, wanted, strict=True)
        chosen = [(learner, governor, action) for learner, governor, action, on in rows if on]
        begun: list[_Begun] = []

        def beginning() -> Iterator[Learner]:
            for row in chosen:
                begun.append(_begin(*row))
                yield row[0]

        # Reports first: it is for them that epochs begin.
        reports = zip(self.run(beginning()), chosen, begun, strict=True)
        for on in wanted:
            if not on:
                yield None
                continue
            report, (learner, governor, _), epoch = next(reports)
            yield _end(learner, governor, epoch, *report)

    def run(self, learners: Iterable[Learner]) -> Iterator[tuple[TrainReport, Evaluation]]:
        """Train and measure these for one epoch; two device-to-host transfers for all of them together.

        An engine takes a learner from the iterable when it is about to train it.
        """
        everyone = list(learners)
        yield from zip(gather([learner.train() for learner in everyone]), self.measure(everyone), strict=True)

    def measure(self, learners: Sequence[Learner]) -> list[Evaluation]:
        return gather([learner.evaluate() for learner in learners])


def _begin(learner: Learner, governor: Governor | None, action: Action) -> _Begun:
    effect = learner.apply(action)
    if governor is not None:
        for transition in effect.transitions:
            if transition.target is Stage.FOSSILIZED:
                governor.fossilized(transition.slot)
    transitions = (*effect.transitions, *learner.begin_epoch())
    lives = [slot.life for slot in learner.model.slots]
    stages, alphas = tuple(life.stage for life in lives), tuple(life.alpha for life in lives)
    return _Begun(learner.epoch, effect, transitions, learner.model.parameter_count, stages, alphas)


def _end(
    learner: Learner, governor: Governor | None, begun: _Begun, trained: TrainReport, measured: Evaluation
) -> EpochRecord:
    verdict = None if governor is None else governor.check(trained, measured)
    parameters = begun.parameters
    if governor is not None and verdict is not None:
        ended = governor.roll_back(verdict)
        measured = gather([learner.evaluate()])[0]  # one more transfer, but only when something broke
        governor.resume(measured)
        parameters = learner.model.parameter_count
    else:
        ended = learner.end_epoch(trained, measured)
        if governor is not None:
            governor.keep(trained, measured)
    return EpochRecord(
        epoch=begun.epoch,
        effect=begun.effect,
        trained=trained,
        measured=measured,
        transitions=(*begun.transitions, *ended),
        parameters=parameters,
        stages=begun.stages,
        alphas=begun.alphas,
        verdict=verdict,
    )

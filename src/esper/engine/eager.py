"""The eager engine: N learners, one after the other, on any device. The reference for every faster engine."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

import torch

from esper.actions import Action, Effect
from esper.engine.governor import Governor, Verdict
from esper.engine.learner import Learner, TrainReport
from esper.engine.measure import Evaluation, gather
from esper.lifecycle import Contrast, Stage, Transition
from esper.slot_columns import SlotColumns
from esper.slot_views import common_columns, measured_columns


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """All that happened to one learner in one epoch."""

    epoch: int
    """Counted from 0; whatever people read counts from 1."""
    effect: Effect
    """What was decided before the epoch, and why."""
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


Measured = tuple[Mapping[int, float], Mapping[int, Contrast], Mapping[int, Contrast]]
"""By slot: gradients, shadow benefits, contributions."""


@dataclass(slots=True)
class EpochUnderWay:
    """One learner's epoch between its action and its record."""

    learner: Learner
    governor: Governor | None
    effect: Effect
    transitions: list[Transition]
    parameters: int
    stages: tuple[Stage, ...]
    alphas: tuple[float, ...]
    verdict: Verdict | None = None
    report: tuple[TrainReport, Evaluation] = field(init=False)

    @classmethod
    def begin(cls, learner: Learner, governor: Governor | None, action: Action) -> EpochUnderWay:
        effect = learner.apply(action)
        for transition in effect.transitions:
            if governor is not None and transition.target is Stage.FOSSILIZED:
                governor.fossilized(transition.slot)
        transitions = [*effect.transitions, *learner.begin_epoch()]
        model = learner.model
        stages, alphas = tuple(model.lifecycle.stages), tuple(model.lifecycle.alphas)
        return cls(learner, governor, effect, transitions, model.parameter_count, stages, alphas)

    def judge(self, trained: TrainReport, measured: Evaluation) -> None:
        """Keep what was measured, or undo the epoch."""
        self.report = trained, measured
        if self.governor is None:
            return
        self.verdict = self.governor.check(trained, measured)
        if self.verdict is None:
            self.governor.keep(trained, measured)
            return
        self.transitions += self.governor.roll_back(self.verdict)
        restored = gather([self.learner.evaluate()])[0]  # one more transfer, but only when something broke
        self.governor.resume(restored)
        self.report = trained, restored
        self.parameters = self.learner.model.parameter_count

    def record(self, ended: list[Transition]) -> EpochRecord:
        trained, measured = self.report
        return EpochRecord(
            epoch=self.learner.epoch - 1,
            effect=self.effect,
            trained=trained,
            measured=measured,
            transitions=(*self.transitions, *ended),
            parameters=self.parameters,
            stages=self.stages,
            alphas=self.alphas,
            verdict=self.verdict,
        )


class EagerEngine:
    """Advances its learners by one epoch at a time. A learner that breaks is rolled back; the others do not notice."""

    def __init__(
        self,
        learners: Sequence[Learner],
        governors: Sequence[Governor | None] | None = None,
        width: int | None = None,
    ) -> None:
        """`governors`: one per learner, None to leave a learner unwatched; by default every learner has one.

        `width` is the number of slots that the columns have room for; None is the most that a network has.
        """
        self.learners = list(learners)
        self.governors = [Governor(learner) for learner in learners] if governors is None else list(governors)
        if len(self.governors) != len(self.learners):
            raise ValueError(f"{len(self.learners)} learners need as many governors, not {len(self.governors)}")
        self.columns = common_columns([learner.model.lifecycle for learner in self.learners], width)
        """The slots of all networks."""

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
        self._check_own()
        wanted = [True] * len(self.learners) if active is None else active
        rows = zip(self.learners, self.governors, actions, wanted, strict=True)
        chosen = [(learner, governor, action) for learner, governor, action, on in rows if on]
        epochs: list[EpochUnderWay] = []

        def beginning() -> Iterator[Learner]:
            for row in chosen:
                epochs.append(EpochUnderWay.begin(*row))
                yield row[0]

        for i, report in enumerate(self.run(beginning())):  # a GPU works on the next ones meanwhile
            epochs[i].judge(*report)
        found = dict(zip((epoch.learner for epoch in epochs), self.end(epochs), strict=True))
        records = [found.get(learner) for learner in self.learners]
        return [record for record in records if record is not None] if active is None else records

    def _check_own(self) -> None:
        """An engine made later over the same learners has taken their columns: this one would advance nothing."""
        for row, learner in enumerate(self.learners):
            own = learner.model.lifecycle.columns.stage
            if own.numel() and own.data_ptr() != self.columns.stage[row].data_ptr():
                raise RuntimeError("another engine has taken this learner over: make a new engine for it")

    def end(self, epochs: Sequence[EpochUnderWay]) -> list[EpochRecord]:
        """Let the seeds of all networks move on at once, by what was measured, and the networks follow."""
        undone = {epoch.learner for epoch in epochs if epoch.verdict is not None}
        healthy = {epoch.learner: epoch.report for epoch in epochs if epoch.verdict is None}
        move_on(self.columns, self.learners, healthy, undone)
        return [epoch.record(epoch.learner.end_epoch()) for epoch in epochs]

    def run(self, learners: Iterable[Learner]) -> Iterator[tuple[TrainReport, Evaluation]]:
        """Train and measure these for one epoch; two device-to-host transfers for all of them together.

        An engine takes a learner from the iterable when it is about to train it.
        """
        everyone = list(learners)
        yield from zip(gather([learner.train() for learner in everyone]), self.measure(everyone), strict=True)

    def measure(self, learners: Sequence[Learner]) -> list[Evaluation]:
        return gather([learner.evaluate() for learner in learners])

    def close(self) -> None:
        """The learners are done with this engine."""


def move_on(
    columns: SlotColumns,
    learners: Sequence[Learner],
    healthy: Mapping[Learner, tuple[TrainReport, Evaluation]],
    undone: Container[Learner] = (),
) -> None:
    """The end of an epoch in the columns of `learners`. What was measured in an undone epoch does not count.

    In a run's last epoch the seeds stay what they were when the network was measured.
    """
    found: list[Measured] = [({}, {}, {})] * len(learners)
    advance = [learner in undone for learner in learners]
    for i, learner in enumerate(learners):
        if learner in healthy:
            trained, measured = healthy[learner]
            found[i] = (trained.seed_gradients, measured.shadow_benefits, measured.contributions)
            advance[i] = not learner.in_last_epoch
    gradients, shadows, contributions = zip(*found, strict=True)
    columns.measure(*measured_columns(gradients, shadows, contributions, columns.present.shape[1]))
    columns.end_epoch(torch.tensor(advance))

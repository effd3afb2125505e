"""What happened in one rollout: every step goes to the recorder, and a summary to the person who watches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from esper.actions import HEAD_NAMES, HEADS_USED
from esper.env.growth_env import StepInfo
from esper.lifecycle import Stage
from esper.telemetry.recorder import RunRecorder
from esper.telemetry.records import TRAIN, Decision, Episode, Event
from esper.training.fleet import PlayedStep


@dataclass(frozen=True, slots=True)
class RolloutSummary:
    """The episodes of one rollout, in the order of the environments."""

    numbers: tuple[int, ...]
    returns: list[float]
    scores: list[float]
    accuracies: list[float]
    growth: list[float]
    """Parameters of the final network over those of its host."""
    steps: int
    lifecycle: Counter[Stage]
    """Seeds that entered each stage."""
    governed: int
    """Episodes that the governor ended."""

    def metrics(self) -> dict[str, float]:
        return {
            "episode/return": fmean(self.returns),
            "episode/score": fmean(self.scores),
            "episode/accuracy": fmean(self.accuracies),
            "episode/growth": fmean(self.growth),
            "episode/governed": float(self.governed),
            "episode/germinated": float(self.lifecycle[Stage.GERMINATED]),
            "episode/fossilized": float(self.lifecycle[Stage.FOSSILIZED]),
            "episode/pruned": float(self.lifecycle[Stage.PRUNED]),
            "env_steps": float(self.steps),
        }


@dataclass(slots=True)
class _Row:
    """One environment's episode so far."""

    total: float = 0.0
    length: int = 0
    terms: Counter[str] = field(default_factory=Counter)
    last: StepInfo | None = None


class Journal:
    """Notes the steps of one rollout."""

    def __init__(self, recorder: RunRecorder, update: int, numbers: Sequence[int], arm: str = TRAIN) -> None:
        self.recorder = recorder
        self.update = update
        self.numbers = tuple(numbers)
        self.arm = arm
        self._rows = [_Row() for _ in numbers]
        self._lifecycle: Counter[Stage] = Counter()

    def note(
        self,
        step: PlayedStep,
        probabilities: Sequence[Sequence[float]] | None = None,
        values: Sequence[float] | None = None,
    ) -> None:
        """One step of all environments; probabilities [N, heads] and values [N] of the decisions, where known."""
        ended = step.terminated.tolist()
        for env, info in enumerate(step.infos):
            if info is None:
                continue
            row = self._rows[env]
            row.total += info.reward.total
            row.length += 1
            row.terms.update(info.reward.terms)
            row.last = info
            chosen = None if probabilities is None else probabilities[env]
            self._decision(env, info, chosen, None if values is None else values[env])
            self._events(env, info)
            if ended[env]:
                self._episode(env, row)

    def summary(self) -> RolloutSummary:
        infos = [row.last for row in self._rows if row.last is not None]
        return RolloutSummary(
            numbers=self.numbers,
            returns=[row.total for row in self._rows],
            scores=[info.reward.score or 0.0 for info in infos],
            accuracies=[info.record.measured.accuracy for info in infos],
            growth=[info.parameters / info.host_parameters for info in infos],
            steps=sum(row.length for row in self._rows),
            lifecycle=self._lifecycle,
            governed=sum(info.record.verdict is not None for info in infos),
        )

    def _decision(self, env: int, info: StepInfo, probabilities: Sequence[float] | None, value: float | None) -> None:
        effect = info.record.effect
        action = effect.action
        chosen = dict(zip(HEAD_NAMES, probabilities or (), strict=False))
        self.recorder.decision(
            Decision.of(
                effect,
                update=self.update,
                env=env,
                epoch=info.record.epoch,
                slot=None if action.slot is None else info.slots[action.slot],
                probabilities={head: p for head, p in chosen.items() if head in HEADS_USED[action.op]},
                value=value,
                reward=info.reward.total,
                rewards=info.reward.terms,
                arm=self.arm,
            )
        )

    def _events(self, env: int, info: StepInfo) -> None:
        for transition in info.record.transitions:
            self._lifecycle[transition.target] += 1
            self.recorder.event(Event.of_transition(transition, update=self.update, env=env, arm=self.arm))
        verdict = info.record.verdict
        if verdict is not None:
            self.recorder.event(
                Event("governor", self.update, verdict.message, "warning", env, info.record.epoch, arm=self.arm)
            )
        for finding in info.reward.events:
            self.recorder.event(
                Event(
                    finding.kind,
                    self.update,
                    f"{finding.blueprint} claims {finding.contribution:+.1f} points; the network gained "
                    f"{finding.improvement:+.1f} since it was planted",
                    "warning",
                    env,
                    finding.epoch,
                    finding.path,
                    finding.seed,
                    arm=self.arm,
                )
            )

    def _episode(self, env: int, row: _Row) -> None:
        info = row.last
        assert info is not None
        verdict = info.record.verdict
        self.recorder.episode(
            Episode(
                update=self.update,
                env=env,
                draw=self.numbers[env],
                episode_return=row.total,
                score=info.reward.score or 0.0,
                accuracy=info.record.measured.accuracy,
                parameters=info.parameters,
                host_parameters=info.host_parameters,
                length=row.length,
                governor=None if verdict is None else verdict.message,
                rewards=dict(row.terms),
                arm=self.arm,
            )
        )

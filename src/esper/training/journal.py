"""What happened in one rollout goes to the recorder, and a summary to the person who watches.

Of a rollout of at most `BULK` episodes every step is recorded; of a larger one what `training/bulk.py` makes of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import torch
from torch import Tensor

from esper.actions import HEAD_NAMES, HEADS_USED
from esper.env.learner_env import StepInfo
from esper.env.reward.config import TERMS
from esper.env.reward.reward import shaping_share
from esper.lifecycle import Stage
from esper.rollout.episodes import Episodes
from esper.rollout.facts import Facts
from esper.rollout.render import render, reports_of
from esper.telemetry.recorder import RunRecorder
from esper.telemetry.records import TRAIN, Decision, Episode, Event
from esper.training.bulk import BULK, counts, episode_columns, sample


@dataclass(frozen=True, slots=True)
class RolloutSummary:
    """The episodes of one rollout, in the order of the environments."""

    draws: tuple[int, ...]
    returns: list[float]
    shaping_share: float = field(default=0.0, kw_only=True)
    """Mean over steps of how much of the reward is shaping (R121)."""
    scores: list[float]
    accuracies: list[float]
    growth: list[float]
    """Parameters of the final network over those of its host."""
    steps: int
    lifecycle: Counter[Stage]
    """Seeds that entered each stage."""
    governed: int
    """Episodes that the governor ended."""

    @classmethod
    def of(cls, episodes: Episodes) -> RolloutSummary:
        if not episodes.reports and episodes.facts is not None:
            return cls.of_facts(episodes, episodes.facts)
        lasts = [row[-1] for row in episodes.reports]
        return cls(
            draws=tuple(episodes.draw.tolist()),
            returns=[sum(info.reward.total for info in row) for row in episodes.reports],
            shaping_share=_shaping_share([info.reward.terms for row in episodes.reports for info in row]),
            scores=[info.reward.score or 0.0 for info in lasts],
            accuracies=[info.record.measured.accuracy for info in lasts],
            growth=[info.parameters / info.host_parameters for info in lasts],
            steps=episodes.steps,
            lifecycle=Counter(t.target for row in episodes.reports for info in row for t in info.record.transitions),
            governed=sum(info.record.verdict is not None for info in lasts),
        )

    @classmethod
    def of_facts(cls, episodes: Episodes, facts: Facts) -> RolloutSummary:
        """The same from columns."""
        growth = facts.at_the_end(facts.steps.parameters) / facts.host_parameters
        return cls(
            draws=tuple(episodes.draw.tolist()),
            returns=facts.rewards().sum(1).tolist(),
            shaping_share=shaping_share(facts.steps.reward.terms[facts.played]).mean().item(),
            scores=facts.at_the_end(facts.steps.reward.score).nan_to_num(0.0).tolist(),
            accuracies=facts.at_the_end(facts.steps.epoch.accuracy).tolist(),
            growth=growth.tolist(),
            steps=episodes.steps,
            lifecycle=Counter(dict(zip(Stage, facts.entered().tolist(), strict=True))),
            governed=int((facts.at_the_end(facts.steps.epoch.fault) >= 0).sum()),
        )

    def metrics(self) -> dict[str, float]:
        return {
            "episode/return": fmean(self.returns),
            "episode/shaping_share": self.shaping_share,
            "episode/score": fmean(self.scores),
            "episode/accuracy": fmean(self.accuracies),
            "episode/growth": fmean(self.growth),
            "episode/governed": float(self.governed),
            "episode/germinated": float(self.lifecycle[Stage.GERMINATED]),
            "episode/fossilized": float(self.lifecycle[Stage.FOSSILIZED]),
            "episode/pruned": float(self.lifecycle[Stage.PRUNED]),
            "env_steps": float(self.steps),
        }


def _shaping_share(steps: Sequence[Mapping[str, float]]) -> float:
    """Of steps that are records."""
    return (
        shaping_share(torch.tensor([[terms[name] for name in TERMS] for terms in steps], dtype=torch.float64))
        .mean()
        .item()
    )


class Journal:
    """Writes rollouts of one update to the recorder."""

    def __init__(self, recorder: RunRecorder, update: int, arm: str = TRAIN) -> None:
        self.recorder, self.update, self.arm = recorder, update, arm

    def note(self, episodes: Episodes, values: Tensor | None = None) -> RolloutSummary:
        """Record the episodes; `values` [N, T] in reward units."""
        if len(episodes) > BULK and episodes.facts is not None:
            return self._note_in_bulk(episodes, episodes.facts, values)
        self._steps(episodes, reports_of(episodes), range(len(episodes)), values)
        return RolloutSummary.of(episodes)

    def _note_in_bulk(self, episodes: Episodes, facts: Facts, values: Tensor | None) -> RolloutSummary:
        rows = sample(episodes.draw)
        chosen = episodes.select(rows)
        reports = chosen.reports or render(facts, rows)
        values = None if values is None else values[rows.to(values.device)]
        self._steps(chosen, reports, rows.tolist(), values, with_episodes=False)
        self.recorder.episodes(episode_columns(episodes, facts, self.update, self.arm))
        prefix = "" if self.arm == TRAIN else f"{self.arm}/"
        found = counts(episodes, facts) | {"sampled_episodes": float(len(rows))}
        self.recorder.metrics(self.update, {prefix + name: value for name, value in found.items()})
        return RolloutSummary.of_facts(episodes, facts)

    def _steps(
        self,
        episodes: Episodes,
        reports: Sequence[Sequence[StepInfo]],
        envs: Sequence[int],
        values: Tensor | None,
        *,
        with_episodes: bool = True,
    ) -> None:
        """Every step of the episodes, the first steps first; `envs` are their numbers in the rollout."""
        probabilities = None if episodes.log_prob is None else episodes.log_prob.exp().tolist()
        expected = None if values is None else values.tolist()
        draws = episodes.draw.tolist()
        for step in range(episodes.reward.shape[1]):
            for i, (env, row) in enumerate(zip(envs, reports, strict=True)):
                if step >= len(row):
                    continue
                chosen = () if probabilities is None else probabilities[i][step]
                self._decision(env, row[step], chosen, None if expected is None else expected[i][step])
                self._events(env, row[step])
                if with_episodes and step == len(row) - 1:
                    self._episode(env, draws[i], row)

    def _decision(self, env: int, info: StepInfo, probabilities: Sequence[float], value: float | None) -> None:
        effect = info.record.effect
        action = effect.action
        chosen = dict(zip(HEAD_NAMES, probabilities, strict=False))
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

    def _episode(self, env: int, draw: int, row: Sequence[StepInfo]) -> None:
        info, terms = row[-1], Counter[str]()
        for one in row:
            terms.update(one.reward.terms)
        verdict = info.record.verdict
        self.recorder.episode(
            Episode(
                update=self.update,
                env=env,
                draw=draw,
                episode_return=sum(one.reward.total for one in row),
                score=info.reward.score or 0.0,
                accuracy=info.record.measured.accuracy,
                parameters=info.parameters,
                host_parameters=info.host_parameters,
                length=len(row),
                governor=None if verdict is None else verdict.message,
                rewards=dict(terms),
                arm=self.arm,
            )
        )

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
from esper.env.reward.config import TERMS
from esper.env.reward.reward import shaping_share
from esper.env.steps import StepInfo
from esper.lifecycle import Stage
from esper.rollout.episodes import Episodes
from esper.rollout.facts import Facts
from esper.rollout.render import render, reports_of
from esper.telemetry.recorder import RunRecorder
from esper.telemetry.records import TRAIN, Decision, Episode, Event, StepDetails
from esper.training.bulk import BULK, counts, episode_columns, sample
from esper.training.choices import Explain, PolicyTable, details_of

DETAILED = 16
"""Episodes of a rollout that is recorded in full whose slots and choices are recorded, too: about 200 bytes a step."""


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
    stages: tuple[Counter[Stage], ...] = ()
    """By slot: in how many episodes its seed ended in each stage."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """Mean over episodes of each term of the reward."""

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
            stages=_by_slot([info.record.stages for info in lasts]),
            terms=_mean_terms(episodes.reports),
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
            stages=tuple(_counted(column) for column in facts.at_the_end(facts.steps.epoch.stage).T),
            terms=dict(zip(TERMS, facts.rewards().mean(0).tolist(), strict=True)),
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
            **{f"reward/{term}": mean for term, mean in self.terms.items()},
        }


def _by_slot(rows: Sequence[Sequence[Stage]]) -> tuple[Counter[Stage], ...]:
    most = max(map(len, rows), default=0)
    return tuple(Counter(row[slot] for row in rows if slot < len(row)) for slot in range(most))


def _counted(column: Tensor) -> Counter[Stage]:
    """[N] of one slot; a network without that slot counts as one whose slot is empty."""
    return Counter({Stage(code): n for code, n in enumerate(torch.bincount(column.clamp(min=0)).tolist()) if n})


def _shaping_share(steps: Sequence[Mapping[str, float]]) -> float:
    """Of steps that are records."""
    return (
        shaping_share(torch.tensor([[terms[name] for name in TERMS] for terms in steps], dtype=torch.float64))
        .mean()
        .item()
    )


class Journal:
    """Writes rollouts of one update to the recorder."""

    def __init__(self, recorder: RunRecorder, update: int, arm: str = TRAIN, explain: Explain | None = None) -> None:
        """`explain` gives the distributions that decisions were drawn from; None where rules decide."""
        self.recorder, self.update, self.arm, self.explain = recorder, update, arm, explain

    def note(self, episodes: Episodes, values: Tensor | None = None) -> RolloutSummary:
        """Record the episodes; `values` [N, T] in reward units."""
        if len(episodes) > BULK and episodes.facts is not None:
            return self._note_in_bulk(episodes, episodes.facts, values)
        reports, detailed = reports_of(episodes), sample(episodes.draw, DETAILED)
        table = None if self.explain is None else PolicyTable(self.explain(episodes.select(detailed)))
        rows = {row: i for i, row in enumerate(detailed.tolist())}
        self._steps(episodes, reports, range(len(episodes)), values, detailed=rows, table=table)
        return RolloutSummary.of(episodes)

    def _note_in_bulk(self, episodes: Episodes, facts: Facts, values: Tensor | None) -> RolloutSummary:
        rows = sample(episodes.draw)
        chosen = episodes.select(rows)
        reports = chosen.reports or render(facts, rows)
        values = None if values is None else values[rows.to(values.device)]
        table = None if self.explain is None else PolicyTable(self.explain(chosen))
        self._steps(chosen, reports, rows.tolist(), values, with_episodes=False, table=table)
        self.recorder.episodes(episode_columns(episodes, facts, self.update, self.arm))
        found = counts(episodes, facts) | {"sampled_episodes": float(len(rows))}
        prefix = "" if self.arm == TRAIN else f"{self.arm}/"
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
        detailed: Mapping[int, int] | None = None,
        table: PolicyTable | None = None,
    ) -> None:
        """Every step of the episodes, the first steps first; `envs` are their numbers in the rollout. `detailed` are
        the rows whose slots and choices are recorded, with their rows in the `table`; None is all of them."""
        probabilities = None if episodes.log_prob is None else episodes.log_prob.exp().tolist()
        expected = None if values is None else values.tolist()
        draws = episodes.draw.tolist()
        for step in range(episodes.reward.shape[1]):
            for i, (env, row) in enumerate(zip(envs, reports, strict=True)):
                if step >= len(row):
                    continue
                chosen = () if probabilities is None else probabilities[i][step]
                at = i if detailed is None else detailed.get(i)
                self._decision(
                    env,
                    row[step],
                    chosen,
                    None if expected is None else expected[i][step],
                    None if at is None else _details(row[step], table, at, step),
                )
                self._events(env, row[step])
                if with_episodes and step == len(row) - 1:
                    self._episode(env, draws[i], row)

    def _decision(
        self,
        env: int,
        info: StepInfo,
        probabilities: Sequence[float],
        value: float | None,
        details: StepDetails | None,
    ) -> None:
        effect = info.record.effect
        action = effect.action
        chosen = dict(zip(HEAD_NAMES, probabilities, strict=False))
        self.recorder.decision(
            Decision(
                update=self.update,
                env=env,
                epoch=info.record.epoch,
                op=action.op.name,
                slot=None if action.slot is None else info.slots[action.slot],
                blueprint=action.blueprint,
                blend=action.blend,
                probabilities={head: p for head, p in chosen.items() if head in HEADS_USED[action.op]},
                value=value,
                changed=effect.changed,
                message=effect.message,
                reward=info.reward.total,
                rewards=info.reward.terms,
                arm=self.arm,
                accuracy=info.record.measured.accuracy,
                parameters=info.parameters,
                details=details,
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


def _details(info: StepInfo, table: PolicyTable | None, row: int, step: int) -> StepDetails:
    action = info.record.effect.action
    return details_of(info, {} if table is None else table.choices(row, step, action, info.slots))


def _mean_terms(reports: Sequence[Sequence[StepInfo]]) -> dict[str, float]:
    """As metrics of an update, curves over thousands of updates are read at once."""
    terms = Counter[str]()
    for row in reports:
        for info in row:
            terms.update(info.reward.terms)
    return {term: total / len(reports) for term, total in terms.items()}

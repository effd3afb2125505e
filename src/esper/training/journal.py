"""What happened in one rollout goes to the recorder, and a summary to the person who watches.

Of a rollout of at most `BULK` episodes every step is recorded; of a larger one what `training/bulk.py` makes of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from esper.actions import BLENDS, HEAD_NAMES, HEADS_USED, Op
from esper.env.reward.config import TERMS
from esper.env.reward.reward import shaping_share
from esper.env.steps import StepInfo
from esper.growth.blueprints import blueprint_names
from esper.lifecycle import Contrast, Stage
from esper.policy.distribution import FactoredPolicy
from esper.rollout.episodes import Episodes
from esper.rollout.render import reports_of
from esper.telemetry.recorder import RunRecorder
from esper.telemetry.records import TRAIN, Decision, Event, SlotState, StepDetails
from esper.training.bulk import BULK, counts, episode_columns, sample, verdicts

Explain = Callable[[Episodes], FactoredPolicy]
"""The distributions of the policy that played some episodes: `PPOAgent.policy_of`."""
Choices = Mapping[str, Mapping[str, float | None]]

DETAILED = 16
"""Episodes of a rollout whose slots and choices are recorded, too: about 200 bytes a step."""


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
        facts = episodes.facts
        assert facts is not None
        steps = facts.steps
        slots = torch.tensor([len(paths) for paths in facts.paths], device=facts.host.device)[facts.host]  # [N]
        ended_in = facts.at_the_end(steps.epoch.stage)  # [N, S]
        return cls(
            draws=tuple(episodes.draw.tolist()),
            returns=facts.rewards().sum(1).tolist(),
            shaping_share=shaping_share(steps.reward.terms[facts.played]).mean().item(),
            scores=facts.at_the_end(steps.reward.score).nan_to_num(0.0).tolist(),
            accuracies=facts.at_the_end(steps.epoch.accuracy).tolist(),
            growth=(facts.at_the_end(steps.parameters) / facts.host_parameters).tolist(),
            steps=episodes.steps,
            lifecycle=Counter(dict(zip(Stage, facts.entered().tolist(), strict=True))),
            governed=int((facts.at_the_end(steps.epoch.fault) >= 0).sum()),
            stages=tuple(Counter(map(Stage, ended_in[slots > i, i].tolist())) for i in range(ended_in.shape[1])),
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


class Journal:
    """Writes rollouts of one update to the recorder."""

    def __init__(self, recorder: RunRecorder, update: int, arm: str = TRAIN, explain: Explain | None = None) -> None:
        """`explain` gives the distributions that decisions were drawn from; None where rules decide."""
        self.recorder, self.update, self.arm, self.explain = recorder, update, arm, explain

    def note(self, episodes: Episodes, values: Tensor | None = None) -> RolloutSummary:
        """Record the episodes; `values` [N, T] in reward units."""
        facts, in_bulk = episodes.facts, len(episodes) > BULK
        assert facts is not None  # as every environment of growing networks gives them
        rows = sample(episodes.draw) if in_bulk else torch.arange(len(episodes), device=episodes.draw.device)
        chosen = episodes.select(rows)
        reports, expected = reports_of(chosen), None if values is None else values[rows.to(values.device)]
        self._steps(chosen, reports, rows.tolist(), expected)
        if in_bulk:
            governor = verdicts(facts)
        else:  # in the governor's own words
            last = [row[-1].record.verdict for row in reports]
            governor = [None if verdict is None else verdict.message for verdict in last]
        self.recorder.episodes(episode_columns(episodes, facts, governor, self.update, self.arm))
        if in_bulk:
            found = counts(episodes, facts) | {"sampled_episodes": float(len(rows))}
            prefix = "" if self.arm == TRAIN else f"{self.arm}/"
            self.recorder.metrics(self.update, {prefix + name: value for name, value in found.items()})
        return RolloutSummary.of(episodes)

    def _steps(
        self,
        episodes: Episodes,
        reports: Sequence[Sequence[StepInfo]],
        envs: Sequence[int],
        values: Tensor | None,
    ) -> None:
        """Every step of the episodes, the first steps first; `envs` are their numbers in the rollout."""
        detailed = sample(episodes.draw, DETAILED)
        table = None if self.explain is None else PolicyTable(self.explain(episodes.select(detailed)))
        row_of_table = {row: i for i, row in enumerate(detailed.tolist())}
        probabilities = None if episodes.log_prob is None else episodes.log_prob.exp().tolist()
        expected = None if values is None else values.tolist()
        for step in range(episodes.reward.shape[1]):
            for i, (env, row) in enumerate(zip(envs, reports, strict=True)):
                if step >= len(row):
                    continue
                details = None
                if (at := row_of_table.get(i)) is not None:
                    details = details_of(row[step], {} if table is None else table.choices(at, step, row[step]))
                self._decision(
                    env,
                    row[step],
                    () if probabilities is None else probabilities[i][step],
                    None if expected is None else expected[i][step],
                    details,
                )
                self._events(env, row[step])

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


# -- what a policy could have chosen: for people who ask why a decision was made ---------------------------------------


class PolicyTable:
    """Probabilities of episodes whose steps were played through the policy once more, as lists: one transfer from a
    GPU."""

    def __init__(self, policy: FactoredPolicy) -> None:
        heads = ("op", "slot", "blueprint", "blend")
        self._p: dict[str, Any] = {head: getattr(policy, head).exp().tolist() for head in heads}
        self._legal: dict[str, Any] = {head: getattr(policy.masks, head).tolist() for head in heads}

    def choices(self, row: int, step: int, info: StepInfo) -> Choices:
        """Of one step, along the decision: slots for its operation, blueprints and blends for its slot."""
        action = info.record.effect.action
        names = {"op": [op.name for op in Op], "slot": info.slots, "blueprint": blueprint_names(), "blend": BLENDS}
        along = {"op": (), "slot": (int(action.op),), "blueprint": (action.slot or 0,), "blend": (action.slot or 0,)}
        found: dict[str, Mapping[str, float | None]] = {}
        for head in names:
            if head in HEADS_USED[action.op]:
                p, legal = self._p[head][row][step], self._legal[head][row][step]
                for index in along[head]:
                    p, legal = p[index], legal[index]
                # There may be padding after the names.
                found[head] = {name: p[i] if legal[i] else None for i, name in enumerate(names[head])}
        return found


def details_of(info: StepInfo, choices: Choices) -> StepDetails:
    """What a step showed of each slot, with what could have been chosen."""
    record, measured = info.record, info.record.measured
    slots = []
    for i, (path, stage, alpha) in enumerate(zip(info.slots, record.stages, record.alphas, strict=True)):
        worth = (*_points(measured.contributions.get(i)), *_points(measured.shadow_benefits.get(i)))
        slots.append(SlotState(path, stage.name, alpha, *worth))
    return StepDetails(slots, choices)


def _points(contrast: Contrast | None) -> tuple[float | None, float | None]:
    return (None, None) if contrast is None else (contrast.accuracy, contrast.error)

"""Columns of what happened, as the reports that people and the store read: for chosen episodes, on request.

The reports are those that a per-network engine gives of the same episode, reasons of gates included. What no column
holds is shorter or missing: the reasons of a rule-based controller are empty, a verdict of the governor names the
fault, the loss and its limit, a refused action names the stage of its slot; shadow losses and the optimizer's settings
of a seed are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from esper.actions import Effect, Op
from esper.engine.eager import EpochRecord
from esper.engine.governor import FAULTS, Fault, Verdict
from esper.engine.learner import TrainReport
from esper.engine.measure import Evaluation
from esper.env.observation import decode_one
from esper.env.reward.config import TERMS
from esper.env.reward.suspicion import SUSPICION_KINDS, Suspicion
from esper.env.steps import RewardStep, StepInfo
from esper.lifecycle import ENTERED_BY_ITSELF, GATES, LIVE, Contrast, Stage, Transition
from esper.rollout.episodes import Episodes, map_tensors, named_tensors
from esper.rollout.facts import Facts
from esper.slot_columns import RULE_NAMES

Reports = tuple[tuple[StepInfo, ...], ...]


def reports_of(episodes: Episodes) -> Reports:
    """What happened in every episode, step by step."""
    if episodes.reports or episodes.facts is None:
        return episodes.reports
    return render(episodes.facts)


def render(facts: Facts, rows: Tensor | None = None) -> Reports:
    """Of all episodes, or of those in `rows`."""
    if rows is not None:
        facts = map_tensors(facts, lambda tensor: tensor[rows])
    steps = {name: tensor.tolist() for name, tensor in named_tensors(facts.steps).items()}
    networks = zip(facts.host.tolist(), facts.host_parameters.tolist(), facts.rules.tolist(), strict=True)
    rendered = []
    for row, (host, size, rules) in enumerate(networks):
        own = {name: column[row] for name, column in steps.items()}
        limits = dict(zip(RULE_NAMES, rules, strict=True))
        rendered.append(_EpisodeRenderer(own, facts.paths[host], int(size), limits).reports())
    return tuple(rendered)


class _EpisodeRenderer:
    """Follows the seeds of one network from step to step: columns say where they are, not which ones they are."""

    def __init__(
        self, columns: dict[str, Any], paths: tuple[str, ...], host_parameters: int, rules: dict[str, float]
    ) -> None:
        """`columns` [T, …] by name, as lists."""
        self._columns, self._paths, self._host_parameters, self._rules = columns, paths, host_parameters, rules
        self._stages = [Stage.DORMANT] * len(paths)
        self._born = 0
        self._seeds = [0] * len(paths)
        self._blueprints: list[str | None] = [None] * len(paths)
        self._shown: list[dict[str, float]] = [{} for _ in paths]
        """By slot: what a gate looks at, as last measured."""

    def reports(self) -> tuple[StepInfo, ...]:
        return tuple(self._report(t) for t in range(sum(self._columns["epoch.played"])))

    def _report(self, t: int) -> StepInfo:
        at = {name: column[t] for name, column in self._columns.items()}
        effect = self._effect(t, at)
        changes = list(effect.transitions)
        for slot, stage in enumerate(self._stages):
            if stage is Stage.GERMINATED:
                changes.append(self._change(t, slot, Stage.TRAINING, ENTERED_BY_ITSELF[Stage.TRAINING]))
        trained = tuple(self._stages)
        verdict = _verdict(at)
        if verdict is not None:
            unfinished = [slot for slot, stage in enumerate(trained) if stage in LIVE]
            changes += [self._change(t, s, Stage.PRUNED, f"governor: {verdict.message}") for s in unfinished]
        self._measure(at, trained)
        for slot in range(len(self._paths)):
            target = Stage(at["stage"][slot])
            if target is not self._stages[slot]:
                changes.append(self._change(t, slot, target, self._reason(slot, target)))
        slots = range(len(self._paths))
        record = EpochRecord(
            epoch=t,
            effect=effect,
            trained=TrainReport(
                at["epoch.train_loss"],
                at["epoch.host_gradient"],
                _known(at["epoch.seed_gradient"], slots),
                shadow_losses={},
                finite=verdict is None or verdict.kind is not Fault.NON_FINITE,
            ),
            measured=Evaluation(
                at["epoch.loss"],
                at["epoch.accuracy"],
                _contrasts(at["epoch.contribution"], slots),
                _contrasts(at["epoch.shadow"], slots),
            ),
            transitions=tuple(changes),
            parameters=int(at["epoch.parameters"]),
            stages=trained,
            alphas=tuple(at["epoch.alpha"][: len(slots)]),
            verdict=verdict,
        )
        reward = RewardStep(dict(zip(TERMS, at["reward.terms"], strict=True)), self._suspicions(t, at), _score(at))
        return StepInfo(record, reward, self._paths, int(at["parameters"]), self._host_parameters)

    def _effect(self, t: int, at: dict[str, Any]) -> Effect:
        """What the action did: its own stage change is the difference between the end of the last epoch and this one's
        training."""
        slot = at["epoch.slot"]
        action = decode_one((slot, at["epoch.blueprint"], at["epoch.blend"], at["epoch.op"]))
        if action.op is Op.WAIT:
            return Effect(action, False, "wait")
        if not at["epoch.changed"]:
            return Effect(action, False, f"no effect: slot {self._paths[slot]} is {self._stages[slot].name}")
        target = Stage.GERMINATED if action.op is Op.GERMINATE else Stage(at["epoch.stage"][slot])
        if action.op is Op.GERMINATE:
            self._born += 1
            self._seeds[slot], self._blueprints[slot], self._shown[slot] = self._born, action.blueprint, {}
        if target is self._stages[slot]:  # a blending seed that is to go: its ramp turns round
            return Effect(action, True, "")
        reason = "ramping out: " if self._stages[slot] is Stage.HOLDING and target is Stage.BLENDING else ""
        return Effect(action, True, "", (self._change(t, slot, target, reason),))

    def _change(self, t: int, slot: int, target: Stage, reason: str) -> Transition:
        source, self._stages[slot] = self._stages[slot], target
        return Transition(t, self._paths[slot], self._seeds[slot], source, target, reason)

    def _measure(self, at: dict[str, Any], trained: Sequence[Stage]) -> None:
        for slot, stage in enumerate(trained):
            shown = self._shown[slot]
            new = {"gradient": at["epoch.seed_gradient"][slot], "shadow_points": at["epoch.shadow"][slot][0]}
            shown |= {name: value for name, value in new.items() if not math.isnan(value)}
            shown["alpha"] = at["epoch.alpha"][slot]
            if stage is Stage.TRAINING:
                shown["dwell"] = shown.get("dwell", 0.0) + 1.0

    def _reason(self, slot: int, target: Stage) -> str:
        """Of a change that happens by itself at the end of an epoch."""
        if target is Stage.PRUNED:  # the end of a ramp; who decided on it gave no reason
            return ""
        if target in ENTERED_BY_ITSELF:
            return ENTERED_BY_ITSELF[target]
        said = []
        for criterion in GATES[target]:
            limit = self._rules[criterion.limit] if isinstance(criterion.limit, str) else criterion.limit
            said.append(criterion.describe(self._shown[slot].get(criterion.column, math.nan), limit))
        return ", ".join(said)

    def _suspicions(self, t: int, at: dict[str, Any]) -> tuple[Suspicion, ...]:
        return tuple(
            Suspicion(
                SUSPICION_KINDS[kind],
                t,
                slot,
                self._paths[slot],
                self._seeds[slot],
                self._blueprints[slot],
                at["reward.contribution"][slot],
                at["reward.improvement"][slot],
            )
            for slot in range(len(self._paths))
            for kind, begun in enumerate(at["reward.suspicions"][slot])
            if begun
        )


def _verdict(at: dict[str, Any]) -> Verdict | None:
    if at["epoch.fault"] < 0:
        return None
    fault, seen, limit = FAULTS[at["epoch.fault"]], at["epoch.fault_seen"], at["epoch.fault_limit"]
    return Verdict(fault, seen, limit, fault_message(fault, seen, limit))


def fault_message(fault: Fault, seen: float, limit: float) -> str:
    """What the governor saw, as far as columns say: not the level that the loss had before."""
    if fault is Fault.NON_FINITE:
        if math.isfinite(seen):
            return "a weight or a running statistic is no longer finite"
        return f"the training or the validation loss became {seen}"
    what = "the network forgot what it had learnt" if fault is Fault.RETURN_TO_CHANCE else "the loss diverged"
    return f"{what}: validation loss {seen:.3g} (limit {limit:.3g})"


def _score(at: dict[str, Any]) -> float | None:
    return None if math.isnan(at["reward.score"]) else float(at["reward.score"])


def _known(values: Sequence[float], slots: Sequence[int]) -> dict[int, float]:
    return {slot: values[slot] for slot in slots if not math.isnan(values[slot])}


def _contrasts(values: Sequence[Sequence[float]], slots: Sequence[int]) -> dict[int, Contrast]:
    return {slot: Contrast(*values[slot]) for slot in slots if not math.isnan(values[slot][2])}

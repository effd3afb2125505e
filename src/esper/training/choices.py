"""What a policy could have chosen in a step, with the probabilities: for people who ask why a decision was made.

Only of the episodes that are recorded in detail: their steps are played through the policy once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from esper.actions import BLENDS, HEADS_USED, Op
from esper.env.steps import StepInfo
from esper.growth.blueprints import blueprint_names
from esper.lifecycle import Contrast
from esper.policy.distribution import FactoredPolicy
from esper.rollout.episodes import Episodes
from esper.telemetry.records import SlotState, StepDetails

Explain = Callable[[Episodes], FactoredPolicy]
"""The distributions of the policy that played some episodes: `PPOAgent.policy_of`."""
Choices = Mapping[str, Mapping[str, float | None]]


class PolicyTable:
    """Probabilities of the episodes that were explained, as lists: one transfer from a GPU."""

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
                found[head] = dict(_named(names[head], p, legal))
        return found


def _named(names: Sequence[str], p: Sequence[float], legal: Sequence[bool]) -> list[tuple[str, float | None]]:
    return [(name, p[i] if legal[i] else None) for i, name in enumerate(names)]  # there may be padding after the names


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

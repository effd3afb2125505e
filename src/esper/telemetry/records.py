"""What can be recorded: episodes, a decision, an event. Plain records, without any idea of where they go."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

from esper.lifecycle import Transition

TRAIN = "train"
"""The arm of the rollouts that the agent learns from; other arms are evaluations, named by who played."""

Severity = Literal["info", "warning", "error"]


class Level(IntEnum):
    """How much is recorded."""

    NORMAL = 1
    """Metrics, events, episodes with their reward by term, and every decision."""
    DETAILED = 2
    """Also the reward of every step by term, and whatever its caller measures at this level."""


@dataclass(frozen=True, slots=True)
class EpisodeColumns:
    """Finished episodes of one rollout, in the order of its environments, which are counted from 0."""

    update: int
    """The update whose rollout they were part of, counted from 1; for an evaluation, the last update before it."""
    draw: Sequence[int]
    """Number of the problem in its family."""
    episode_return: Sequence[float]
    """Sum of its rewards, not discounted."""
    score: Sequence[float]
    """Accuracy minus rent, in points: what controllers are judged by."""
    accuracy: Sequence[float]
    """Of what is kept, in percent."""
    parameters: Sequence[int]
    host_parameters: Sequence[int]
    length: Sequence[int]
    """Epochs that it lasted."""
    governor: Sequence[str | None]
    """Why the governor ended it, if it did."""
    terms: Sequence[str] = ()
    """Of the reward."""
    rewards: Sequence[Sequence[float]] = ()
    """[N][terms] summed over the episode."""
    arm: str = TRAIN

    def __len__(self) -> int:
        return len(self.draw)


@dataclass(frozen=True, slots=True)
class SlotState:
    """One slot while an epoch was trained; None is what was not measured."""

    path: str
    stage: str
    alpha: float
    contribution: float | None = None
    """Points of accuracy with the seed over without it."""
    contribution_error: float | None = None
    shadow: float | None = None
    """The same for a seed that does not act yet, by its shadow pass."""
    shadow_error: float | None = None


@dataclass(frozen=True, slots=True)
class StepDetails:
    """What a person wants to see of a step, and what is recorded of some episodes only."""

    slots: Sequence[SlotState]
    choices: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    """By head: the probability of every choice, None for illegal ones; heads that were not used are left out."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision of one environment, and what it really did."""

    update: int
    env: int
    epoch: int
    op: str
    slot: str | None
    """Path of the slot, as in events."""
    blueprint: str | None
    blend: str | None
    probabilities: Mapping[str, float]
    """Of what each head chose, by head; a head that the operation does not use is left out."""
    value: float | None
    """What the critic expected, in reward units; None where there is no critic."""
    changed: bool
    message: str
    reward: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    """By term. Kept at the detailed level only: an episode keeps their sums."""
    arm: str = TRAIN
    accuracy: float | None = None
    """Of the validation set at the end of the epoch, in percent."""
    parameters: int | None = None
    """Of the network as it acts then."""
    details: StepDetails | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened once: a transition, a verdict of the governor, an anomaly, a suspicion."""

    kind: str
    """lifecycle, governor, anomaly, reward_hacking, ransomware, telemetry, checkpoint, compile, …"""
    update: int
    message: str
    severity: Severity = "info"
    env: int | None = None
    epoch: int | None = None
    slot: str | None = None
    seed: int | None = None
    data: Mapping[str, object] = field(default_factory=dict)
    """Details, as JSON."""
    arm: str = TRAIN
    time: float = field(default_factory=time.time, compare=False)

    @staticmethod
    def of_transition(transition: Transition, *, update: int, env: int, arm: str = TRAIN) -> Event:
        return Event(
            kind="lifecycle",
            update=update,
            message=transition.reason,
            env=env,
            epoch=transition.epoch,
            slot=transition.slot,
            seed=transition.seed,
            data={"source": transition.source.name, "target": transition.target.name},
            arm=arm,
        )


def to_json(data: object) -> str:
    """Valid JSON: what is not a number becomes its name, because JSON (and SQLite's reader of it) has no NaN."""
    try:
        return json.dumps(data, allow_nan=False)
    except ValueError:
        return json.dumps(_named(data))


def _named(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _named(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_named(entry) for entry in value]
    return value

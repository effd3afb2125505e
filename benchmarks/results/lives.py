"""What a controller did, decision by decision and seed by seed: the raw material of docs/behaviour.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from esper.actions import Action, Op
from esper.engine.eager import EpochRecord
from esper.env.growth_env import GrowthEnv
from esper.env.situation import Situation, SlotView
from esper.lifecycle import IN_FORWARD, LIVE, Contrast, Stage
from esper.tasks.family import get_family
from esper.training.catalogue import make_controller

KEPT, PRUNED, UNDECIDED = "kept", "pruned", "never decided on"


@dataclass(slots=True)
class Life:
    """One seed."""

    slot: int
    blueprint: str
    born: int
    incubated: int = 0
    """Epochs; so are the two below, up to the decision about the seed."""
    blended: int = 0
    held: int = 0
    shadow: float | None = None
    """The last shadow benefit that was measured, in points of accuracy."""
    contribution: float | None = None
    """The last contribution that was measured."""
    fate: str = UNDECIDED
    ended: int | None = None
    ended_in: Stage | None = None
    """The stage in which it was decided on."""

    @property
    def place(self) -> str:
        return f"{self.blueprint}@{self.slot}"

    @property
    def acts(self) -> bool:
        """In the final network."""
        return self.fate == KEPT or (self.fate == UNDECIDED and self.ended_in in IN_FORWARD)


@dataclass(frozen=True, slots=True)
class Decision:
    """One act of the controller other than waiting, with what it could see."""

    epoch: int
    op: str
    what: str
    seen: str


@dataclass(slots=True)
class Episode:
    """One training under one controller."""

    number: int
    kind: str
    answer: str
    horizon: int
    slots: int
    budget: int | None
    most_seeds: int | None
    host_parameters: int
    test_accuracy: float = 0.0
    size: float = 1.0
    curve: list[float] = field(default_factory=list)
    """Validation accuracy at the end of each epoch."""
    stages: list[tuple[Stage, ...]] = field(default_factory=list)
    """By epoch, then by slot."""
    decisions: list[Decision] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    stopped: str | None = None
    """Why the governor ended it, if it did."""

    @property
    def kept(self) -> list[str]:
        """Seeds that act in the final network, made permanent or never decided on."""
        acting = [
            life for life in self.lives if life.fate == KEPT or (life.ended is None and life.ended_in in IN_FORWARD)
        ]
        return sorted(life.place for life in acting)

    @property
    def meant(self) -> list[str]:
        return [] if self.answer == "none" else sorted(self.answer.split("+"))


@dataclass(frozen=True, slots=True)
class Play:
    """Some held-out draws for one worker."""

    controller: str
    numbers: tuple[int, ...]
    family: str = "mixed"


def play(job: Play) -> list[Episode]:
    """Play the draws to their ends. A result depends on its draw and its controller alone."""
    torch.set_num_threads(1)
    env = GrowthEnv(get_family(job.family), len(job.draws), held_out=True)
    controller = make_controller(job.controller)
    env.reset(job.draws)
    controller.reset(job.draws)
    rows = zip(job.draws, env.draws, env.situations, strict=True)
    episodes = [
        Episode(
            number=number,
            kind=str(draw.facts["kind"]),
            answer=str(draw.facts["answer"]),
            horizon=draw.horizon,
            slots=len(situation.slots),
            budget=draw.budget,
            most_seeds=draw.max_seeds,
            host_parameters=situation.host_parameters,
        )
        for number, draw, situation in rows
    ]
    while not env.over:
        before = env.situations
        actions = controller.decide(before)
        for episode, situation, action, info in zip(episodes, before, actions, env.step(actions).infos, strict=True):
            if info is not None:
                note(episode, situation, action, info.record)
    for episode, test, learner in zip(episodes, env.evaluate_test(), env.learners, strict=True):
        episode.test_accuracy = test.accuracy
        episode.size = learner.model.acting_parameters / learner.model.host_parameters
        close(episode, [slot.life.stage for slot in learner.model.slots])
    return episodes


def note(episode: Episode, situation: Situation, action: Action, record: EpochRecord) -> None:
    """One epoch: the decision before it, and what it made of the seeds."""
    if action.op is not Op.WAIT and record.effect.changed:
        assert action.slot is not None
        slot = situation.slots[action.slot]
        what = f"{action.blueprint or slot.blueprint}@{slot.index}"
        episode.decisions.append(
            Decision(record.epoch, action.op.name.lower(), what, _seen(action.op, situation, slot))
        )
        _decide(episode, action, slot, record.epoch)
    episode.curve.append(record.measured.accuracy)
    episode.stages.append(record.stages)
    if record.verdict is not None:
        episode.stopped = record.verdict.message
    for life in _alive(episode):
        _age(life, record)


def _decide(episode: Episode, action: Action, slot: SlotView, epoch: int) -> None:
    if action.op is Op.GERMINATE:
        episode.lives.append(Life(slot.index, str(action.blueprint), epoch))
        return
    life = next(life for life in _alive(episode) if life.slot == slot.index)
    life.fate, life.ended, life.ended_in = KEPT if action.op is Op.FOSSILIZE else PRUNED, epoch, slot.stage


def _alive(episode: Episode) -> list[Life]:
    return [life for life in episode.lives if life.ended is None]


def _age(life: Life, record: EpochRecord) -> None:
    stage = record.stages[life.slot]
    life.incubated += stage is Stage.TRAINING
    life.blended += stage is Stage.BLENDING
    life.held += stage is Stage.HOLDING
    if life.slot in record.measured.shadow_benefits:
        life.shadow = record.measured.shadow_benefits[life.slot].accuracy
    if life.slot in record.measured.contributions:
        life.contribution = record.measured.contributions[life.slot].accuracy


def close(episode: Episode, stages: Sequence[Stage]) -> None:
    """In which stage the end met the seeds that were never decided on."""
    for life in _alive(episode):
        if stages[life.slot] in LIVE:
            life.ended_in = stages[life.slot]


# -- in words ----------------------------------------------------------------------------------------------------------


def _seen(op: Op, situation: Situation, slot: SlotView) -> str:
    """The measurements that bear on the decision."""
    curve = [record.measured.accuracy for record in situation.history]
    if op is Op.GERMINATE:
        if not curve:
            return f"nothing is measured yet, {situation.remaining} epochs remain"
        rise = f", {curve[-1] - curve[-3]:+.1f} points over the last two epochs" if len(curve) > 2 else ""
        return f"validation accuracy {curve[-1]:.1f} %{rise}; {situation.remaining} epochs remain"
    if slot.stage is Stage.TRAINING:
        return f"after {slot.dwell} epochs of incubation its shadow promises {_points(slot.shadow_benefit)}"
    return f"it contributes {_points(slot.contribution)} after {slot.dwell} epochs of {slot.stage.name.lower()}"


def _points(contrast: Contrast | None) -> str:
    return "nothing measured" if contrast is None else f"{contrast.accuracy:+.1f} ± {contrast.error:.1f} points"

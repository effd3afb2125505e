"""LearnerEnv: networks that train side by side, as one vectorised decision process.

One step is one epoch of every network: a fixed number of updates, whatever N is. What one network measures and earns
depends on nothing outside of it, so N and the neighbours change no number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.actions import WAIT, Action
from esper.engine.eager import EagerEngine, EpochRecord
from esper.engine.governor import Governor
from esper.engine.learner import Learner
from esper.env.epoch_records import epoch_columns
from esper.env.observation import decode
from esper.env.reward.config import TERMS, RewardConfig
from esper.env.reward.reward import Reward, RewardColumns
from esper.env.reward.suspicion import Suspicion, suspicions
from esper.env.situation import Situations
from esper.env.spaces import ActionMasks, Observation
from esper.env.step_facts import StepFacts
from esper.env.world import World
from esper.growth.blueprints import blueprint_names
from esper.telemetry.profiler import PhaseTimers


@dataclass(frozen=True, slots=True)
class StepInfo:
    """One environment's step, for people and logs."""

    record: EpochRecord
    reward: RewardStep
    slots: tuple[str, ...]
    """Paths, by index."""
    parameters: int
    """Of the network as it acts now: the host and the seeds that take part in its output."""
    host_parameters: int


@dataclass(frozen=True, slots=True)
class RewardStep:
    """The reward of one step of one environment, for people."""

    terms: dict[str, float]
    """By name, scaled: `TERMS`."""
    events: tuple[Suspicion, ...]
    score: float | None
    """At the end: the true score on validation, neither clamped nor scaled."""

    @property
    def total(self) -> float:
        return sum(self.terms.values())


@dataclass(frozen=True, slots=True)
class EnvStep:
    """What a step gave. `acted` is False for environments whose episode was over before it: ignore their rows."""

    observation: Observation
    masks: ActionMasks
    reward: Tensor  # [N] float32
    terminated: Tensor  # [N] bool: this step ended the episode
    acted: Tensor  # [N] bool
    infos: tuple[StepInfo | None, ...] = ()
    """For people, of engines that have records of each network."""
    facts: StepFacts | None = None
    """The same as columns."""


class LearnerEnv:
    """Episodes of the learners that `start` is given, from their first epoch to their horizons."""

    def __init__(
        self,
        *,
        reward: RewardConfig | None = None,
        slots: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.reward = reward or RewardConfig()
        self.slots = slots
        """Slots that observations are padded to; None is the most that any network of the batch has."""
        self.device = torch.device(device)
        self._phase = PhaseTimers()
        self.seconds = self._phase.seconds
        """Wall time by phase, since construction."""
        self.learners: list[Learner] = []
        self.histories: list[list[EpochRecord]] = []
        """What happened, by network and epoch."""
        self._engine: EagerEngine | None = None

    def start(
        self, engine: EagerEngine, horizons: Sequence[int], classes: Sequence[int], rent: float | Tensor
    ) -> tuple[Observation, ActionMasks]:
        """Begin episodes of the learners of an engine.

        `classes` [N] are for a reward that looks at losses; `rent` is the price of size, one for all or [N].
        """
        self.learners = engine.learners
        most = engine.columns.present.shape[1]
        if most > (self.slots or most):
            raise ValueError(f"a network has {most} slots, and observations have room for {self.slots}: raise `slots`")
        untrained = engine.measure(engine.learners)  # what chance looks like
        pairs = zip(engine.learners, untrained, strict=True)
        engine.governors = [Governor(learner, chance=chance) for learner, chance in pairs]
        self._engine = engine
        models = [learner.model for learner in engine.learners]
        self.world = World.of_models(models, engine.columns, horizons, rent)
        self._reward = Reward(self.reward, self.world, classes)
        self.histories = [[] for _ in engine.learners]
        return self._shown()

    def step(self, actions: Tensor | Sequence[Action]) -> EnvStep:
        """One epoch for every network whose episode goes on, after its action: a tensor [N, heads] or records."""
        if self._engine is None:
            raise RuntimeError("call reset before step")
        chosen = decode(actions) if isinstance(actions, Tensor) else list(actions)
        before, active = self.world.snapshot(), ~self.world.over
        wanted = active.tolist()
        engine, self._engine = self._engine, None  # if it fails, some have made the step: only a reset can follow
        with self._phase("engine"):
            records = engine.step([a if on else WAIT for a, on in zip(chosen, wanted, strict=True)], wanted)
        self._engine = engine
        with self._phase("reward"):
            epoch = epoch_columns(records, self.world.slots)
            self.world.record(epoch)
            ended = epoch.played & ((self.world.epoch >= self.world.horizon) | epoch.undone)
            rewards = self._reward.step(before, self.world, epoch, ended)
            self.world.end(ended)
            infos = self._infos(records, rewards)
        for history, record in zip(self.histories, records, strict=True):
            if record is not None:
                history.append(record)
        observation, masks = self._shown()
        return EnvStep(
            observation,
            masks,
            rewards.total.float().to(self.device),
            ended.to(self.device),
            active.to(self.device),
            infos,
            StepFacts.of(epoch, rewards, self.world),
        )

    @property
    def situations(self) -> Situations:
        """What a controller reads; valid until the next step."""
        return self._situations

    @property
    def over(self) -> bool:
        return bool(self.world.over.all())

    # -- internals -----------------------------------------------------------------------------------------------------

    def _infos(self, records: Sequence[EpochRecord | None], rewards: RewardColumns) -> tuple[StepInfo | None, ...]:
        terms, scores, sizes = (t.tolist() for t in (rewards.terms, rewards.score, self.world.acting_parameters))
        suspected = rewards.suspicions.flatten(1).any(1).tolist()
        infos: list[StepInfo | None] = []
        for row, record in enumerate(records):
            if record is None:
                infos.append(None)
                continue
            model = self.learners[row].model
            begun = (rewards.suspicions[row], rewards.contribution[row], rewards.improvement[row])
            events = suspicions(*begun, record.epoch, model.lifecycle, blueprint_names()) if suspected[row] else ()
            score = None if math.isnan(scores[row]) else scores[row]
            reward = RewardStep(dict(zip(TERMS, terms[row], strict=True)), events, score)
            infos.append(StepInfo(record, reward, model.lifecycle.names, int(sizes[row]), model.host_parameters))
        return tuple(infos)

    def _shown(self) -> tuple[Observation, ActionMasks]:
        with self._phase("observe"):
            models = [learner.model for learner in self.learners]
            self._situations = Situations(self.world, models, self.histories)
            observation, masks = self._situations.tensors
            return observation.to(self.device), masks.to(self.device)

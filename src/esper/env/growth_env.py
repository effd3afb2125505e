"""GrowthEnv: N growing networks as one vectorised decision process.

One step is one epoch of every network: a fixed number of updates, whatever N is. An episode is one whole training of a
network; it *terminates* at its horizon, or when the governor ends it. What one environment draws, measures and earns
depends on nothing outside of it, so N and the neighbours change no number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from esper.actions import WAIT, Action
from esper.engine.eager import EagerEngine, EpochRecord
from esper.engine.gc_control import collect_garbage
from esper.engine.governor import Governor
from esper.engine.graphs import GraphCache, GraphEngine
from esper.engine.learner import Learner
from esper.engine.measure import Evaluation, Pending, evaluate, gather
from esper.engine.precision import Precision
from esper.engine.prepare import task_learner
from esper.env.observation import decode
from esper.env.reward.config import TERMS, RewardConfig
from esper.env.reward.reward import Measured, Reward, RewardColumns
from esper.env.reward.suspicion import Finding, findings
from esper.env.situation import Situations
from esper.env.spaces import ActionMasks, Observation
from esper.env.world import World
from esper.growth.blueprints import blueprint_names
from esper.growth.model import Survey
from esper.lifecycle import Contrast, Rules
from esper.slots import contrast_columns
from esper.tasks.family import Draw, Family
from esper.tasks.feed import chunks
from esper.tasks.registry import Task
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
    events: tuple[Finding, ...]
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
    terms: Tensor  # [N, terms] float32, in the order of `TERMS`
    terminated: Tensor  # [N] bool: this step ended the episode
    acted: Tensor  # [N] bool
    infos: tuple[StepInfo | None, ...]


class GrowthEnv:
    """A batch of episodes. `reset` draws problems by number, `step` advances all of them by one epoch."""

    def __init__(
        self,
        family: Family,
        size: int,
        *,
        reward: RewardConfig | None = None,
        rules: Rules | None = None,
        held_out: bool = False,
        slots: int | None = None,
        device: torch.device | str = "cpu",
        graphs: bool | None = None,
        precision: Precision = Precision.FP32,
        compiled: bool = False,
    ) -> None:
        """On a GPU epochs are CUDA graphs (`graphs`), and "cuda" without a number spreads networks over all GPUs.

        `compiled` compiles hosts by regions, and seeds: worth it for large hosts in long runs.
        """
        if size < 1:
            raise ValueError(f"an environment needs at least one network, not {size}")
        self.family = family
        self.size = size
        self.reward = reward or RewardConfig()
        self.rules = rules or Rules()
        self.held_out = held_out
        self.slots = slots
        """Slots that observations are padded to; None is the most that any network of the batch has."""
        self.device = torch.device(device)
        self.precision, self.compiled = precision, compiled
        self._devices = _spread(self.device)
        on_gpu = self.device.type == "cuda"
        self._cache = GraphCache() if (on_gpu if graphs is None else graphs) else None
        self._phase = PhaseTimers()
        self.seconds = self._phase.seconds
        """Wall time by phase, since construction."""
        self.draws: list[Draw] = []
        self.learners: list[Learner] = []
        self._histories: list[list[EpochRecord]] = []
        self._engine: EagerEngine | None = None

    # -- the process ---------------------------------------------------------------------------------------------------

    def reset(self, draws: Sequence[int], *, held_out: bool | None = None) -> tuple[Observation, ActionMasks]:
        """Begin new episodes, one per draw id; the same id is the same problem, data, host and minibatches."""
        self.held_out = self.held_out if held_out is None else held_out
        if len(draws) != self.size:
            raise ValueError(f"this environment has {self.size} networks; reset was given {len(draws)} draw ids")
        with self._phase("reset"):
            if self._cache is not None:
                self._cache.release()
            self.draws, self.learners, self._engine = [], [], None  # old and new networks never share the memory
            if self._cache is not None or self.device.type == "cuda":
                collect_garbage()  # here nothing waits for it; in the middle of a step, a GPU would
            seen: dict[Task, Survey] = {}
            for row, draw_id in enumerate(draws):
                self._begin(draw_id, self._devices[row % len(self._devices)], seen)
            most = max(len(learner.model.slots) for learner in self.learners)
            if most > (self.slots or most):
                raise ValueError(
                    f"a network has {most} slots, and observations have room for {self.slots}: raise `slots`"
                )
            self._engine = self._make_engine()
            models, horizons = [learner.model for learner in self.learners], [draw.horizon for draw in self.draws]
            self.world = World.begin(models, self._engine.columns, horizons)
            self._reward = Reward(self.reward, self.world, [len(draw.task.labels) for draw in self.draws])
            self._histories = [[] for _ in draws]
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
            self.world.record(records)
            ended = self._ended(records)
            rewards = self._reward.step(before, self.world, measured(self.world, records), active, ended)
            self.world.over |= ended
            infos = self._infos(records, rewards)
        for history, record in zip(self._histories, records, strict=True):
            if record is not None:
                history.append(record)
        observation, masks = self._shown()
        return EnvStep(
            observation,
            masks,
            rewards.total.float().to(self.device),
            rewards.terms.float().to(self.device),
            ended.to(self.device),
            active.to(self.device),
            infos,
        )

    @property
    def situations(self) -> Situations:
        """What a controller reads; valid until the next step."""
        return self._situations

    @property
    def over(self) -> bool:
        return bool(self.world.over.all())

    @property
    def captures(self) -> int:
        """CUDA graphs of whole epochs that were captured so far; all others were found in the cache."""
        return 0 if self._cache is None else self._cache.captures

    def evaluate_test(self) -> list[Evaluation]:
        """The networks on their test sets. For judging only: nothing that learns may look at it."""
        return gather([_on_test(learner, draw) for learner, draw in zip(self.learners, self.draws, strict=True)])

    # -- internals -----------------------------------------------------------------------------------------------------

    def _make_engine(self) -> EagerEngine:
        learners, unwatched = self.learners, [None] * len(self.learners)
        engine = (
            EagerEngine(learners, unwatched, width=self.slots)
            if self._cache is None
            else GraphEngine(learners, unwatched, width=self.slots, cache=self._cache)
        )
        untrained = engine.measure(learners)  # what chance looks like
        engine.governors = [Governor(learner, chance=c) for learner, c in zip(learners, untrained, strict=True)]
        return engine

    def _begin(self, draw_id: int, device: torch.device, seen: dict[Task, Survey]) -> None:
        """`seen`: what the other networks' hosts have shown, by task."""
        draw = self.family.draw(draw_id, held_out=self.held_out)
        drawn, task = draw.task, draw.task.to(device)
        learner = task_learner(
            task,
            draw.seed,
            draw.horizon,
            budget=draw.budget,
            max_seeds=draw.max_seeds,
            rules=self.rules,
            precision=self.precision,
            compiled=self.compiled,
            known=seen.get(drawn),
        )
        seen[drawn] = learner.model.survey
        self.draws.append(replace(draw, task=task))
        self.learners.append(learner)

    def _ended(self, records: Sequence[EpochRecord | None]) -> Tensor:
        """[N] bool: episodes that this epoch ended."""
        undone = [record is not None and record.verdict is not None for record in records]
        played = torch.tensor([record is not None for record in records])
        return played & (torch.tensor(undone) | (self.world.epoch >= self.world.horizon))

    def _infos(self, records: Sequence[EpochRecord | None], rewards: RewardColumns) -> tuple[StepInfo | None, ...]:
        terms, scores, sizes = (t.tolist() for t in (rewards.terms, rewards.score, self.world.acting_parameters))
        suspected = rewards.findings.flatten(1).any(1).tolist()
        infos: list[StepInfo | None] = []
        for row, record in enumerate(records):
            if record is None:
                infos.append(None)
                continue
            model = self.learners[row].model
            begun = (rewards.findings[row], rewards.contribution[row], rewards.improvement[row])
            events = findings(*begun, record.epoch, model.lifecycle, blueprint_names()) if suspected[row] else ()
            score = None if math.isnan(scores[row]) else scores[row]
            reward = RewardStep(dict(zip(TERMS, terms[row], strict=True)), events, score)
            infos.append(StepInfo(record, reward, model.lifecycle.names, int(sizes[row]), model.host_parameters))
        return tuple(infos)

    def _shown(self) -> tuple[Observation, ActionMasks]:
        with self._phase("observe"):
            models = [learner.model for learner in self.learners]
            self._situations = Situations(self.world, models, self._histories)
            observation, masks = self._situations.tensors
            return observation.to(self.device), masks.to(self.device)


def measured(world: World, records: Sequence[EpochRecord | None]) -> Measured:
    """What the reward needs of an epoch's records, as columns."""
    shape = world.slots.alpha.shape
    accuracy = torch.full(shape[:1], math.nan, dtype=torch.float64)
    loss, alphas = accuracy.clone(), torch.zeros(shape, dtype=torch.float64)
    slot, undone = torch.zeros(shape[:1], dtype=torch.int64), torch.zeros(shape[:1], dtype=torch.bool)
    nothing: dict[int, Contrast] = {}
    contributions = [nothing if record is None else record.measured.contributions for record in records]
    for row, record in enumerate(records):
        if record is not None:
            accuracy[row], loss[row] = record.measured.accuracy, record.measured.loss
            alphas[row, : len(record.alphas)] = torch.tensor(record.alphas, dtype=torch.float64)
            slot[row] = record.effect.action.slot or 0
            undone[row] = record.verdict is not None
    contribution = contrast_columns(contributions, shape[1])
    return Measured(accuracy, loss, contribution, alphas, slot, undone)


def _on_test(learner: Learner, draw: Draw) -> Pending[Evaluation]:
    with learner.arithmetic():
        return evaluate(learner.model, chunks(draw.task.splits.test), learner.loss, learner.score)


def _spread(device: torch.device) -> list[torch.device]:
    """The devices that networks live on, in turn."""
    if str(device) == "cuda":
        return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return [device]

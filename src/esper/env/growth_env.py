"""GrowthEnv: N growing networks whose problems are drawn from a family, as one vectorised decision process.

An episode is one whole training of a network; it *terminates* at its horizon, or when the governor ends it. One step is
one epoch of every network: a fixed number of updates, whatever N is. What one environment draws, measures and earns
depends on nothing outside of it, so N and the neighbours change no number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

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
from esper.env.epoch_records import epoch_columns
from esper.env.observation import decode
from esper.env.rent import RENT_RATE
from esper.env.rents import Rent, rents_of
from esper.env.reward.config import TERMS, RewardConfig
from esper.env.reward.reward import Reward, RewardColumns
from esper.env.reward.suspicion import suspicions
from esper.env.situation import Situations
from esper.env.spaces import ActionMasks, Observation
from esper.env.steps import EnvStep, RewardStep, StepFacts, StepInfo
from esper.env.world import World
from esper.growth.blueprints import blueprint_names
from esper.growth.model import Survey
from esper.lifecycle import Rules
from esper.tasks.family import Draw, Family
from esper.tasks.feed import chunks
from esper.tasks.registry import Task
from esper.telemetry.profiler import PhaseTimers


class GrowthEnv:
    """A batch of episodes. `reset` draws problems by their ids, `step` advances all of them by one epoch."""

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
        rent: Rent = RENT_RATE,
    ) -> None:
        """`slots`: observations are padded to so many; None is the most that any network of the batch has.
        On a GPU epochs are CUDA graphs (`graphs`), and "cuda" without a number spreads networks over all GPUs.

        `compiled` compiles hosts by regions, and seeds: worth it for large hosts in long runs.
        """
        if size < 1:
            raise ValueError(f"an environment needs at least one network, not {size}")
        self.family, self.size, self.held_out, self.slots = family, size, held_out, slots
        self.reward, self.rules, self.rent = reward or RewardConfig(), rules or Rules(), rent
        self.device, self.precision, self.compiled = torch.device(device), precision, compiled
        self._phase = PhaseTimers()
        self.seconds = self._phase.seconds
        """Wall time by phase, since construction."""
        self._devices = _spread(self.device)
        on_gpu = self.device.type == "cuda"
        self._cache = GraphCache() if (on_gpu if graphs is None else graphs) else None
        self.draws: list[Draw] = []
        self.learners: list[Learner] = []
        self.histories: list[list[EpochRecord]] = []
        """What happened, by network and epoch."""
        self._engine: EagerEngine | None = None

    def reset(self, draws: Sequence[int], *, held_out: bool | None = None) -> tuple[Observation, ActionMasks]:
        """Begin new episodes, one per draw id; the same id is the same problem, data, host and minibatches."""
        self.held_out = self.held_out if held_out is None else held_out
        if len(draws) != self.size:
            raise ValueError(f"this environment has {self.size} networks; reset was given {len(draws)} draw ids")
        rent = rents_of(self.rent, draws, held_out=self.held_out)
        with self._phase("reset"):
            if self._cache is not None:
                self._cache.release()
            self.draws, self.learners, self._engine = [], [], None  # old and new networks never share the memory
            if self._cache is not None or self.device.type == "cuda":
                collect_garbage()  # here nothing waits for it; in the middle of a step, a GPU would
            seen: dict[Task, Survey] = {}
            learners = [self._begin(draw, self._devices[i % len(self._devices)], seen) for i, draw in enumerate(draws)]
            most = max(len(learner.model.slots) for learner in learners)
            if most > (self.slots or most):
                raise ValueError(
                    f"a network has {most} slots, and observations have room for {self.slots}: raise `slots`"
                )
            unwatched = [None] * len(learners)
            engine = (
                EagerEngine(learners, unwatched, self.slots)
                if self._cache is None
                else GraphEngine(learners, unwatched, self.slots, cache=self._cache)
            )
            self._start(engine, rent)
            return self._shown()

    def _start(self, engine: EagerEngine, rent: float | Tensor) -> None:
        """Begin the episodes of an engine's learners."""
        self.learners = engine.learners
        untrained = engine.measure(engine.learners)  # what chance looks like
        pairs = zip(engine.learners, untrained, strict=True)
        engine.governors = [Governor(learner, chance=chance) for learner, chance in pairs]
        self._engine = engine
        models = [learner.model for learner in engine.learners]
        self.world = World.of_models(models, engine.columns, [draw.horizon for draw in self.draws], rent)
        self._reward = Reward(self.reward, self.world, [len(draw.task.labels) for draw in self.draws])
        self.histories = [[] for _ in engine.learners]

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

    @property
    def kinds(self) -> list[str]:
        """Of the problems; for analysis only."""
        return [str(draw.facts.get("kind", "")) for draw in self.draws]

    @property
    def captures(self) -> int:
        """CUDA graphs of whole epochs that were captured so far; all others were found in the cache."""
        return 0 if self._cache is None else self._cache.captures

    def evaluate_test(self) -> list[Evaluation]:
        """The networks on their test sets. For judging only: nothing that learns may look at it."""
        return gather([_on_test(learner, draw) for learner, draw in zip(self.learners, self.draws, strict=True)])

    def _begin(self, draw_id: int, device: torch.device, seen: dict[Task, Survey]) -> Learner:
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
        return learner

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


def _on_test(learner: Learner, draw: Draw) -> Pending[Evaluation]:
    with learner.arithmetic():
        return evaluate(learner.model, chunks(draw.task.splits.test), learner.loss, learner.score)


def _spread(device: torch.device) -> list[torch.device]:
    """The devices that networks live on, in turn."""
    if str(device) == "cuda":
        return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return [device]

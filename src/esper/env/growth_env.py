"""GrowthEnv: N growing networks as one vectorised decision process.

One step is one epoch of every network: a fixed number of updates, whatever N is. An episode is one whole training of a
network; it *terminates* at its horizon, or when the governor ends it. What one environment draws, measures and earns
depends on nothing outside of it, so N and the neighbours change no number.
"""

from __future__ import annotations

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
from esper.env.observation import Encoder, decode
from esper.env.reward.config import RewardConfig
from esper.env.reward.level import LossScale
from esper.env.reward.model import RewardModel, RewardStep
from esper.env.situation import Situation, observe
from esper.env.spaces import ActionMasks, Observation
from esper.growth.model import Survey
from esper.lifecycle import Rules
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
class EnvStep:
    """What a step gave. `acted` is False for environments whose episode was over before it: ignore their rows."""

    observation: Observation
    masks: ActionMasks
    reward: Tensor  # [N] float32
    terminated: Tensor  # [N] bool: this step ended the episode
    acted: Tensor  # [N] bool
    infos: tuple[StepInfo | None, ...]


@dataclass(slots=True)
class _Episode:
    """One environment's running episode."""

    draw: Draw
    learner: Learner
    reward: RewardModel
    records: list[EpochRecord]
    situation: Situation
    over: bool = False


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
        self._episodes: list[_Episode] = []
        self._encoder = Encoder(0, 0)
        self._engine = EagerEngine([])

    # -- the process ---------------------------------------------------------------------------------------------------

    def reset(self, numbers: Sequence[int], *, held_out: bool | None = None) -> tuple[Observation, ActionMasks]:
        """Begin new episodes, one per number; the same number is the same problem, data, host and minibatches."""
        self.held_out = self.held_out if held_out is None else held_out
        if len(numbers) != self.size:
            raise ValueError(f"this environment has {self.size} networks; reset was given {len(numbers)} numbers")
        with self._phase("reset"):
            if self._cache is not None:
                self._cache.release()
            self._episodes, self._engine = [], EagerEngine([])  # so that old and new networks never share the memory
            if self._cache is not None or self.device.type == "cuda":
                collect_garbage()  # here nothing waits for it; in the middle of a step, a GPU would
            places = [self._devices[row % len(self._devices)] for row in range(self.size)]
            seen: dict[Task, Survey] = {}
            self._episodes = [self._begin(*chosen, seen) for chosen in zip(numbers, places, strict=True)]
            self._engine = self._make_engine([episode.learner for episode in self._episodes])
            most = max(len(episode.situation.slots) for episode in self._episodes)
            width = self.slots or most
            if most > width:
                raise ValueError(f"a network has {most} slots, and observations have room for {width}: raise `slots`")
            self._encoder = Encoder(self.size, width)
            for row, episode in enumerate(self._episodes):
                self._encoder.write(row, episode.situation)
        return self._shown()

    def step(self, actions: Tensor | Sequence[Action]) -> EnvStep:
        """One epoch for every network whose episode goes on, after its action: a tensor [N, heads] or records."""
        if not self._episodes:
            raise RuntimeError("call reset before step")
        chosen = decode(actions) if isinstance(actions, Tensor) else list(actions)
        active = [not episode.over for episode in self._episodes]
        records = self._engine.stepping([a if on else WAIT for a, on in zip(chosen, active, strict=True)], active)
        infos: list[StepInfo | None] = []
        try:
            for row in range(self.size):
                with self._phase("engine"):
                    record = next(records)  # a GPU works on the next ones meanwhile
                infos.append(None if record is None else self._advance(row, record))
        except Exception:
            self._episodes = []  # some have made the step and some have not: nothing can follow but a reset
            raise
        observation, masks = self._shown()
        return EnvStep(
            observation,
            masks,
            torch.tensor([0.0 if info is None else info.reward.total for info in infos], device=self.device),
            torch.tensor([on and e.over for on, e in zip(active, self._episodes, strict=True)], device=self.device),
            torch.tensor(active, device=self.device),
            tuple(infos),
        )

    @property
    def situations(self) -> list[Situation]:
        """What a rule-based controller reads."""
        return [episode.situation for episode in self._episodes]

    @property
    def draws(self) -> list[Draw]:
        return [episode.draw for episode in self._episodes]

    @property
    def learners(self) -> list[Learner]:
        return [episode.learner for episode in self._episodes]

    @property
    def captures(self) -> int:
        """CUDA graphs of whole epochs that were captured so far; all others were found in the cache."""
        return 0 if self._cache is None else self._cache.captures

    @property
    def over(self) -> bool:
        return all(episode.over for episode in self._episodes)

    def evaluate_test(self) -> list[Evaluation]:
        """The networks on their test sets. For judging only: nothing that learns may look at it."""
        return gather([_on_test(episode) for episode in self._episodes])

    # -- internals -----------------------------------------------------------------------------------------------------

    def _make_engine(self, learners: list[Learner]) -> EagerEngine:
        unwatched = [None] * len(learners)
        engine = (
            EagerEngine(learners, unwatched)
            if self._cache is None
            else GraphEngine(learners, unwatched, cache=self._cache)
        )
        untrained = engine.measure(learners)  # what chance looks like
        engine.governors = [Governor(learner, chance=c) for learner, c in zip(learners, untrained, strict=True)]
        return engine

    def _begin(self, number: int, device: torch.device, seen: dict[Task, Survey]) -> _Episode:
        """`seen`: what the other networks' hosts have shown, by task."""
        draw = self.family.draw(number, held_out=self.held_out)
        drawn, task = draw.task, draw.task.to(device)
        draw = replace(draw, task=task)
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
        reward = RewardModel(self.reward)
        reward.reset(learner.model.host_parameters, LossScale.for_classes(len(task.labels)))
        records: list[EpochRecord] = []
        return _Episode(draw, learner, reward, records, observe(learner, draw.horizon, records))

    def _advance(self, row: int, record: EpochRecord) -> StepInfo:
        """Note the epoch, end the episode if it is time, and reward the step."""
        episode = self._episodes[row]
        before, learner = episode.situation, episode.learner
        broken = record.verdict is not None
        episode.over = broken or learner.epoch >= episode.draw.horizon
        episode.records.append(record)
        with self._phase("observe"):
            after = observe(learner, episode.draw.horizon, tuple(episode.records), before)
            self._encoder.write(row, after)
        with self._phase("reward"):
            reward = episode.reward.step(
                before,
                record,
                after,
                terminal=episode.over,
                governor_penalty=self.reward.governor_penalty if broken else 0.0,
            )
        episode.situation = after
        paths, model = tuple(slot.path for slot in after.slots), learner.model
        return StepInfo(record, reward, paths, model.acting_parameters, model.host_parameters)

    def _shown(self) -> tuple[Observation, ActionMasks]:
        with self._phase("observe"):
            observation, masks = self._encoder.tensors([episode.over for episode in self._episodes])
            return observation.to(self.device), masks.to(self.device)


def _on_test(episode: _Episode) -> Pending[Evaluation]:
    learner = episode.learner
    with learner.arithmetic():
        return evaluate(learner.model, chunks(episode.draw.task.splits.test), learner.loss, learner.score)


def _spread(device: torch.device) -> list[torch.device]:
    """The devices that networks live on, in turn."""
    if str(device) == "cuda":
        return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return [device]

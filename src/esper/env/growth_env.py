"""GrowthEnv: N growing networks whose problems are drawn from a family, as one vectorised decision process.

An episode is one whole training of a network; it *terminates* at its horizon, or when the governor ends it. What one
environment draws, measures and earns depends on nothing outside of it, so N and the neighbours change no number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from esper.engine.eager import EagerEngine
from esper.engine.gc_control import collect_garbage
from esper.engine.graphs import GraphCache, GraphEngine
from esper.engine.learner import Learner
from esper.engine.measure import Evaluation, Pending, evaluate, gather
from esper.engine.precision import Precision
from esper.engine.prepare import task_learner
from esper.env.learner_env import LearnerEnv
from esper.env.rent import RENT_RATE
from esper.env.rents import Rent, rents_of
from esper.env.reward.config import RewardConfig
from esper.env.spaces import ActionMasks, Observation
from esper.growth.model import Survey
from esper.lifecycle import Rules
from esper.tasks.family import Draw, Family
from esper.tasks.feed import chunks
from esper.tasks.registry import Task


class GrowthEnv(LearnerEnv):
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
        """On a GPU epochs are CUDA graphs (`graphs`), and "cuda" without a number spreads networks over all GPUs.

        `compiled` compiles hosts by regions, and seeds: worth it for large hosts in long runs.
        """
        if size < 1:
            raise ValueError(f"an environment needs at least one network, not {size}")
        super().__init__(reward=reward, slots=slots, device=device)
        self.family, self.size, self.held_out = family, size, held_out
        self.rules, self.rent = rules or Rules(), rent
        self.precision, self.compiled = precision, compiled
        self._devices = _spread(self.device)
        on_gpu = self.device.type == "cuda"
        self._cache = GraphCache() if (on_gpu if graphs is None else graphs) else None
        self.draws: list[Draw] = []

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
            width = None if self.slots is None else max(self.slots, *(len(one.model.slots) for one in learners))
            unwatched = [None] * len(learners)
            engine = (
                EagerEngine(learners, unwatched, width)
                if self._cache is None
                else GraphEngine(learners, unwatched, width, cache=self._cache)
            )
            horizons, classes = zip(*((draw.horizon, len(draw.task.labels)) for draw in self.draws), strict=True)
            return self.start(engine, horizons, classes, rent)

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


def _on_test(learner: Learner, draw: Draw) -> Pending[Evaluation]:
    with learner.arithmetic():
        return evaluate(learner.model, chunks(draw.task.splits.test), learner.loss, learner.score)


def _spread(device: torch.device) -> list[torch.device]:
    """The devices that networks live on, in turn."""
    if str(device) == "cuda":
        return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return [device]

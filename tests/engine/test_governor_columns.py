"""The governor over columns gives the verdicts of the governor of one learner, on thousands of epochs.

Covers: R109
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from esper.engine import governor
from esper.engine.governor import FAULTS, Fault, Governor
from esper.engine.governor_columns import GovernorColumns
from esper.engine.learner import TrainReport
from esper.engine.measure import Evaluation

NETWORKS, EPOCHS, SLOTS = 400, 30, 2


@dataclass
class FakeLearner:
    """What `Governor.check` reads of a learner: the seeds that take part."""

    alphas: list[float] = field(default_factory=lambda: [0.0] * SLOTS)
    seeds: list[int] = field(default_factory=lambda: [0] * SLOTS)
    packed: None = None

    @property
    def model(self) -> SimpleNamespace:
        pairs = zip(self.seeds, self.alphas, strict=True)
        joined = [SimpleNamespace(life=SimpleNamespace(seed=seed), strength=alpha) for seed, alpha in pairs if alpha]
        return SimpleNamespace(joined=joined)


class NoSnapshot:
    def __init__(self, model: object) -> None:
        pass

    def take(self, packed: object = None) -> None:
        pass


@dataclass
class Epoch:
    train_loss: float
    finite: bool
    loss: float
    accuracy: float


def story(rng: random.Random, learner: FakeLearner) -> Iterator[Epoch]:
    """Epochs of a network that learns more or less, gains and loses seeds, and may break in some way."""
    loss, accuracy, numbers = 2.3, 10.0, iter(range(1, 1000))
    breaks = rng.choice(["never", "never", "explodes", "forgets", "nan", "weights", "noisy"])
    when = rng.randrange(3, EPOCHS)
    sign = rng.choice([1.0, 1.0, -1.0])  # a loss may be negative
    for epoch in range(EPOCHS):
        for slot in range(SLOTS):
            if not learner.alphas[slot] and rng.random() < 0.1:
                learner.seeds[slot], learner.alphas[slot] = next(numbers), 1 / 3
            elif learner.alphas[slot]:
                learner.alphas[slot] = min(1.0, learner.alphas[slot] + 1 / 3) if rng.random() < 0.9 else 0.0
        loss, accuracy = loss * rng.uniform(0.7, 1.05), min(99.0, accuracy + rng.uniform(-2, 8))
        train, seen, points, finite = loss * rng.uniform(0.8, 1.1), loss * rng.uniform(0.8, 1.3), accuracy, True
        if epoch >= when and rng.random() < 0.5:
            if breaks == "explodes":
                train, seen = train * rng.choice([1.0, 3.0]), seen * 10.0 ** rng.uniform(0, 4)
                points = rng.choice([points, 10.0])
            elif breaks == "forgets":
                train, seen, points = rng.uniform(0.5, 2.5), rng.uniform(1.5, 2.5), rng.uniform(8, 20)
            elif breaks == "nan":
                train, seen = rng.choice([(math.nan, 1.0), (1.0, math.inf), (math.inf, math.nan)])
            elif breaks == "weights":
                finite = False
            elif breaks == "noisy":
                seen = seen * rng.uniform(0.2, 6.0)
        yield Epoch(train, finite, seen if sign > 0 else seen - 3.0, points)


def column(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("window", [1, 4, 10])
def test_rows_get_the_verdicts_of_a_governor_of_their_own(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(governor, "Snapshot", NoSnapshot)
    for module in ("governor", "governor_columns"):
        monkeypatch.setattr(f"esper.engine.{module}.WINDOW", window)
    rngs = [random.Random(f"{window}/{row}") for row in range(NETWORKS)]
    learners = [FakeLearner() for _ in range(NETWORKS)]
    chances = [Evaluation(rng.choice([2.3, 2.3, 2.3, math.nan, math.inf]), 10.0) for rng in rngs]
    alone = [Governor(x, chance=c) for x, c in zip(learners, chances, strict=True)]  # type: ignore[arg-type]
    columns = GovernorColumns(column([c.accuracy for c in chances]), column([c.loss for c in chances]))
    stories = [story(rng, learner) for rng, learner in zip(rngs, learners, strict=True)]
    going, found = [True] * NETWORKS, dict.fromkeys([*Fault, None], 0)
    for epochs in zip(*stories, strict=True):
        train, loss, accuracy = (
            column([getattr(e, name) for e in epochs]) for name in ("train_loss", "loss", "accuracy")
        )
        finite = torch.tensor([e.finite for e in epochs])
        strengths = column([x.alphas for x in learners])  # type: ignore[arg-type]
        numbers = torch.tensor([x.seeds for x in learners])
        faults, seen, limits = columns.check(train, finite, loss, accuracy, strengths, numbers)
        columns.keep(faults < 0, train, loss, accuracy)
        for row, epoch in enumerate(epochs):
            if not going[row]:
                continue
            report, shown = (
                TrainReport(epoch.train_loss, 1.0, {}, {}, epoch.finite),
                Evaluation(epoch.loss, epoch.accuracy),
            )
            verdict = alone[row].check(report, shown)
            found[None if verdict is None else verdict.kind] += 1
            code = int(faults[row])
            assert (None if code < 0 else FAULTS[code]) == (None if verdict is None else verdict.kind)
            if verdict is None:
                np.testing.assert_array_equal([seen[row], limits[row]], math.nan)
                alone[row].keep(report, shown)
                continue
            np.testing.assert_array_equal([seen[row], limits[row]], [verdict.seen, verdict.limit])  # NaN is NaN
            going[row] = False  # a fault ends the episode
    assert min(found.values()) >= 10, "every kind of fault was judged"
    assert found[None] > 3000


def test_a_broken_row_leaves_its_neighbours_alone() -> None:
    def run(second: float) -> list[float]:
        columns = GovernorColumns(column([10.0, 10.0]), column([2.3, 2.3]))
        nothing = torch.zeros((2, 0))
        codes = []
        for loss in (1.0, 0.9, 50.0):
            losses = column([loss, second])
            fault, *_ = columns.check(
                losses, torch.tensor([True, True]), losses, column([12.0, 12.0]), nothing, nothing
            )
            columns.keep(fault < 0, losses, losses, column([12.0, 12.0]))
            codes.append(int(fault[0]))
        return codes

    assert run(1.0) == run(math.nan) == [-1, -1, FAULTS.index(Fault.DIVERGENCE)]

"""Metrics of a person's own in `esper.grow`: per example, of the whole set, and their scale."""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any

import pytest
import torch
from sklearn.metrics import f1_score
from test_growing import QUICK, plant, quick_grow, rings, small_net
from test_own_data import X, Y, once, refused
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.engine.measure import evaluate, gather
from esper.lifecycle import Stage
from esper.tasks.feed import chunks
from esper.tasks.registry import cross_entropy, percent_correct
from esper.training.own.metric import FunctionScore, own_score
from small_worlds import WORLDS
from small_worlds import plant as plant_at


def f1(outputs: Tensor, targets: Tensor) -> float:
    return 100.0 * float(f1_score(targets.numpy(), outputs.argmax(1).numpy(), average="macro"))


def batches(size: int, count: int = 128) -> DataLoader:
    return DataLoader(TensorDataset(*rings(count, 1)), batch_size=size)


def outputs_of(grown: esper.Grown) -> Tensor:
    with torch.no_grad():
        return grown.model(rings(128, 1)[0])


# -- the whole set -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [float, torch.tensor], ids=["float", "tensor"])
def test_one_number_is_a_function_of_the_whole_set(kind: Any) -> None:
    grown = quick_grow(train=batches(16), val=batches(7), metric=lambda o, t: kind(f1(o, t)), test_data=batches(5))
    assert grown.validation.accuracy == pytest.approx(f1(outputs_of(grown), rings(128, 1)[1]))
    assert grown.test is not None
    assert grown.test.accuracy == pytest.approx(grown.validation.accuracy)
    contrasts = [c for r in grown.history.records for c in r.measured.contributions.values()]
    assert contrasts
    assert all(0.0 <= c.error < math.inf for c in contrasts)


def test_the_joined_outputs_of_a_named_tuple_have_its_names() -> None:
    Both = namedtuple("Both", ["first", "second"])
    score = FunctionScore(lambda outputs, targets: 100.0 * float(outputs.second.mean()), "percent")
    for _ in range(2):
        score.update(Both(torch.zeros(3), torch.ones(3)), torch.zeros(3), torch.arange(3))
    assert score.compute(0) == [100.0]


class Counting:
    """Accuracy the way of torchmetrics, without torchmetrics."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.right = self.seen = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.right += int((outputs.argmax(1) == targets).sum())
        self.seen += len(targets)

    def compute(self) -> float:
        return 100.0 * self.right / self.seen


def test_a_metric_with_a_state_has_one_per_network() -> None:
    metric = Counting()
    metric.update(torch.eye(3), torch.zeros(3, dtype=torch.long))
    ours = quick_grow(metric=metric, control=True, test_data=rings(64, 2))
    theirs = quick_grow(control=True, test_data=rings(64, 2))
    for found, wanted in zip(
        (ours.validation, ours.test, ours.control), (theirs.validation, theirs.test, theirs.control), strict=True
    ):
        assert found is not None
        assert wanted is not None
        assert found.accuracy == pytest.approx(wanted.accuracy, abs=1e-4)
    for a, b in zip(ours.history.records, theirs.history.records, strict=True):
        for slot, contrast in a.measured.contributions.items():
            assert contrast.accuracy == pytest.approx(b.measured.contributions[slot].accuracy, abs=1e-4)
    assert (metric.right, metric.seen) == (1, 3)  # the person's own object is not touched


def test_metrics_of_torchmetrics_are_taken_as_they_are() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    metric = torchmetrics.F1Score(task="multiclass", num_classes=3, average="macro")
    grown = quick_grow(metric=metric, val=batches(7), train=batches(16))
    assert grown.validation.accuracy == pytest.approx(f1(outputs_of(grown), rings(128, 1)[1]), abs=1e-4)


@pytest.mark.parametrize("stage", [Stage.HOLDING, Stage.TRAINING])
def test_contrasts_of_the_whole_set_against_those_per_example(stage: Stage) -> None:
    """Accuracy both ways: the same contrasts, and standard errors that agree as far as ten blocks tell."""
    world = WORLDS["mlp"]
    model = world.grown()
    plant_at(model, model.slots[0], "mlp", stage)
    data = world.examples(400)
    with torch.no_grad():
        for parameter in model.seeds["0"].parameters():
            parameter.add_(torch.randn_like(parameter))
    per_example, function, stateful = gather(
        [
            evaluate(model, chunks(data, 90), cross_entropy, score, contrasts=model.slots[:1])
            for score in (
                percent_correct,
                own_score(lambda o, t: percent_correct(o, t).mean(), "percent", whole_set=True),
                own_score(Counting(), "percent", whole_set=True),
            )
        ]
    )
    for found in (function, stateful):
        assert (found.loss, found.accuracy) == pytest.approx((per_example.loss, per_example.accuracy), abs=1e-4)
        ((slot, wanted),) = (per_example.contributions | per_example.shadow_benefits).items()
        contrast = (found.contributions | found.shadow_benefits)[slot]
        assert (contrast.accuracy, contrast.loss) == pytest.approx((wanted.accuracy, wanted.loss), abs=1e-4)
        assert wanted.error > 0.0
        assert 0.4 * wanted.error < contrast.error < 1.8 * wanted.error


def test_an_error_that_cannot_be_estimated_is_infinite() -> None:
    """A metric that needs all examples has no value without some of them: nothing is sure then."""
    world = WORLDS["mlp"]
    model = world.grown()
    plant_at(model, model.slots[0], "mlp", Stage.HOLDING)

    def all_or_nothing(outputs: Tensor, targets: Tensor) -> float:
        if len(targets) < 20:
            raise ValueError("too few")
        return 50.0

    score = own_score(all_or_nothing, "percent", whole_set=True)
    data = chunks(world.examples(20), 6)
    found = gather([evaluate(model, data, cross_entropy, score, contrasts=model.slots[:1])])[0]
    assert found.contributions[0].error == math.inf


def test_a_metric_that_fails_on_the_whole_set_says_so_in_one_line() -> None:
    refused(
        "the metric gives nan for the 64 examples", lambda: once(metric=lambda o, t: math.nan, metric_scale="percent")
    )
    sizes = lambda o, t: 50.0 if len(t) < 64 else 1 / 0  # noqa: E731
    small = DataLoader(TensorDataset(X, Y), batch_size=16)
    refused("the metric fails for all 64 examples.*: division by zero", lambda: once(small, small, metric=sizes))


# -- scale -------------------------------------------------------------------------------------------------------


def right(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).float()


@pytest.mark.parametrize(
    "metric",
    [right, lambda o, t: right(o, t).numpy(), lambda o, t: right(o, t).mean(), lambda o, t: f1(o, t) / 100],
    ids=["each", "array", "mean", "f1"],
)
def test_fractions_become_percent(metric: Any) -> None:
    found = quick_grow(metric=metric)
    percent = quick_grow(metric=lambda o, t: 100.0 * metric(o, t))
    assert found.validation.accuracy == pytest.approx(percent.validation.accuracy, abs=1e-4)
    assert found.validation.accuracy > 1.0
    assert [s.fate for s in found.history.seeds()] == [s.fate for s in percent.history.seeds()]


def test_a_scale_that_cannot_be_recognised_is_asked_for() -> None:
    value = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 1))
    data = (X, X[:, :1])
    r2 = lambda o, t: 1 - (o - t).square().mean() / t.var()  # noqa: E731
    refused(
        r"^it cannot be seen.*pass metric_scale=\"fraction\".*or \"percent\"",
        lambda: once(data, data, model=value, metric=r2),
    )
    grown = once(data, data, model=value, metric=r2, metric_scale="fraction")
    with torch.no_grad():
        assert grown.validation.accuracy == pytest.approx(100 * r2(grown.model(X), X[:, :1]).item(), abs=1e-3)
    as_they_are = once(metric=right, metric_scale="percent")
    assert as_they_are.validation.accuracy <= 1.0
    refused("metric_scale must be", lambda: once(metric=right, metric_scale="0..1"))
    refused("metric_scale .* without a metric", lambda: once(metric_scale="percent"))


@pytest.mark.parametrize("whole_set", [False, True])
def test_a_fraction_above_one_is_an_error(whole_set: bool) -> None:
    def metric(outputs: Tensor, targets: Tensor) -> Tensor:
        values = 30.0 * right(outputs, targets)
        return values.mean() if whole_set else values

    refused("taken for a fraction, at most 1, and gives [36]", lambda: once(metric=metric, metric_scale="fraction"))
    once(metric=metric)


def test_more_than_a_hundred_is_no_percentage() -> None:
    refused("at most 100", lambda: once(metric=lambda o, t: o.square().sum(1) + 300.0))


def test_scores_are_looked_at_until_the_scale_is_known() -> None:
    """The first batch may be all wrong."""
    y = Y.clone()
    with torch.no_grad():
        y[:16] = (small_net()(X[:16]).argmax(1) + 1) % 3
    val = DataLoader(TensorDataset(X, y), batch_size=16)
    grown = once(val, val, metric=right)
    assert grown.validation.accuracy > 1.0


# -- refused -----------------------------------------------------------------------------------------------------


def mean_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - nn.functional.one_hot(targets, 3)).square().mean()


@pytest.mark.parametrize("metric", [nn.CrossEntropyLoss(), nn.functional.cross_entropy, mean_squared_error])
def test_errors_are_no_scores(metric: Any) -> None:
    refused("is an error, and lower is better: .*higher is better", lambda: once(metric=metric))


def test_what_torchmetrics_calls_an_error_is_refused() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    metric = torchmetrics.CalibrationError(task="multiclass", num_classes=3)
    refused("MulticlassCalibrationError is an error", lambda: once(metric=metric))
    kind = torchmetrics.classification.MulticlassF1Score
    refused("a class", lambda: once(metric=kind))
    refused("one number", lambda: once(metric=kind(num_classes=3, average=None)))
    both = torchmetrics.MetricCollection([kind(num_classes=3)])
    refused("one number, not a dict", lambda: once(metric=both))


def test_the_seed_is_judged_by_the_metric_of_the_whole_set() -> None:
    grown = quick_grow(metric=f1, controller=plant(), rules=QUICK)
    assert [story.fate for story in grown.history.seeds()] == [Stage.FOSSILIZED]

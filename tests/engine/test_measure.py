"""Contributions and shadow benefits against brute force; standard errors by hand; one transfer for all numbers.

Covers: R138 (alpha = 0 seeds are measured by their shadow, never guessed), R012 (one device-to-host transfer)
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from esper.engine.measure import Pending, evaluate, gather, jackknife_error, measure_batch, measuring, standard_error
from esper.growth.attach import attach
from esper.growth.blueprints import fitting
from esper.growth.model import GrowingModel
from esper.growth.slot import Slot, SlotMode
from esper.lifecycle import Stage
from esper.tasks.data import Split
from esper.tasks.feed import chunks
from esper.tasks.registry import cross_entropy, percent_correct
from small_worlds import WORLDS, learner_for, plant, run_epoch


def brute_force(model: GrowingModel, slot: Slot, mode: SlotMode, data: Split) -> tuple[float, float, float]:
    """(accuracy, loss, standard error) of having the seed, from two separate full passes over everything."""
    model.eval()
    with torch.no_grad():
        base = model(data.x)
        slot.mode = mode
        other = model.host(data.x)
        slot.mode = SlotMode.LIVE
    with_seed, without = (other, base) if mode is SlotMode.SHADOW else (base, other)
    difference = (percent_correct(with_seed, data.y) - percent_correct(without, data.y)).double().numpy()
    saved = float(cross_entropy(without, data.y)) - float(cross_entropy(with_seed, data.y))
    return float(difference.mean()), saved, float(difference.std(ddof=1) / len(difference) ** 0.5)


@pytest.mark.parametrize("name", WORLDS)
def test_contrasts_equal_two_full_passes_over_everything(name: str) -> None:
    world = WORLDS[name]
    data = world.examples(30, 4)
    for stages in (
        (Stage.HOLDING, Stage.TRAINING),
        (Stage.TRAINING, Stage.BLENDING),
        (Stage.FOSSILIZED, Stage.HOLDING),
    ):
        model = world.grown()
        for slot, stage in zip(model.slots, stages, strict=False):
            plant(model, slot, fitting(slot.shape)[-1].name, stage)
        measured = [s for s in model.slots if s.seed is not None and s.life.stage is not Stage.FOSSILIZED]
        expected = {
            s.index: brute_force(model, s, SlotMode.SHADOW if s.life.stage is Stage.TRAINING else SlotMode.OFF, data)
            for s in measured
        }
        found = gather([evaluate(model, chunks(data, 7), cross_entropy, percent_correct, contrasts=measured)])[0]
        shadows = {s.index for s in measured if s.life.stage is Stage.TRAINING}
        assert set(found.shadow_benefits) == shadows
        assert set(found.contributions) == set(expected) - shadows
        for index, contrast in (found.contributions | found.shadow_benefits).items():
            assert (contrast.accuracy, contrast.loss, contrast.error) == pytest.approx(expected[index], abs=2e-5)


@pytest.mark.parametrize("size", [1, 4, 11, 100])
def test_the_size_of_the_chunks_does_not_matter(size: int) -> None:
    world = WORLDS["conv1d"]
    data = world.examples(33)
    model = world.grown()
    plant(model, model.slots[0], "conv", Stage.HOLDING)
    plant(model, model.slots[1], "norm", Stage.TRAINING)
    whole, parts = gather(
        [
            evaluate(model, chunks(data, n), cross_entropy, percent_correct, contrasts=model.slots)
            for n in (len(data), size)
        ]
    )
    assert parts.loss == pytest.approx(whole.loss, abs=1e-6)
    assert parts.accuracy == pytest.approx(whole.accuracy, abs=1e-6)
    for a, b in zip(
        (*whole.contributions.values(), *whole.shadow_benefits.values()),
        (*parts.contributions.values(), *parts.shadow_benefits.values()),
        strict=True,
    ):
        assert (a.accuracy, a.loss, a.error) == pytest.approx((b.accuracy, b.loss, b.error), abs=1e-5)


class Passing(nn.Module):
    """Gives its first input column back, plus a slot's output that is zero unless a seed makes it something."""

    def __init__(self) -> None:
        super().__init__()
        self.zero = nn.Linear(2, 1)
        nn.init.zeros_(self.zero.weight)
        nn.init.zeros_(self.zero.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1] + self.zero(x)


def test_a_contrast_by_hand() -> None:
    """Scores are the outputs. The seed adds 3 to every output (its first bias), and the metric squares half of them.

    Without: 1, 2, 3, 4. With the seed: 4, 5, 6, 7. Metric: example 0 and 1 as they are, 2 and 3 squared.
    Differences 3, 3, 27, 33: mean 16.5, mean square (9 + 9 + 729 + 1089)/4 = 459, so the variance of the mean is
    (459 − 272.25)/3 = 62.25 and the error 7.8899. Loss (the mean output): 2.5 without, 5.5 with, so 3 are lost.
    """
    x = torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 1.0], [4.0, 1.0]])
    model = attach(Passing(), ["zero"], x)
    slot = model.slots[0]
    plant(model, slot, "mlp", Stage.HOLDING)
    assert slot.seed is not None
    with torch.no_grad():
        for parameter in slot.seed.parameters():
            parameter.zero_()
        slot.seed.body.down.bias.fill_(3.0)  # type: ignore[union-attr]

    def score(outputs: Tensor, targets: Tensor) -> Tensor:
        values = outputs.squeeze(1)
        return torch.where(targets > 0, values**2, values)

    def mean(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.mean()

    data = [(x[:3], x[:3, 1]), (x[3:], x[3:, 1])]
    found = gather([evaluate(model, data, mean, score, contrasts=[slot])])[0]
    assert found.loss == pytest.approx(5.5)
    assert found.accuracy == pytest.approx((4 + 5 + 36 + 49) / 4)
    contrast = found.contributions[0]
    assert (contrast.accuracy, contrast.loss, contrast.error) == pytest.approx((16.5, -3.0, 62.25**0.5))


@given(st.lists(st.sampled_from([-100.0, 0.0, 100.0]), min_size=2, max_size=50))
def test_the_standard_error_is_the_textbook_one(values: list[float]) -> None:
    numbers = np.array(values)
    found = standard_error(float(numbers.mean()), float((numbers**2).mean()), len(numbers))
    assert found == pytest.approx(float(numbers.std(ddof=1) / len(numbers) ** 0.5), abs=1e-9)


def test_one_example_has_no_spread_and_no_crash() -> None:
    assert standard_error(5.0, 25.0, 1) == 0.0
    assert standard_error(1 / 3, 1 / 9 - 1e-18, 7) == 0.0  # rounding below zero


def test_a_jackknife_error_by_hand() -> None:
    """Of a mean, with one example per block, it is the textbook's. Values 1, 2, 6: means without each 4, 3.5, 1.5."""
    assert jackknife_error([4.0, 3.5, 1.5]) == pytest.approx(float(np.std([1, 2, 6], ddof=1) / 3**0.5))
    assert jackknife_error([1.0]) == math.inf
    assert jackknife_error([1.0, math.nan]) == math.inf


def test_one_example_may_have_a_score_without_axes() -> None:
    """As `squeeze` makes it of a last batch of one."""
    world = WORLDS["mlp"]
    model, data = world.grown(), world.examples(4)
    squeezed, plain = gather(
        [
            evaluate(model, chunks(data, 1), cross_entropy, score)
            for score in (lambda o, t: percent_correct(o, t).squeeze(), percent_correct)
        ]
    )
    assert squeezed == plain


@pytest.mark.parametrize("shape", [(4, 1), (3,), (1, 4), ()])
def test_a_metric_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    world = WORLDS["mlp"]
    with pytest.raises(ValueError, match=r"one number per example \(4\), not \[") as refusal:
        evaluate(world.grown(), chunks(world.examples(4)), cross_entropy, lambda o, t: torch.zeros(shape))
    assert "\n" not in str(refusal.value)


def test_no_examples_are_refused() -> None:
    with pytest.raises(ValueError, match="there are no examples to evaluate on"):
        evaluate(WORLDS["mlp"].grown(), [], cross_entropy, percent_correct)


def test_all_reports_come_in_their_order_with_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    transfers = []
    real = Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda self: transfers.append(len(self)) or real(self))
    pending: list[Pending[Any]] = [
        Pending(torch.arange(3.0), tuple),
        Pending(torch.arange(10, 11), tuple),
        Pending(torch.tensor([1.5], dtype=torch.float64), sum),
    ]
    assert gather(pending) == [(0.0, 1.0, 2.0), (10.0,), 1.5]
    assert transfers == [5]
    assert gather([]) == []


@pytest.mark.parametrize("name", WORLDS)
def test_evaluation_leaves_mode_buffers_random_numbers_and_hooks_as_they_were(name: str) -> None:
    learner = learner_for(WORLDS[name])
    model = learner.model
    plant(model, model.slots[0], fitting(model.slots[0].shape)[-1].name, Stage.TRAINING)
    plant(model, model.slots[1], fitting(model.slots[1].shape)[-1].name, Stage.HOLDING)
    model.train()
    buffers = [b.clone() for b in model.buffers()]
    hooks = [len(m._forward_hooks) for m in model.modules()]
    torch.manual_seed(1)
    rng = torch.get_rng_state()
    first, second = (gather([learner.evaluate()])[0] for _ in range(2))
    assert first == second, "measuring twice gives the same"
    assert model.training
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert [len(m._forward_hooks) for m in model.modules()] == hooks
    assert torch.equal(torch.get_rng_state(), rng)


def test_a_loss_reads_what_the_pass_that_it_judges_has_noted() -> None:
    class Noting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
            self.size = torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            self.size = h.square().mean()
            outputs: Tensor = self.head(h)
            return outputs

    host, x = Noting(), torch.randn(4, 4)
    model = attach(host, ["first"], x)
    slot = model.slots[0]
    plant(model, slot, "mlp", Stage.HOLDING)
    seen = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append(float(host.size))
        return outputs.sum()

    with measuring(model):
        measure_batch(model, (x, torch.zeros(4)), loss, lambda o, t: o[:, 0], [{slot: SlotMode.OFF}])
    whole, without = seen
    assert without != whole
    assert host.size == pytest.approx(whole)


def test_what_was_not_measured_is_absent() -> None:
    learner = learner_for(WORLDS["mlp"])
    record = run_epoch(learner)
    assert (record.measured.contributions, record.measured.shadow_benefits) == ({}, {})
    plant(learner.model, learner.model.slots[0], "mlp", Stage.FOSSILIZED)
    learner.optimizer.add(0, learner.model.seed_parameters(learner.model.slots[0]))
    record = run_epoch(learner)
    assert (record.measured.contributions, record.measured.shadow_benefits) == ({}, {})

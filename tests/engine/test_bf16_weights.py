"""Bfloat16: the weights that are cast together give autocast's numbers, and training stays near single precision.

On a CPU bfloat16 is slow and therefore off; here it is switched on, so that the same code runs without a GPU.

Covers: R118
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, replace

import pytest
import torch
from torch import nn

from esper.actions import WAIT, Action
from esper.engine.bf16_weights import Bf16Weights
from esper.engine.eager import EagerEngine, EpochRecord
from esper.engine.graphs import GraphEngine
from esper.engine.learner import Learner
from esper.engine.optimizer import GrowingOptimizer
from esper.engine.precision import Precision
from esper.engine.prepare import task_learner
from esper.growth.attach import attach
from esper.growth.blueprints import fitting
from esper.lifecycle import Rules
from esper.tasks.data import Split, Splits
from esper.tasks.feed import TensorFeed
from esper.tasks.registry import Task, cross_entropy, percent_correct
from esper.training.speed import Work, generated_images
from small_worlds import BUILT_IN, EAGER, World, germinate

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]

TOLERANCE = 0.02
"""Relative distance of losses from single precision after 50 updates: 0.007 was the worst of 16 networks on a CPU."""


@pytest.fixture(autouse=True)
def half_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.engine.precision.BF16_DEVICES", frozenset({"cpu", "cuda"}))


def learner_of(world: World) -> Learner:
    host = world.host(0)
    model = attach(host, world.slots, world.examples(4).x, rules=EAGER)
    feed = TensorFeed(world.examples(24), world.examples(12, 1), batch_size=8, updates_per_epoch=3)
    adam = torch.optim.AdamW(host.parameters(), lr=0.01, fused=True)
    return Learner(model, GrowingOptimizer(adam), feed, cross_entropy, percent_correct, precision=Precision.BF16)


def play(engine: EagerEngine, script: Sequence[Action]) -> list[EpochRecord]:
    return [engine.step([action])[0] for action in script]


def numbers(record: EpochRecord) -> list[object]:
    trained, measured = record.trained, record.measured
    contrasts = {**measured.contributions, **measured.shadow_benefits}
    return [
        *(trained.loss, trained.host_gradient, trained.seed_gradients, trained.shadow_losses, trained.finite),
        *(measured.loss, measured.accuracy, {slot: astuple(contrast) for slot, contrast in contrasts.items()}),
    ]


@pytest.mark.parametrize("make_engine", [EagerEngine, GraphEngine])
@pytest.mark.parametrize("name", BUILT_IN)
def test_weights_that_are_cast_together_give_the_numbers_of_autocast(
    name: str, make_engine: Callable[..., EagerEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through a seed's whole life, bit by bit."""
    kind = fitting(learner_of(BUILT_IN[name]).model.slots[0].shape)[0].name
    script = [WAIT, germinate(0, kind), *[WAIT] * 5]
    together = play(make_engine([learner_of(BUILT_IN[name])], [None]), script)
    monkeypatch.setattr("esper.engine.bf16_weights.CAST", ())
    one_by_one = play(make_engine([learner_of(BUILT_IN[name])], [None]), script)
    assert [numbers(r) for r in together] == [numbers(r) for r in one_by_one]
    assert len({stage for record in together for stage in record.stages}) >= 4  # dormant, incubating, blending, holding


def test_layers_get_their_weights_back_and_what_is_tied_or_foreign_is_left_alone() -> None:
    class Doubled(nn.Linear):
        """Does with its weight what only it knows."""

    host = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), Doubled(4, 4), nn.LayerNorm(4)])
    host[2].weight = host[1].weight
    before = dict(host.named_parameters())
    copies = Bf16Weights(host)
    with copies.in_place():
        types = {name: p.dtype for name, p in host.named_parameters()}
        halved = {name for name, kind in types.items() if kind is torch.bfloat16}
        assert halved == {"0.weight", "0.bias", "1.bias", "2.bias"}
        assert copies.copies_of([before["0.weight"]])[0] is host[0].weight
        assert copies.weights_of([host[0].weight])[0] is before["0.weight"]
        host[0](torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
        copies.hand_over()
        assert before["0.weight"].grad is not None
        assert before["0.weight"].grad.dtype is torch.float32
    with pytest.raises(RuntimeError, match="broken"), copies.in_place():
        raise RuntimeError("broken")
    assert all(p is before[name] for name, p in host.named_parameters())


def learnable_images(device: str) -> Task:
    """Coarse patterns in noise: a small host has learnt most of it after 50 updates."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(10, 3, 4, 4, generator=generator).repeat_interleave(4, 2).repeat_interleave(4, 3)

    def split(count: int) -> Split:
        y = torch.randint(10, (count,), generator=generator)
        return Split(patterns[y] + torch.randn(count, 3, 16, 16, generator=generator), y)

    task = generated_images(Work(channels=(8, 16), size=16, batch=64, updates=5))
    return replace(task, splits=Splits(split(1024), split(128), split(16)), learning_rate=4e-3).to(device)


@pytest.mark.parametrize("device", DEVICES)
def test_after_fifty_updates_losses_are_within_two_percent_of_single_precision(device: str) -> None:
    """Two networks, a seed that incubates, blends and holds in each."""
    task, rules = learnable_images(device), Rules(gradient_activity=0.0, shadow_benefit=-1e9)
    losses: dict[Precision, list[float]] = {}
    for precision in (Precision.FP32, Precision.BF16):
        learners = [task_learner(task, seed, 1000, precision=precision, rules=rules) for seed in range(2)]
        engine = GraphEngine(learners, [None] * 2)
        for epoch in range(10):
            records = engine.step([germinate(0, "conv") if epoch == 2 else WAIT] * 2)
        losses[precision] = [loss for r in records for loss in (r.trained.loss, r.measured.loss)]
    assert max(losses[Precision.FP32]) < 1.6  # of 2.3 at chance: there was something to lose
    assert losses[Precision.BF16] == pytest.approx(losses[Precision.FP32], rel=TOLERANCE)
    assert losses[Precision.BF16] != losses[Precision.FP32]

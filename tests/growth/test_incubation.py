"""The key promise: an incubating seed cannot be felt by its host, learns all the same, and sees its own effect.

Covers: R149 (seed modules inside a host), R156 (why incubation is closed-loop)
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from esper.actions import BLENDS, Action, Op
from esper.engine.learner import Learner
from esper.engine.measure import gather
from esper.engine.optimizer import GrowingOptimizer
from esper.growth.attach import attach
from esper.growth.blueprints import blueprint, fitting, registry
from esper.growth.model import GrowingModel
from esper.growth.seed import Seed
from esper.growth.slot import Slot
from esper.lifecycle import Rules, Stage
from esper.tasks import load_task
from esper.tasks.feed import Batch, TensorFeed
from esper.tasks.registry import Task, cross_entropy
from small_worlds import FOREIGN, PATIENT, WORLDS, force, germinate, learner_for, plant, run_epoch, same, scramble


def buffers_of(module: nn.Module) -> list[Tensor]:
    return [buffer.clone() for buffer in module.buffers()]


def one_update(host: nn.Module, run: object, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    """Outputs and host gradients of one training pass from a fixed random state."""
    host.train()
    host.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    outputs = run(x)  # type: ignore[operator]
    cross_entropy(outputs, y).backward()
    return outputs.detach(), [p.grad for p in host.parameters()]


def shadow_gradients(model: GrowingModel, slot: Slot, x: Tensor, y: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    with model.shadow(slot, x) as outputs:
        loss = cross_entropy(outputs, y)
        return loss, torch.autograd.grad(loss, model.seed_parameters(slot))


@pytest.mark.parametrize("name", WORLDS)
def test_the_host_cannot_tell_whether_a_seed_incubates(name: str) -> None:
    """Every blueprint that fits, in every slot: outputs, gradients, buffers and random numbers, bit for bit."""
    world = WORLDS[name]
    x, y = world.examples(6).x, world.examples(6).y
    alone = world.host()
    expected_outputs, expected_gradients = one_update(alone, alone, x, y)
    expected_buffers, expected_rng = buffers_of(alone), torch.get_rng_state()
    tried = 0
    for index in range(len(world.grown().slots)):
        for candidate in fitting(world.grown().slots[index].shape):
            model = world.grown()
            slot = model.slots[index]
            blend = BLENDS[tried % len(BLENDS)]
            plant(model, slot, candidate.name, Stage.TRAINING, blend)
            with model.recording():
                outputs, gradients = one_update(model.host, model, x, y)
                loss, seed_gradients = shadow_gradients(model, slot, x, y)
            case = f"{candidate.name} at {slot.path}"
            assert torch.equal(outputs, expected_outputs), case
            assert same(gradients, expected_gradients), case
            assert same([p.grad for p in model.host.parameters()], expected_gradients), f"{case}: after the shadow"
            assert same(buffers_of(model.host), expected_buffers), case
            assert torch.equal(torch.get_rng_state(), expected_rng), case
            assert all(g.isfinite().all() for g in seed_gradients), case
            assert any(g.abs().max() > 0 for g in seed_gradients), f"{case}: the shadow teaches nothing"
            assert not torch.equal(loss, cross_entropy(outputs, y)), f"{case}: the shadow does not show the seed"
            tried += 1
    assert tried >= 8


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", WORLDS)
def test_ten_epochs_of_incubation_leave_the_trajectory_of_the_host_as_it_was(name: str, optimizer: str) -> None:
    world = WORLDS[name]
    alone = learner_for(world, optimizer=optimizer)
    grown = learner_for(world, optimizer=optimizer, rules=PATIENT)
    order = list(reversed(grown.model.slots))  # the last slot first
    plans = {
        epoch: germinate(slot.index, fitting(slot.shape)[-1 - i].name, BLENDS[i % 3])
        for i, (epoch, slot) in enumerate(zip((1, 3, 4), order, strict=False))
    }
    for epoch in range(10):
        expected = run_epoch(alone)
        if epoch == 8:  # seeds may also leave again
            plans[epoch] = Action(Op.PRUNE, order[0].index)
        found = run_epoch(grown, plans.get(epoch))
        if epoch in (1, 3, 4) and epoch in plans:
            assert found.effect.changed
            scramble(grown.model.slots[plans[epoch].slot or 0])
        assert found.trained.loss == expected.trained.loss
        assert found.trained.host_gradient == expected.trained.host_gradient
        assert (found.measured.loss, found.measured.accuracy) == (expected.measured.loss, expected.measured.accuracy)
    assert len(grown.model.incubating) == len(plans) - 2
    assert same(grown.model.host.parameters(), alone.model.host.parameters())
    assert same(grown.model.host.buffers(), alone.model.host.buffers())
    assert torch.equal(grown.rng_state, alone.rng_state)


@pytest.mark.parametrize("name", ["mlp", "conv1d", "gpt", "in-place", "nested", "tuple"])
@pytest.mark.parametrize("elsewhere", [Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED])
def test_an_incubating_seed_disturbs_neither_the_host_nor_a_seed_at_another_stage(name: str, elsewhere: Stage) -> None:
    world = WORLDS[name]
    for joined, incubating in ((0, -1), (-1, 0)):  # before it, and after it
        learners = [learner_for(world, rules=PATIENT) for _ in range(2)]
        for learner, both in zip(learners, (False, True), strict=True):
            model = learner.model
            slots = [model.slots[joined], *([model.slots[incubating]] if both else [])]
            for slot, stage in zip(slots, (elsewhere, Stage.TRAINING), strict=False):
                plant(model, slot, fitting(slot.shape)[-1].name, stage)
                learner.optimizer.add(slot.index, model.seed_parameters(slot))
            for _ in range(3):
                learner.begin_epoch()
                report = gather([learner.train()])[0]
            assert len(report.shadow_losses) == both
        first, second = learners
        assert same(first.model.host.parameters(), second.model.host.parameters())
        assert same(first.model.host.buffers(), second.model.host.buffers())
        own = str(first.model.slots[joined].index)
        assert same(first.model.seeds[own].parameters(), second.model.seeds[own].parameters())


@pytest.mark.parametrize("name", WORLDS)
def test_the_shadow_is_the_network_with_the_seed_at_full_strength_on_a_detached_input(name: str) -> None:
    """Values and seed gradients against a slow, obvious reference: a copy of the host with a plain hook."""
    world = WORLDS[name]
    x, y = world.examples(6).x, world.examples(6).y
    for index in range(len(world.grown().slots)):
        model = world.grown()
        slot = model.slots[index]
        plant(model, slot, fitting(slot.shape)[-1].name, Stage.TRAINING)
        model.eval()  # no dropout: both passes must be comparable
        reference, module = copy.deepcopy((model.host, slot.module))
        module._forward_hooks.clear()
        seed = copy.deepcopy(slot.seed)

        def grown(_: nn.Module, args: tuple[Tensor], output: object, seed: Seed | None = seed) -> object:
            assert seed is not None
            if isinstance(output, tuple):
                return (seed(output[0].detach()), *output[1:])
            return seed(output.detach(), args[0].detach() if seed.reads_input else None)  # type: ignore[union-attr]

        module.register_forward_hook(grown)
        expected = cross_entropy(reference(x), y)
        assert seed is not None
        expected_gradients = torch.autograd.grad(expected, list(seed.parameters()))
        with model.recording():
            model(x)
            loss, gradients = shadow_gradients(model, slot, x, y)
        torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)
        for a, b in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", WORLDS)
def test_shadow_training_lowers_the_shadow_loss(name: str) -> None:
    """The host stands still, so what is saved on the examples that it learns from is the seed's own doing."""
    world = WORLDS[name]
    learner = learner_for(world, rules=PATIENT, warmup=1)
    learner.feed.val = learner.feed.train  # type: ignore[attr-defined]
    model = learner.model
    model.host.requires_grad_(False)
    slot = model.slots[-1]
    capable = "mlp" if slot.shape.layout in ("dense", "sequence") else "conv"
    saved = []
    for epoch in range(15):
        record = run_epoch(learner, germinate(slot.index, capable) if epoch == 0 else None)
        saved.append(record.measured.shadow_benefits[slot.index].loss)
    assert record.trained.host_gradient == 0.0
    assert saved[-1] > max(0.003, saved[0]), saved


def test_an_incubating_seed_survives_a_seed_with_running_statistics_downstream() -> None:
    """A user's blueprint may hold a batch norm: shadow passes of others must not move its statistics."""
    before = {name: dict(entries) for name, entries in registry._REGISTRY.items()}
    try:

        @blueprint("batch_norm_for_test", "dense")
        class BatchNormSeed(nn.Module):
            """Batch norm, mixed in."""

            def __init__(self, channels: int, layout: str) -> None:
                super().__init__()
                self.norm = nn.BatchNorm1d(channels)
                self.mix = nn.Parameter(torch.zeros(channels))

            def forward(self, h: Tensor) -> Tensor:
                return h + self.mix * (self.norm(h) - h)

        world = WORLDS["mlp"]
        statistics = []
        for both in (False, True):
            learner = learner_for(world, rules=PATIENT)
            model = learner.model
            plant(model, model.slots[1], "batch_norm_for_test", Stage.HOLDING)
            learner.optimizer.add(1, model.seed_parameters(model.slots[1]))
            if both:
                plant(model, model.slots[0], "mlp", Stage.TRAINING)
                learner.optimizer.add(0, model.seed_parameters(model.slots[0]))
            for _ in range(3):
                run_epoch(learner)
            statistics.append(buffers_of(model.seeds["1"]))
        assert same(*statistics)
    finally:
        registry._REGISTRY.clear()
        registry._REGISTRY.update(before)


def test_a_seed_has_running_statistics_of_its_own_that_follow_its_shadow() -> None:
    """Written in place or replaced: what the host would average with the seed in it, beside what it does average."""
    learner = learner_for(WORLDS["spectral"], rules=PATIENT)
    learner.apply(germinate(0, "conv"))
    slot, host = learner.model.slots[0], learner.model.host
    scramble(slot)
    for _ in range(4):
        run_epoch(learner)
    own = buffers_of(host)
    with slot.private_buffers():
        assert int(host.passes) == 12  # type: ignore[arg-type]
        private = host.mean.clone()  # type: ignore[union-attr, operator]
    assert same(buffers_of(host), own)
    assert int(host.passes) == 12  # type: ignore[arg-type]
    assert private.any()
    assert not torch.equal(private, host.mean)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FOREIGN)
def test_pruning_leaves_a_foreign_host_without_any_hook_or_trace(name: str) -> None:
    world = FOREIGN[name]
    learner = learner_for(world, rules=Rules(training_epochs=100, prune_age=1))
    model = learner.model
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.host.modules()]
    keys = [sorted(vars(m)) for m in model.host.modules()]
    run_epoch(learner, germinate(0, fitting(model.slots[0].shape)[0].name))
    assert run_epoch(learner, Action(Op.PRUNE, 0)).effect.changed
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.host.modules()] == hooks
    assert [sorted(vars(m)) for m in model.host.modules()] == keys
    assert len(model.seeds) == 0


def test_a_gradient_reaches_seed_and_host_upstream_once_the_seed_blends() -> None:
    """An input that stayed detached would freeze everything before the slot (LESSONS 1, last row)."""
    for stage in (Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED):
        model = WORLDS["conv1d"].grown()
        slot = model.slots[1]
        plant(model, slot, "conv", stage)
        x, y = WORLDS["conv1d"].examples(6).x, WORLDS["conv1d"].examples(6).y
        # Cut the way around the seed: what arrives upstream came through it.
        seed = slot.seed
        assert seed is not None
        body = seed.body
        body.forward = lambda h, body=body: body.body(h)  # type: ignore[attr-defined, method-assign]
        with torch.no_grad():
            slot.alpha.fill_(1.0)
        force(slot, alpha=1.0)
        cross_entropy(model(x), y).backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.host.stages[0].parameters())  # type: ignore[index, union-attr]
        assert all(p.grad is not None for p in seed.parameters())


# -- DESIGN 5.1 in small ------------------------------------------------------------------------------------------


class OpenLoopLearner(Learner):
    """Incubates by the straight-through form h + (s − sg(s)), as the earlier system did. Never use it elsewhere."""

    def gradients(self, batch: Batch, incubating: Sequence[Slot]) -> Tensor:
        def straight_through(slot: Slot) -> object:
            def hook(module: nn.Module, args: object, output: Tensor) -> Tensor:
                assert slot.seed is not None
                seen = slot.seed(output.detach())
                return output + (seen - seen.detach())

            return slot.module.register_forward_hook(hook)

        handles = [straight_through(slot) for slot in incubating]
        try:
            losses = super().gradients(batch, [])
        finally:
            for handle in handles:
                handle.remove()  # type: ignore[attr-defined]
        return torch.cat([losses, losses.expand(len(incubating))])


def final_accuracy(kind: type[Learner] | None, task: Task, seed: int) -> tuple[float, float]:
    """Accuracy after growing wide seeds in every slot, and the worst promise of a seed at the end of incubation."""
    torch.manual_seed(seed)
    rules = Rules(training_epochs=4, gradient_activity=0.0, shadow_benefit=-1e9, blending_epochs=2)
    model = attach(task.make_host(), task.slots, task.splits.train.x[:4], rules=rules, rng_seed=seed)
    optimizer = GrowingOptimizer(torch.optim.AdamW(model.host.parameters(), lr=task.learning_rate))
    feed = TensorFeed(task.splits.train, task.splits.val, batch_size=50, updates_per_epoch=15, seed=seed)
    learner = (kind or Learner)(model, optimizer, feed, task.loss, task.score, seed=seed)
    promise = 0.0
    for epoch in range(10):
        if epoch == 2 and kind is not None:
            for index in range(len(model.slots)):
                learner.apply(germinate(index, "wide"))
        record = run_epoch(learner)
        if record.measured.shadow_benefits:
            promise = min(contrast.accuracy for contrast in record.measured.shadow_benefits.values())
    return record.measured.accuracy, promise


@pytest.mark.parametrize("seed", [0, *(pytest.param(other, marks=pytest.mark.slow) for other in (1, 2))])
def test_open_loop_incubation_harms_and_closed_loop_does_not(seed: int) -> None:
    """DESIGN 5.1: a seed that never sees its own effect drifts without bound, so nobody may "simplify" it back."""
    task = load_task("mnist1d")
    none, _ = final_accuracy(None, task, seed)
    closed, closed_promise = final_accuracy(Learner, task, seed)
    opened, open_promise = final_accuracy(OpenLoopLearner, task, seed)
    assert open_promise < closed_promise - 10.0, "the open-loop seed has drifted before it is blended"
    assert closed > none + 2.0, "growth that saw its own effect pays"
    assert opened < none - 5.0, "growth that did not is worse than none"

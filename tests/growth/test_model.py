"""The growing model: what it does at each stage, what it costs, and what it refuses. Covers: R149"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from esper.actions import BLENDS
from esper.growth.attach import attach
from esper.growth.blueprints import blueprint, fitting, registry
from esper.growth.model import GrowingModel
from esper.growth.seed import parameter_count
from esper.lifecycle import IllegalTransitionError, Stage
from small_worlds import BUILT_IN, WORLDS, force, plant, same

MLP = BUILT_IN["mlp"]


@pytest.mark.parametrize("name", WORLDS)
def test_a_host_without_seeds_is_the_host_itself(name: str) -> None:
    world = WORLDS[name]
    model, x = world.grown().eval(), world.examples(3).x
    assert torch.equal(model(x), world.host().eval()(x))
    assert all(not module._forward_hooks for module in model.host.modules())
    assert list(model.host.state_dict()) == list(world.host().state_dict())


@pytest.mark.parametrize("name", BUILT_IN)
def test_insertion_never_moves_the_output_whatever_the_stage(name: str) -> None:
    """A new seed is the identity, so even at full strength nothing changes until it has learnt."""
    world = BUILT_IN[name]
    x = world.examples(5).x
    expected = world.grown().eval()(x)
    for candidate in fitting(world.grown().slots[0].shape):
        for blend in BLENDS:
            model = world.grown().eval()
            slot = model.slots[0]
            model.germinate(slot, candidate.name, blend, epoch=0)
            assert torch.equal(model(x), expected)
            for stage, alpha in ((Stage.BLENDING, 0.4), (Stage.HOLDING, 1.0)):
                force(slot, stage=stage, alpha=alpha)
                slot.set_alpha()
                torch.testing.assert_close(model(x), expected, atol=1e-6, rtol=1e-5)


@given(alpha=st.sampled_from([0.25, 0.5, 0.9, 1.0]), index=st.integers(0, 1))
def test_a_blending_seed_is_mixed_in_by_alpha(alpha: float, index: int) -> None:
    """Against the formula (1 − alpha)·h + alpha·seed(h), put together by hand for the two-stage MLP host."""
    model = MLP.grown()
    slot = model.slots[index]
    plant(model, slot, "mlp", Stage.BLENDING)
    force(slot, alpha=alpha)
    slot.set_alpha()
    h = MLP.examples(4).x
    host = model.host
    expected = h
    for i, stage in enumerate(host.stages):  # type: ignore[arg-type]
        hooks, stage._forward_hooks = stage._forward_hooks, type(stage._forward_hooks)()
        expected = stage(expected)
        stage._forward_hooks = hooks
        if i == index and slot.seed is not None:
            expected = (1 - alpha) * expected + alpha * slot.seed(expected)
    torch.testing.assert_close(model(h), host.head(expected), atol=1e-6, rtol=1e-5)  # type: ignore[operator]


def test_a_seed_is_the_same_whatever_the_global_random_state_and_does_not_move_it() -> None:
    seeds = []
    for state in (1, 2):
        model = MLP.grown(seed=3)
        torch.manual_seed(state)
        before = torch.get_rng_state()
        model.germinate(model.slots[0], "mlp", "gated", epoch=0)
        assert torch.equal(torch.get_rng_state(), before)
        seeds.append(model.seeds["0"])
    assert same(seeds[0].parameters(), seeds[1].parameters())
    other = MLP.grown(seed=4)
    other.germinate(other.slots[0], "mlp", "gated", epoch=0)
    assert not same(seeds[0].parameters(), other.seeds["0"].parameters())


def test_two_seeds_of_one_model_are_born_different() -> None:
    world = BUILT_IN["plain conv2d"]
    model = world.grown()
    for slot in model.slots:
        model.germinate(slot, "conv", "linear", epoch=0)
    assert not same(model.seeds["0"].parameters(), model.seeds["1"].parameters())
    assert [slot.life.seed for slot in model.slots] == [1, 2]


@pytest.mark.parametrize("name", WORLDS)
def test_the_cost_is_exact_and_known_before(name: str) -> None:
    world = WORLDS[name]
    for candidate in fitting(world.grown().slots[0].shape):
        model = world.grown()
        slot = model.slots[0]
        before = model.parameter_count
        assert before == sum(p.numel() for p in world.host().parameters())
        cost = model.cost(slot, candidate.name)
        model.germinate(slot, candidate.name, "gated", epoch=0)
        assert model.parameter_count == before + cost == sum(p.numel() for p in model.parameters())


def test_a_blueprint_with_constants_counts_them_and_trains_the_rest() -> None:
    before = {name: dict(entries) for name, entries in registry._REGISTRY.items()}
    try:

        @blueprint("constant_for_test", "dense")
        class Constant(nn.Module):
            """A frozen projection with a trained strength."""

            def __init__(self, channels: int, layout: str) -> None:
                super().__init__()
                self.fixed = nn.Parameter(torch.eye(channels), requires_grad=False)
                self.strength = nn.Parameter(torch.zeros(()))

            def forward(self, h: Tensor) -> Tensor:
                return h + self.strength * (h @ self.fixed)

        model = MLP.grown()
        slot = model.slots[0]
        size, cost = model.parameter_count, model.cost(slot, "constant_for_test")
        model.germinate(slot, "constant_for_test", "gated", epoch=0)
        assert model.parameter_count == size + cost
        assert all(p.requires_grad for p in model.seed_parameters(slot))
        assert slot.seed is not None
        assert len(model.seed_parameters(slot)) == len(list(slot.seed.parameters())) - 1
    finally:
        registry._REGISTRY.clear()
        registry._REGISTRY.update(before)
        parameter_count.cache_clear()


def test_the_budget_is_met_exactly_and_not_passed() -> None:
    model = MLP.grown()
    cost = model.cost(model.slots[0], "mlp")
    exact = MLP.grown(budget=model.host_parameters + cost)
    exact.germinate(exact.slots[0], "mlp", "gated", epoch=0)
    assert exact.parameter_count == exact.budget
    refusal = exact.why_not_grow(exact.slots[1], "norm")
    size = exact.parameter_count + exact.cost(exact.slots[1], "norm")
    assert refusal == f"norm at stages.1 would make {size:,} parameters; the budget is {exact.budget:,}"
    tight = MLP.grown(budget=model.host_parameters + cost - 1)
    with pytest.raises(IllegalTransitionError, match="the budget is"):
        tight.germinate(tight.slots[0], "mlp", "gated", epoch=0)
    assert (len(tight.seeds), tight.lifecycle.born) == (0, 0)


@pytest.mark.parametrize(
    ("blueprint_name", "message"),
    [
        ("conv", "blueprint 'conv' does not fit slot stages.0 (dense)"),
        ("nonsense", "blueprint 'nonsense' does not fit slot stages.0 (dense)"),
        ("lora", "blueprint 'lora' does not fit slot stages.0 (dense)"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(blueprint_name: str, message: str) -> None:
    model = MLP.grown(blueprints=["mlp", "norm"])
    assert [b.name for b in model.candidates(model.slots[0])] == ["norm", "mlp"]
    with pytest.raises(IllegalTransitionError) as refusal:
        model.germinate(model.slots[0], blueprint_name, "linear", epoch=0)
    assert str(refusal.value) == message


def test_the_limit_of_seeds_counts_kept_ones_and_frees_pruned_ones() -> None:
    model = MLP.grown(max_seeds=1)
    plant(model, model.slots[0], "norm", Stage.FOSSILIZED)
    assert model.why_not_grow(model.slots[1], "norm") == "the limit of 1 seeds is reached"
    model = MLP.grown(max_seeds=1)
    plant(model, model.slots[0], "norm", Stage.TRAINING)
    model.prune(model.slots[0], epoch=1, at_once=True)
    assert model.why_not_grow(model.slots[1], "norm") == ""
    assert "only an empty slot can germinate" in model.why_not_grow(model.slots[0], "norm")


def test_removing_a_seed_gives_back_the_output_without_it() -> None:
    for name, world in WORLDS.items():
        model, x = world.grown().eval(), world.examples(3).x
        before = model(x)
        plant(model, model.slots[-1], fitting(model.slots[-1].shape)[-1].name, Stage.HOLDING)
        model.eval()
        assert not torch.equal(model(x), before), name
        model.prune(model.slots[-1], epoch=9, at_once=True)
        assert torch.equal(model(x), before), name
        assert float(model.slots[-1].alpha) == 0.0


def test_a_seed_takes_the_precision_of_its_host() -> None:
    model = attach(MLP.host().double(), ["stages.0"], MLP.examples(2).x.double())
    plant(model, model.slots[0], "mlp", Stage.HOLDING)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert model(MLP.examples(2).x.double()).dtype == torch.float64


def test_a_seed_takes_the_precision_of_its_place_in_a_mixed_host() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 8)
            self.second = nn.Linear(8, 8).bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).bfloat16()).float()

    model = attach(Mixed(), ["second"], MLP.examples(2).x)
    plant(model, model.slots[0], "mlp", Stage.HOLDING)
    assert {p.dtype for p in model.seeds["0"].parameters()} == {torch.bfloat16}
    assert model(MLP.examples(2).x).dtype == torch.float32


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_a_seed_takes_the_memory_order_of_its_host(order: torch.memory_format) -> None:
    world = BUILT_IN["conv2d"]
    host = world.host().to(memory_format=order)  # type: ignore[call-overload]
    model = attach(host, world.slots, world.examples(2).x)
    model.germinate(model.slots[0], "conv", "linear", epoch=0)
    plain = world.grown()
    plain.germinate(plain.slots[0], "conv", "linear", epoch=0)
    kernels = [p for p in model.seeds.parameters() if p.dim() == 4 and p[0, 0].numel() > 1]
    assert kernels
    assert all(kernel.is_contiguous(memory_format=order) for kernel in kernels)
    assert same(model.seeds.parameters(), plain.seeds.parameters())  # and the numbers are the same


def test_modes_reach_the_seeds() -> None:
    model: GrowingModel = MLP.grown().eval()
    model.germinate(model.slots[0], "mlp", "linear", epoch=0)
    assert not any(module.training for module in model.modules())
    assert all(module.training for module in model.train().modules())

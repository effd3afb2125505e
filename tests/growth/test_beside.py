"""Seeds beside a linear layer: hidden units that read what the layer reads, not what it gives.

Covers: R149 (seed modules inside a host network that this repository does not define)
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import esper
from esper.growth import export
from esper.growth.attach import attach
from esper.growth.blueprints import SlotShape, blueprint, registry
from esper.growth.costs import seed_flops
from esper.growth.model import GrowingModel
from esper.growth.plain import grafted, plain_model
from esper.growth.seed import Seed, parameter_count
from esper.growth.slot import SlotMode
from esper.lifecycle import Stage
from esper.tasks.hosts import MLPHost
from small_worlds import force

X = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))


def host() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def planted(stage: Stage, name: str = "mlp_small", blend: str = "linear", alpha: float = 1.0) -> GrowingModel:
    """A seed with weights that matter, beside the first layer."""
    model = attach(host(), ["0", "2"], X[:2])
    model.germinate(model.slots[0], name, blend, epoch=0)
    seed = model.slots[0].seed
    assert seed is not None
    for parameter in seed.parameters():
        nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(parameter.numel()))
    force(model.slots[0], stage=int(stage), alpha=alpha)
    return model.eval()


def by_hand(model: GrowingModel, x: Tensor) -> Tensor:
    """W x + b + D relu(U x + u) + d, then the rest of the host."""
    assert model.slots[0].seed is not None
    seed: Any = model.slots[0].seed.body
    first, *rest = host().children()
    h = first(x) + F.relu(x @ seed.up.weight.T + seed.up.bias) @ seed.down.weight.T + seed.down.bias
    for layer in rest:
        h = layer(h)
    return h


def test_a_seed_beside_a_layer_reads_what_the_layer_reads() -> None:
    model = planted(Stage.HOLDING)
    torch.testing.assert_close(model(X), by_hand(model, X))
    assert model.slots[0].shape.source == 5
    assert model.slots[1].shape.source == 3


def test_what_the_layer_has_lost_is_there_for_the_seed() -> None:
    """A layer that gives nothing but zeros: after it no seed could tell examples apart, beside it one can."""
    model = planted(Stage.HOLDING)
    nn.init.zeros_(model.host[0].weight)  # type: ignore[index,union-attr,arg-type]
    assert len(model(X).unique(dim=0)) == len(X)


def test_it_takes_no_part_while_it_incubates_and_learns_from_the_detached_input() -> None:
    model, plain = planted(Stage.TRAINING), host()
    x = X.clone().requires_grad_()
    assert torch.equal(model(x), plain(X))
    with model.recording():
        model(x)
        with model.shadow(model.slots[0], x) as output:
            seed = model.slots[0].seed
            assert seed is not None
            torch.testing.assert_close(output, by_hand(model, X))
            wanted = [*seed.parameters(), x, *model.host[0].parameters()]  # type: ignore[index,union-attr]
            found = torch.autograd.grad(output.square().sum(), wanted, allow_unused=True)
    learning = len(list(seed.parameters()))
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in found[:learning])
    assert all(gradient is None for gradient in found[learning:]), "nothing of the host learns from a shadow pass"


def test_a_replay_equals_a_whole_pass_without_the_seed() -> None:
    model = planted(Stage.HOLDING)
    with model.recording(), torch.no_grad():
        whole = model(X)
        without = model.replay({model.slots[0]: SlotMode.OFF}, X)
    assert torch.equal(without, host()(X))
    assert not torch.equal(without, whole)


def test_gradients_reach_the_host_below_once_it_acts() -> None:
    model = attach(host(), ["0", "2"], X[:2])
    model.germinate(model.slots[1], "mlp", "linear", epoch=0)
    seed: Any = model.slots[1].seed
    nn.init.normal_(seed.body.down.weight)
    nn.init.zeros_(model.host[2].weight)  # type: ignore[index,union-attr,arg-type]  # the only way is through the seed
    force(model.slots[1], stage=int(Stage.HOLDING), alpha=1.0)
    model(X).square().sum().backward()
    assert model.host[0].weight.grad.abs().sum() > 0  # type: ignore[index,union-attr,operator]


@given(read=st.integers(1, 300), channels=st.integers(1, 40), name=st.sampled_from(["mlp_small", "mlp"]))
def test_the_price_is_about_that_of_a_seed_after_the_layer(read: int, channels: int, name: str) -> None:
    """Within half a unit, which is what rounding may do, and what is left of biases and the norm."""
    beside = parameter_count(name, SlotShape("dense", channels, source=read))
    after = parameter_count(name, SlotShape("dense", channels))
    assert abs(beside - after) <= 0.5 * (read + channels + 1) + 2 * channels + 8 * channels + 1 or beside <= (
        read + 2 * channels + 1
    ), "one unit is the least"


def test_flops_count_the_input_that_is_read() -> None:
    shape = SlotShape("dense", 3, source=5)
    hidden = round(2 * 3 * 2 * 3 / 8)
    assert parameter_count("mlp_small", shape) == hidden * (5 + 1) + 3 * (hidden + 1)
    assert seed_flops("mlp_small", shape) == 2 * hidden * (5 + 3)
    assert seed_flops("lora", shape) == seed_flops("lora", SlotShape("dense", 3))


@pytest.mark.parametrize("blend", ["linear", "gated"])
@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_the_plain_model_and_all_its_files_give_the_same(blend: str, alpha: float, tmp_path: Path) -> None:
    stage = Stage.FOSSILIZED if alpha == 1.0 else Stage.BLENDING
    model = planted(stage, blend=blend, alpha=alpha)
    model.slots[0].set_alpha()
    plain, expected = plain_model(model), model(X)
    export.save(plain, tmp_path / "saved", X[:2])
    esper.save_seeds(plain, tmp_path / "seeds")
    fresh = host()
    fresh.load_state_dict(plain.state_dict(), strict=False)
    versions = {
        "plain": plain,
        "copied": copy.deepcopy(plain),
        "pickled": pickle.loads(pickle.dumps(plain)),
        "traced": torch.fx.symbolic_trace(plain),
        "program": torch.export.load(tmp_path / "saved" / "model.pt2").module(),
        "loaded": esper.load(tmp_path / "saved", host=host()),
        "seeds alone": esper.load_seeds(fresh, tmp_path / "seeds").eval(),
        "seeds of a checkpoint": esper.load_seeds(copy.deepcopy(fresh_like(plain)), plain.state_dict()).eval(),
    }
    for name, one in versions.items():
        torch.testing.assert_close(one(X), expected, msg=lambda text, name=name: f"{name}: {text}")


def fresh_like(plain: nn.Module) -> nn.Module:
    model = host()
    model.load_state_dict(plain.state_dict(), strict=False)
    return model


def test_hosts_of_esper_have_seeds_after_their_layers_as_in_training() -> None:
    model = attach(MLPHost(4, (6, 6), 3), "auto", torch.randn(2, 4))
    assert [slot.shape.source for slot in model.slots] == [0] * len(model.slots)


def test_only_plain_linear_layers_of_vectors_have_a_place_beside_them() -> None:
    class Masked(nn.Linear):
        """As in MADE: some inputs are left out on purpose."""

    layers = nn.Sequential(Masked(5, 3), nn.ReLU(), nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    assert {slot.path: slot.shape.source for slot in esper.slots(layers, X[:2])} == {
        "0": 0,
        "1": 0,
        "2": 3,
        "3": 0,
        "4": 4,
    }
    series = nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 6), nn.Flatten(), nn.Linear(24, 2))
    found = {slot.path: slot.shape for slot in esper.slots(series, torch.randn(2, 4, 5), layouts={"*": "sequence"})}
    assert found["0"].source == found["2"].source == 0, "positions of a sequence are the matter of other seeds"


def test_a_blueprint_of_a_users_own_may_stand_beside_a_layer() -> None:
    before = {name: dict(entries) for name, entries in registry._REGISTRY.items()}
    try:

        @blueprint("bypass_for_test", "dense")
        class Bypass(nn.Module):
            """A linear map of what the layer reads."""

            def __init__(self, channels: int, layout: str, source: int = 0) -> None:
                super().__init__()
                self.reads_input = source > 0
                self.map = nn.Linear(source or channels, channels, bias=False)
                nn.init.zeros_(self.map.weight)

            def forward(self, h: Tensor, x: Tensor | None = None) -> Tensor:
                out: Tensor = h + self.map(h if x is None else x)
                return out

        model = planted(Stage.HOLDING, "bypass_for_test")
        seed: Any = model.slots[0].seed
        wide = host()
        wide[0].weight.data += seed.body.map.weight  # type: ignore[operator]
        torch.testing.assert_close(model(X), wide(X))

        with pytest.raises(ValueError, match=r"fails for an activation of \[2, 8\] \(dense\)"):

            @blueprint("forgetful_for_test", "dense")
            class Forgetful(nn.Module):
                """Takes `source`, and reads what it must not."""

                def __init__(self, channels: int, layout: str, source: int = 0) -> None:
                    super().__init__()
                    self.map = nn.Linear(source or channels, channels)

                def forward(self, h: Tensor, x: Tensor | None = None) -> Tensor:
                    return h + self.map(h)  # type: ignore[no-any-return]

        with pytest.raises(ValueError, match="must set reads_input = True where source is not 0, and only there"):

            @blueprint("unmarked_for_test", "dense")
            class Unmarked(Bypass):
                """Would be handed no input, and could be trained after the layer without anybody noticing."""

                def __init__(self, channels: int, layout: str, source: int = 0) -> None:
                    super().__init__(channels, layout, source)
                    del self.reads_input

    finally:
        registry._REGISTRY.clear()
        registry._REGISTRY.update(before)


def test_a_model_that_was_pickled_before_seeds_stood_beside_layers_runs() -> None:
    model = planted(Stage.FOSSILIZED, "norm")
    plain = plain_model(model).eval()
    for _, seed in grafted(plain):
        del vars(seed)["reads_input"]
    torch.testing.assert_close(plain(X), model.eval()(X))


def test_a_state_of_an_older_version_has_its_seed_after_the_layer() -> None:
    model = host()
    growth = esper.Growth(
        model, torch.optim.SGD(model.parameters(), lr=0.01), slots=["0"], validate=(X, torch.arange(12) % 2), epochs=9
    )
    network = growth.network_state()
    older = Seed("mlp", SlotShape("dense", 3), "linear")
    network["seeds"] = [{"slot": 0, "blueprint": "mlp", "blend": "linear", "tensors": older.state_dict(), "shadow": []}]
    growth._set_network(network)
    restored = growth.learner.model.slots[0].seed
    assert restored is not None
    assert (restored.shape.source, restored.reads_input) == (0, False)
    assert restored.size == older.size
    assert growth.learner.model.slots[0].shape == restored.shape  # history and FLOPs read the slot's

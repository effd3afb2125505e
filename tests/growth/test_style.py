"""Seeds take the activation and the norm of a user's host, and those of Esper's own hosts are what they always were."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import esper
from esper.actions import BLENDS
from esper.growth.attach import attach
from esper.growth.blueprints import Layout, SlotShape, Style, fitting
from esper.growth.export import save
from esper.growth.model import GrowingModel, Survey
from esper.growth.plain import grafts_of, plain_model
from esper.growth.saved import LoadError, read_graft
from esper.growth.seed import Seed, parameter_count
from esper.growth.seeds import load_seeds, save_seeds
from esper.lifecycle import Stage
from esper.tasks.hosts import Conv2dHost, MLPHost
from small_worlds import force, scramble

ROWS, IMAGES, SYMBOLS = torch.randn(4, 6), torch.randn(4, 3, 8, 8), torch.randn(4, 5, 6)


class Functional(nn.Module):
    """Everything as functions; a tanh that is a gate."""

    def __init__(self, act: Callable[[Tensor], Tensor], norm: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.act, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1), act, norm

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.norm(self.first(x)))
        return self.second(h * torch.tanh(h)).mean((2, 3))


class MyRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()


class TanhGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * F.relu(x) * (1 + F.relu(x).tanh())


class FrozenNorm(nn.BatchNorm1d):
    """It can normalise a batch of one, and a seed's own batch norm could not."""

    def train(self, mode: bool = True) -> FrozenNorm:
        return super().train(False)


def two(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), *between, nn.Linear(6, 3))


def of_functions(act: Callable[[Tensor], Tensor], norm: Callable[[Tensor], Tensor]) -> tuple[nn.Module, str, Tensor]:
    return Functional(act, norm), "first", IMAGES


def statistics_of(channels: int) -> tuple[Tensor, Tensor]:
    """Of a batch norm that never trains: it can normalise a batch of one."""
    return torch.zeros(channels), torch.ones(channels)


STYLES: dict[str, tuple[tuple[nn.Module, str, Tensor], Style]] = {
    "nothing": ((two(), "0", ROWS), Style()),
    "a module": ((two(nn.LeakyReLU(0.2)), "1", ROWS), Style("LeakyReLU")),
    "a batch norm": ((two(nn.BatchNorm1d(6), nn.SiLU(inplace=True)), "0", ROWS), Style("SiLU", "BatchNorm")),
    "tanh as a module": ((two(nn.LayerNorm(6), nn.Tanh()), "0", SYMBOLS), Style("Tanh", "LayerNorm")),
    "a norm of one's own": ((two(MyRMSNorm(), TanhGELU()), "0", SYMBOLS), Style("GELU", "RMSNorm")),
    "torch's": ((two(nn.RMSNorm(6), nn.GELU()), "0", SYMBOLS), Style("GELU", "RMSNorm")),
    "functions": (of_functions(F.relu, lambda x: F.group_norm(num_groups=4, input=x)), Style("ReLU", "GroupNorm", 4)),
    "a method": (of_functions(Tensor.relu, nn.BatchNorm2d(8)), Style("ReLU", "BatchNorm")),
    "a batch norm by a function": (of_functions(F.relu, lambda x: F.batch_norm(x, *statistics_of(8))), Style("ReLU")),
    "a bounded activation": ((two(nn.ReLU6()), "1", ROWS), Style("ReLU6")),
    "a batch norm that stays in evaluation": ((two(FrozenNorm(6), nn.ReLU()), "0", ROWS), Style("ReLU")),
    "over a whole example": (of_functions(F.mish, lambda x: F.layer_norm(x, x.shape[1:])), Style("Mish")),
}


@pytest.mark.parametrize("name", STYLES)
def test_a_style_is_what_the_host_uses(name: str) -> None:
    (model, path, example), expected = STYLES[name]
    (slot,) = attach(model, [path], example).slots
    assert slot.shape.style == expected
    assert str(expected) in str(esper.slots(model, example))
    assert esper.slots(model, example)[path][0].shape == slot.shape
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_nearest_layers_count_and_among_them_the_most_frequent() -> None:
    stem = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ELU(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    body = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.GELU(), nn.GroupNorm(2, 4), nn.GELU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, 2))
    model = nn.Sequential(stem, body, head)
    styles = {slot.path: slot.shape.style for slot in attach(model, ["0", "1.1", "1.2", "2.2"], IMAGES).slots}
    assert styles["0"] == Style("ELU", "BatchNorm")
    assert styles["1.1"] == Style("ReLU", "GroupNorm", 2)
    assert styles["1.2"] == Style("GELU", "GroupNorm", 2)
    # In the whole model the batch norm comes first; but a batch of one that it can normalise has one value here.
    assert styles["2.2"] == Style("GELU")


def test_an_earlier_seed_is_no_style() -> None:
    growing = attach(two(nn.ReLU()), ["1"], ROWS)
    growing.slots[0].shape = replace(growing.slots[0].shape, style=Style("Tanh", "RMSNorm"))
    growing.germinate(growing.slots[0], "mlp", "linear", epoch=0)
    force(growing.slots[0], stage=Stage.FOSSILIZED, alpha=1.0)
    assert attach(plain_model(growing), ["1"], ROWS).slots[0].shape.style == Style("ReLU")


# -- seeds in a style ---------------------------------------------------------------------------------------------

LAYOUTS: dict[Layout, tuple[int, ...]] = {"conv1d": (7,), "conv2d": (5, 3), "sequence": (9,), "dense": ()}
KINDS = [
    Style("Tanh", "BatchNorm"),
    Style("LeakyReLU", "GroupNorm", 4),
    Style("Mish", "LayerNorm"),
    Style("", "RMSNorm"),
]


@pytest.mark.parametrize("style", KINDS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_seed_in_a_style_keeps_the_promises(layout: Layout, style: Style) -> None:
    shape = SlotShape(layout, 12, LAYOUTS[layout], style=style)
    for one in fitting(shape):
        torch.manual_seed(0)
        seed, h = Seed(one.name, shape), shape.example(3)
        assert torch.equal(seed(h), h)
        seed(h).square().mean().backward()
        assert any(p.grad is not None and p.grad.norm() > 0 for p in seed.parameters())
        assert seed.size == parameter_count(one.name, shape)
        plain = parameter_count(one.name, replace(shape, style=Style()))
        assert seed.size < plain if style.norm == "RMSNorm" and "style" in one.arguments(shape) else seed.size <= plain


def test_the_classes_are_the_hosts() -> None:
    def kinds(name: str, shape: SlotShape) -> list[str]:
        return [type(module).__name__ for module in Seed(name, shape).body.modules()]

    images = SlotShape("conv2d", 12, (5, 3), style=Style("SiLU", "BatchNorm"))
    assert {"BatchNorm2d", "SiLU"} <= set(kinds("conv", images))
    assert "ReLU" not in kinds("conv", images)
    assert "BatchNorm1d" in kinds("bottleneck", replace(images, layout="conv1d", sizes=(5,)))
    assert "GroupNorm" in kinds("norm", images)  # that norm is what the seed adds
    assert "BatchNorm1d" in kinds("mlp", SlotShape("dense", 12, style=Style("", "BatchNorm")))
    assert "LayerNorm" in kinds("mlp", SlotShape("sequence", 12, (4,), style=Style("", "BatchNorm")))
    groups = [(c, Seed("conv", SlotShape("conv2d", c, (4, 4), style=Style("", "GroupNorm", 4)))) for c in (4, 6, 8)]
    assert [(c, m.num_groups) for c, s in groups for m in s.modules() if isinstance(m, nn.GroupNorm)] == [
        *((4, 1), (6, 1), (8, 4))
    ]


@pytest.mark.parametrize("style", KINDS, ids=str)
@pytest.mark.parametrize("layout", ["conv1d", "sequence"])
def test_no_style_shows_a_causal_seed_the_future(layout: Layout, style: Style) -> None:
    """In training mode, too, where a batch norm would mix all positions."""
    shape = SlotShape(layout, 12, (8,), "causal", style=style)
    axis = 2 if layout == "conv1d" else 1
    for one in fitting(shape):
        seed, h = Seed(one.name, shape).train(), shape.example(3)
        for parameter in seed.parameters():
            parameter.data = 0.5 * torch.randn_like(parameter)
        changed = h.clone()
        changed.narrow(axis, 5, 3).normal_()
        assert torch.equal(seed(changed).narrow(axis, 0, 5), seed(h).narrow(axis, 0, 5)), one.name
    assert len(fitting(shape)) == len(fitting(replace(shape, style=Style())))


# -- Esper's own hosts --------------------------------------------------------------------------------------------


def test_seeds_of_built_in_hosts_are_what_they_were() -> None:
    """Policies were trained with them. The digest is that of the commit before there were styles."""
    hosts = ((conv_host(), IMAGES, "stages.*"), (MLPHost(6, [8], 3), ROWS, "stages.*"))
    assert all(s.shape.style == Style() for model, x, slots in hosts for s in attach(model, [slots], x).slots)
    shapes = [
        *(SlotShape("conv1d", 12, (7,)), SlotShape("conv1d", 12, (7,), "causal"), SlotShape("conv2d", 12, (5, 3))),
        *(SlotShape("sequence", 12, (9,), "causal"), SlotShape("dense", 12)),
    ]
    digest = hashlib.sha256()
    torch.manual_seed(0)
    for shape in shapes:
        for one in fitting(shape):
            for blend in BLENDS:
                seed = Seed(one.name, shape, blend)
                digest.update(repr(seed.body).encode() + repr(one.arguments(shape)).encode())
                for name, value in seed.state_dict().items():
                    digest.update(name.encode() + value.numpy().tobytes())
    assert digest.hexdigest() == "3bdb2144aa1597c3785980c276b9d7bc68dbe076c0f5a4824ba35b749c49639d"


# -- files --------------------------------------------------------------------------------------------------------


def conv_host() -> Conv2dHost:
    return Conv2dHost(3, [4, 8], [3, 3], 3)


def in_style(style: Style) -> GrowingModel:
    """A host that can be saved with its source, as a user's would be, with a seed that acts in each slot."""
    torch.manual_seed(0)
    found = attach(conv_host(), ["stages.0", "stages.1"], IMAGES)
    slots = tuple((path, replace(shape, style=style)) for path, shape in found.survey.slots)
    growing = GrowingModel(found.detach(), Survey(slots, found.survey.taps))
    for slot, kind in zip(growing.slots, ("bottleneck", "attention"), strict=True):
        growing.germinate(slot, kind, "gated", epoch=0)
        scramble(slot)
        force(slot, stage=Stage.FOSSILIZED, alpha=1.0)
    growing(torch.randn(16, 3, 8, 8))  # running statistics
    return growing.eval()


@pytest.mark.parametrize("style", [Style("SiLU", "BatchNorm"), Style("Tanh", "RMSNorm")], ids=str)
def test_every_file_keeps_the_style(style: Style, tmp_path: Path) -> None:
    growing = in_style(style)
    expected = growing(IMAGES)
    save(growing, tmp_path / "whole", IMAGES)
    spec = importlib.util.spec_from_file_location("saved_in_style", tmp_path / "whole" / "model.py")
    assert spec is not None
    assert spec.loader is not None
    source: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(source)
    save_seeds(growing, tmp_path / "seeds")
    plain = plain_model(growing)
    host = conv_host().eval()
    host.load_state_dict(growing.host.state_dict())
    again = [
        esper.load(tmp_path / "whole"),
        source.load(),
        torch.export.load(tmp_path / "whole" / "model.pt2").module(),
        load_seeds(host, tmp_path / "seeds"),
    ]
    for model in again:
        torch.testing.assert_close(model(IMAGES), expected, rtol=1e-5, atol=1e-5)
    assert [record.arguments["style"] for record, _ in grafts_of(plain)] == [style.data()] * 2
    assert {"activation", "norm"} == style.data().keys()


@pytest.mark.parametrize("wrong", [{"activation": "Module"}, {"norm": "Linear"}, {"groups": "many"}, ["ReLU"]])
def test_a_style_of_a_damaged_file_is_refused(wrong: Any, tmp_path: Path) -> None:
    growing = in_style(Style("SiLU", "GroupNorm", 2))
    record, _ = grafts_of(plain_model(growing))[0]
    given = wrong if isinstance(wrong, list) else record.arguments["style"] | wrong
    damaged = read_graft(asdict(replace(record, arguments=record.arguments | {"style": given})), "here")
    plain = plain_model(growing)
    for holder in plain.modules():
        if getattr(holder, "grown", {}).get("path") == "stages.0":
            holder.grown = asdict(damaged)  # type: ignore[assignment]
    save_seeds(plain, tmp_path)
    growing.detach()
    with pytest.raises(LoadError, match="do not fit this Conv2dHost"):
        load_seeds(growing.host, tmp_path)


def test_a_checkpoint_of_another_style_is_refused_with_what_differs() -> None:
    tanh, relu = (plain_model(in_style(Style(name, "GroupNorm", 2))) for name in ("Tanh", "ReLU"))
    with pytest.raises(ValueError, match=r"has arguments \{'style': \{'activation': 'Tanh'.*'ReLU'"):
        tanh.load_state_dict(relu.state_dict())


def test_a_state_of_before_goes_on_with_the_seeds_it_had() -> None:
    def growth() -> esper.Growth:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
        return esper.Growth(
            model, torch.optim.AdamW(model.parameters()), slots=["2"], validate=data, epochs=9, controller="schedule"
        )

    data = torch.randn(90, 2), torch.arange(90) % 3
    first = growth()
    for _ in range(3):
        first.backward(data)
        first.step()
        first.end_epoch()
    state = first.state_dict()
    seed = first.learner.model.slots[0].seed
    assert seed is not None
    assert state["seeds"][0]["style"] == {"activation": "Tanh", "norm": "BatchNorm"}

    again = growth()
    again.load_state_dict(state)
    assert repr(again.learner.model.slots[0].seed) == repr(seed)
    del state["seeds"][0]["style"]
    own = Seed(seed.blueprint, replace(seed.shape, style=Style()), seed.blend)
    state["seeds"][0]["tensors"] = own.state_dict()
    older = growth()
    older._set_network(state)
    assert repr(older.learner.model.slots[0].seed) == repr(own) != repr(seed)

"""What the axes of a slot mean is read off the layers around it; where two readings fit, the user is asked.

Covers: R149
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from esper.growth.attach import AttachError, attach, inspect
from esper.growth.export import load, save
from esper.growth.plain import plain_model
from esper.lifecycle import Stage
from small_worlds import force


class LastMap(nn.Module):
    """As in Swin: [batch, height, width, channels] between its layers."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, 2, 2)
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.act = nn.GELU()
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.cut(x).permute(0, 2, 3, 1))
        return self.head(self.act(self.mix(h)).mean((1, 2)))


class NormFirst(nn.LayerNorm):
    """As in ConvNeXt: a LayerNorm of [batch, channels, height, width]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Block(nn.Module):
    """As in ConvNeXt: channels first outside, last inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(torch.relu(self.up(self.norm(self.conv(x).movedim(1, -1)))))
        return x + h.movedim(-1, 1)


class Custom(nn.Module):
    """Layers that say nothing about their axes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.body = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x @ self.weight)


def flat(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*layers)


def image(size: int = 8, channels: int = 3) -> Tensor:
    return torch.randn(4, channels, size, size)


CASES: dict[str, tuple[Callable[[], nn.Module], Tensor, dict[str, str]]] = {
    "channels last": (LastMap, image(), dict.fromkeys(("norm", "mix", "act"), "conv2d 6×4×4, channels last")),
    "equal sizes": (lambda: LastMap(4), image(), {"mix": "conv2d 4×4×4, channels last", "cut": "conv2d 4×4×4"}),
    "channels-first norm": (
        flat(nn.Conv2d(3, 6, 3), NormFirst(6), nn.GELU(), nn.Flatten(), nn.Linear(216, 2)),
        image(),
        {"1": "conv2d 6×6×6", "2": "conv2d 6×6×6"},
    ),
    "convnext": (
        lambda: nn.Sequential(nn.Conv2d(3, 6, 2, 2), Block(6), nn.ReLU(), nn.Conv2d(6, 5, 1)),
        image(),
        {"1": "conv2d 6×4×4", "2": "conv2d 6×4×4"},
    ),
    "convnext, equal sizes": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 2, 2), Block(4), nn.Conv2d(4, 5, 1)),
        image(),
        {"1": "conv2d 4×4×4"},
    ),
    "activation of a series": (
        flat(nn.Conv1d(3, 6, 3), nn.ReLU(), nn.Conv1d(6, 5, 3)),
        torch.randn(4, 3, 9),
        {"1": "conv1d 6×7"},
    ),
    "weight norm": (
        flat(weight_norm(nn.Conv1d(3, 6, 3)), nn.Tanh(), nn.BatchNorm1d(6)),
        torch.randn(4, 3, 9),
        {"0": "conv1d 6×7", "1": "conv1d 6×7"},
    ),
    "as many channels as pixels": (
        flat(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(8), nn.Flatten(), nn.Linear(8, 5)
        ),
        image(),
        {"2": "conv2d 8×8×8"},
    ),
    "a sequence": (
        flat(nn.Linear(3, 6), nn.Tanh(), weight_norm(nn.Linear(6, 6)), nn.LayerNorm(6)),
        torch.randn(4, 9, 3),
        {"1": "sequence 6×9", "2": "sequence 6×9"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_layouts_are_read_off_the_layers(name: str) -> None:
    make, x, expected = CASES[name]
    model = attach(make(), list(expected), x, visibility="both")
    assert {row.path: row.shape for row in inspect(model).rows} == expected


def test_what_nothing_says_is_asked_for_and_the_answer_counts() -> None:
    for x, first, last in (
        (torch.randn(4, 5, 4), "conv1d", "sequence"),
        (torch.randn(4, 6, 5, 4), "conv2d", "channels_last"),
    ):
        with pytest.raises(AttachError, match=f"do not say which axis .*pass layouts=.*'{first}'.*'{last}'"):
            attach(Custom(), ["body"], x)
        shapes = [
            attach(Custom(), ["body"], x, layouts={"body": name}, visibility="both").slots[0].shape
            for name in (first, last)
        ]
        assert [shape.channels for shape in shapes] == [x.shape[1], 4]
    with pytest.raises(AttachError, match=r"slot 'body' has 3 axes; channels_last is \[batch, height"):
        attach(Custom(), ["body"], torch.randn(4, 5, 4), layouts={"body": "channels_last"})
    with pytest.raises(AttachError, match="unknown layout 'pixels' for slot 'body': choose one of dense, conv1d"):
        attach(Custom(), ["body"], torch.randn(4, 5, 4), layouts={"*": "pixels"})


def test_layers_that_disagree_are_not_believed() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.a, self.b = nn.Identity(), nn.Conv2d(4, 4, 1), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.body(x)
            return self.a(h) + self.b(h)

    with pytest.raises(AttachError, match="the layers around it disagree about which axis is the channels"):
        attach(Both(), ["body"], torch.randn(4, 4, 4, 4))


@pytest.mark.parametrize("blend", ["linear", "gated"])
def test_a_channels_last_seed_acts_exports_and_loads(blend: str, tmp_path) -> None:
    torch.manual_seed(0)
    host, x = LastMap().eval(), image()
    before = host(x)
    model = attach(host, ["mix"], x)
    slot = model.slots[0]
    assert {b.name for b in model.candidates(slot)} >= {"conv", "depthwise", "attention"}
    model.germinate(slot, "conv", blend, epoch=0)
    force(slot, stage=Stage.FOSSILIZED, alpha=1.0)
    slot.set_alpha()
    model.eval()
    torch.testing.assert_close(model(x), before)  # nothing at birth
    with torch.no_grad():
        for parameter in model.seed_parameters(slot):
            parameter.normal_(std=0.2)
    grown = model(x)
    assert not torch.allclose(grown, before)
    torch.testing.assert_close(plain_model(model)(x), grown)
    save(model, tmp_path, x)
    torch.testing.assert_close(load(tmp_path, trust_program=True)(x), grown)
    torch.testing.assert_close(load(tmp_path, host=LastMap())(x), grown)

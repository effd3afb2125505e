"""`esper.slots` and `slots="auto"`: what is listed can be a slot, and costs what it says; the rule is fixed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_foreign_models import TCN, Recurrent, UNet, bert, gpt2, of_timm
from torch import Tensor, nn

import esper
from esper.growth.attach import AttachError, attach
from esper.growth.auto_slots import MOST_SLOTS
from esper.growth.costs import flops_per_example
from esper.growth.plain import plain_model
from esper.growth.seed import Seed
from esper.lifecycle import Stage
from small_worlds import force


class BasicBlock(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(before, width, 3, stride, 1), nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Conv2d(before, width, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.second(self.relu(self.norm(self.first(x)))) + self.downsample(x))


class ResNet(nn.Module):
    """A stem that is pooled, three stages of blocks, a head."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.layer1 = nn.Sequential(*(BasicBlock(4, 4, 1) for _ in range(blocks)))
        self.layer2 = nn.Sequential(BasicBlock(4, 8, 2), *(BasicBlock(8, 8, 1) for _ in range(blocks - 1)))
        self.layer3 = nn.Sequential(BasicBlock(8, 16, 2), *(BasicBlock(16, 16, 1) for _ in range(blocks - 1)))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer3(self.layer2(self.layer1(self.stem(x)))).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1), is_causal=True))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), Attention()
        self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.wte, self.drop = nn.Embedding(11, 8), nn.Dropout(0.1)
        self.h, self.norm = nn.ModuleList(Block() for _ in range(blocks)), nn.LayerNorm(8)

    def forward(self, symbols: Tensor) -> Tensor:
        x = self.drop(self.wte(symbols))
        for block in self.h:
            x = block(x)
        return self.norm(x) @ self.wte.weight.T  # a head without a module of its own


class Heads(nn.Module):
    """A body of its own class, and two heads, one of which is followed by nothing but a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Functional()
        self.one, self.two = nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        return self.one(h), self.two(h)


class Functional(nn.Module):
    """Activations that are no modules."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x).relu()).relu()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.embed, self.encoder = nn.Embedding(11, 8), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.encoder(self.embed(x)).mean(1))


def mlp() -> nn.Module:
    hidden = (nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1))
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(8, 3), nn.LogSoftmax(1))


def vgg() -> nn.Module:
    first = (nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(True), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(True))
    features = nn.Sequential(*first, nn.MaxPool2d(2), nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(True))
    head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 5))
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)


ROWS, IMAGES, SERIES = torch.randn(2, 4), torch.randn(2, 3, 16, 16), torch.randn(2, 12, 3)
SYMBOLS = torch.randint(11, (2, 12), generator=torch.Generator().manual_seed(0))
CASES: dict[str, tuple[Callable[[], nn.Module], Any, list[str]]] = {
    "MLP": (mlp, ROWS, ["1", "3"]),
    "heads": (Heads, ROWS, ["body.fc1", "body.fc2"]),
    "VGG": (vgg, IMAGES, ["0.3", "0", "3.0"]),
    "all convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        IMAGES,
        ["1"],
    ),
    "ResNet": (lambda: ResNet(2), IMAGES, ["layer1", "layer2", "layer3"]),
    "ResNet, a block a stage": (lambda: ResNet(1), IMAGES, ["layer1", "layer2", "layer3"]),
    "GPT": (lambda: GPT(3), SYMBOLS, ["h.0", "h.1", "h.2"]),
    "blocks in a Sequential": (
        lambda: nn.Sequential(nn.Embedding(11, 8), nn.Sequential(Block(), Block()), nn.Linear(8, 11)),
        SYMBOLS,
        ["1.0", "1.1"],
    ),
    "nn.TransformerEncoder": (Encoder, SYMBOLS, ["encoder.layers.0", "encoder.layers.1"]),
    "TCN": (TCN, SYMBOLS, ["layers.1"]),
    "LSTM": (lambda: Recurrent(nn.LSTM), SERIES, ["core"]),
    "U-Net": (UNet, IMAGES, ["down", "deep", "up"]),
    "transformers: GPT-2": (gpt2, SYMBOLS, ["transformer.h.0", "transformer.h.1"]),
    "transformers: BERT": (bert, SYMBOLS, ["bert.encoder.layer.0", "bert.encoder.layer.1"]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_rule(name: str) -> None:
    make, example, expected = CASES[name]
    model = make()
    growing = attach(model, "auto", example)
    assert [slot.path for slot in growing.slots] == expected
    found = esper.slots(model, example)
    assert [slot.path for slot in found.auto] == expected
    assert [slot.shape for slot in found.auto] == [slot.shape for slot in growing.slots]


@pytest.mark.parametrize("name", ["MLP", "ResNet", "nn.TransformerEncoder", "transformers: GPT-2"])
def test_everything_that_is_listed_can_be_a_slot_by_itself(name: str) -> None:
    make, example, _ = CASES[name]
    model = make()
    found = esper.slots(model, example)
    for slot in found[:: 1 + len(found) // 6]:
        (alone,) = attach(model, [slot], example).slots
        assert (alone.path, alone.shape) == (slot.path, slot.shape)
    paths = {path for path, _ in model.named_modules() if path}
    assert {slot.path for slot in found} | found.refused.keys() == paths


def hugging_face(name: str, **config: Any) -> Callable[[], nn.Module]:
    """By the name of its class, from random first weights."""

    def make() -> nn.Module:
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        kind = getattr(transformers, name)
        return kind(kind.config_class(**config))

    return make


WIDTH: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
LARGE = torch.randn(2, 3, 32, 32)
FOREIGN: dict[str, tuple[Callable[[], nn.Module], Any, list[str]]] = {
    "ViT": (
        hugging_face("ViTForImageClassification", **WIDTH, image_size=16, patch_size=4),
        IMAGES,
        ["vit.layers.0", "vit.layers.1"],
    ),
    "Swin": (
        hugging_face(
            *("SwinForImageClassification",),
            image_size=32,
            patch_size=2,
            embed_dim=8,
            depths=[1, 1],
            num_heads=[1, 2],
            window_size=4,
        ),
        LARGE,
        ["swin.encoder.layers.0", "swin.encoder.layers.1"],
    ),
    "ResNet": (
        hugging_face(
            *("ResNetForImageClassification",),
            embedding_size=8,
            hidden_sizes=[8, 16, 32],
            depths=[2, 2, 2],
            layer_type="basic",
        ),
        LARGE,
        [f"resnet.encoder.stages.{i}" for i in range(3)],
    ),
    "T5": (
        hugging_face("T5ForConditionalGeneration", vocab_size=11, d_model=16, d_kv=8, d_ff=32, num_layers=2),
        {"input_ids": SYMBOLS, "decoder_input_ids": SYMBOLS},
        ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"],
    ),
    "Llama": (
        hugging_face("LlamaForCausalLM", **WIDTH, vocab_size=11, num_key_value_heads=2),
        SYMBOLS,
        ["model.layers.0", "model.layers.1"],
    ),
    "DistilBERT": (
        hugging_face("DistilBertForSequenceClassification", vocab_size=11, dim=24, hidden_dim=32, n_layers=2),
        SYMBOLS,
        ["distilbert.transformer.layer.0", "distilbert.transformer.layer.1"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FOREIGN)
def test_the_rule_for_models_of_another_library(name: str) -> None:
    make, example, expected = FOREIGN[name]
    growing = attach(make(), "auto", example)
    assert [slot.path for slot in growing.slots] == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("resnet10t", ["layer1", "layer2", "layer3", "layer4"]),
        ("vit_tiny_patch16_224", [f"blocks.{i}" for i in range(12)]),
    ],
)
def test_the_rule_for_models_of_timm(name: str, expected: list[str]) -> None:
    model = of_timm(name)()
    assert [slot.path for slot in attach(model, "auto", torch.randn(2, 3, 224, 224)).slots] == expected


def test_a_model_that_has_grown_is_looked_at_as_its_host() -> None:
    growing = attach(mlp(), "auto", ROWS)
    growing.germinate(growing.slots[0], "mlp", "linear", epoch=0)
    force(growing.slots[0], stage=int(Stage.FOSSILIZED), alpha=1.0)
    again = plain_model(growing)
    found = esper.slots(again, ROWS)
    assert [(slot.path, slot.module) for slot in found.auto] == [("1", "Linear"), ("3", "Linear")]
    assert found.parameters > esper.slots(mlp(), ROWS).parameters


def test_many_blocks_are_thinned_out_evenly() -> None:
    slots = [slot.path for slot in attach(GPT(16), "auto", SYMBOLS).slots]
    assert slots == [f"h.{i}" for i in (0, 1, 3, 4, 5, 7, 8, 9, 11, 12, 13, 15)]
    assert len(slots) == MOST_SLOTS


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 3), lambda: nn.Sequential(nn.Linear(4, 3), nn.Softmax(1))])
def test_where_nothing_fits_it_is_one_line(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(
        AttachError, match=r"slots='auto' finds no place in .*esper.slots\(model, example\) lists"
    ) as said:
        attach(make(), "auto", ROWS)
    assert "\n" not in str(said.value)


def test_what_cannot_be_a_slot_is_named_with_its_reason() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.idle, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.layer(self.layer(x)))

    found = esper.slots(Twice(), ROWS)
    assert [slot.path for slot in found] == ["out"]
    assert "called 2 times" in found.refused["layer"]
    with pytest.raises(KeyError, match="called 2 times"):
        found["layer"]
    with pytest.raises(AttachError, match=r"no hidden layer .* \(slot 'layer' is called 2 times"):
        attach(Twice(), "auto", ROWS)


def test_an_autoregressive_vector_is_left_out() -> None:
    """MADE: a hidden vector whose entries stand for positions. A seed there would mix them."""

    class Masked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight.tril(-1 if self.bias is None else 0), self.bias)

    torch.manual_seed(0)
    made = nn.Sequential(Masked(6, 6, bias=False), nn.ReLU(), Masked(6, 6))
    found = esper.slots(made, torch.randn(2, 6))
    assert list(found) == []
    assert all("autoregressive" in reason for reason in found.refused.values())
    with pytest.raises(AttachError, match=r"finds no place .*autoregressive"):
        attach(made, "auto", torch.randn(2, 6))


# -- costs --------------------------------------------------------------------------------------------------------


def test_costs_are_those_of_the_seed_that_is_built() -> None:
    for name in ("MLP", "ResNet", "GPT", "TCN"):
        make, example, _ = CASES[name]
        model = make().eval()
        found = esper.slots(model, example)
        assert found.flops == flops_per_example(model, example)
        slot = found.auto[-1]
        for cost in slot.costs:
            seed = Seed(cost.blueprint, slot.shape)
            assert cost.parameters == sum(parameter.numel() for parameter in seed.parameters())
            inputs = slot.shape.inputs(2)[: 1 + seed.reads_input]
            assert cost.flops == flops_per_example(seed, inputs), cost
    (dense,) = esper.slots(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)), ROWS)["0"]
    lora = next(cost for cost in dense.costs if cost.blueprint == "lora")
    assert lora.flops == 2 * lora.parameters  # two matrices without biases: a product and a sum per weight


def test_the_table_of_costs_tells_layers_that_read_different_widths_apart() -> None:
    found = esper.slots(nn.Sequential(nn.Linear(20, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 20))
    shown = str(found)
    for path, column in (("0", "dense 4 from 20"), ("2", "dense 4 from 4")):
        assert column in shown
        (cost,) = (one for one in found[path][0].costs if one.blueprint == "mlp")
        assert f"{cost.parameters} / {cost.flops}" in shown


def test_a_growing_model_shows_what_its_seeds_cost() -> None:
    growing = attach(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)), ["0", "1"], ROWS)
    growing.germinate(growing.slots[0], "lora", "gated", epoch=0)
    first, second = esper.inspect(growing).rows
    seed = growing.slots[0].seed
    assert seed is not None
    assert first.flops == flops_per_example(seed, torch.randn(2, 6)) == 2 * (72 + 6 * 4 + 4)
    assert (second.flops, second.parameters) == (0, 0)
    assert "200" in str(esper.inspect(growing)).splitlines()[2].split()


# -- choosing and printing ----------------------------------------------------------------------------------------


def test_a_selection_can_be_passed_on() -> None:
    model = GPT(3)
    found = esper.slots(model, SYMBOLS)
    assert found["h.*"] == found.auto
    for chosen in (found["h.*"], [slot for slot in found if slot.module == "Block"], ["h.0", *found["h.*"][1:]]):
        assert [slot.path for slot in attach(model, chosen, SYMBOLS).slots] == ["h.0", "h.1", "h.2"]
    assert isinstance(found[0].path, str)
    assert found[0].shape.visibility == "causal"


def test_the_table_names_patterns_that_name_what_they_stand_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    model = ResNet(3)
    found = esper.slots(model, IMAGES)
    text = str(found)
    assert f"{sum(p.numel() for p in model.parameters()):,} parameters" in text
    assert "●  layer1 " in text
    assert "layer1.0 " in text  # "layer1.*" would be layer1.2 as well, which is layer1
    assert "layer1.* " not in text
    row = next(line for line in text.splitlines() if "layer3.*.first" in line)
    assert "(×3)" in row
    assert len(found["layer3.*.first"]) == 3
    assert max(map(len, text.splitlines())) <= 110
    assert "…" not in text
    assert repr(found) == text


def test_html_is_escaped() -> None:
    odd = type("A<script>", (nn.ReLU,), {})
    model = nn.Sequential()
    model.add_module("<b>&", nn.Linear(4, 4))
    model.add_module("odd", odd())
    model.add_module("out", nn.Linear(4, 2))
    html = esper.slots(model, ROWS)._repr_html_()
    assert "<script>" not in html
    assert "<b>" not in html
    assert "&lt;b&gt;&amp;" in html
    assert html.count("<table>") == html.count("</table>") == 2


@pytest.mark.parametrize(
    ("model", "example", "line"),
    [
        ([nn.Linear(4, 3)], ROWS, "the model must be a torch.nn.Module, not list"),
        (nn.ReLU(), ROWS, "the model has no parameters"),
        (nn.Linear(4, 3), torch.randn(2, 5), "Linear does not accept the example batch"),
        (nn.Linear(4, 3), torch.randn(0, 4), "at least one tensor with at least one row"),
        (nn.Linear(4, 3), None, "at least one tensor with at least one row"),
    ],
)
def test_what_cannot_be_looked_at_is_one_line(model: Any, example: Any, line: str) -> None:
    with pytest.raises(AttachError, match=line) as said:
        esper.slots(model, example)
    assert "\n" not in str(said.value)


def test_a_word_that_is_no_list_is_refused() -> None:
    with pytest.raises(AttachError, match=r"^slots must be a list of module paths, such as \['Auto'\], or 'auto'$"):
        attach(mlp(), "Auto", ROWS)
    with pytest.raises(AttachError, match="no slots were named"):
        attach(mlp(), esper.slots(mlp(), ROWS)[:0], ROWS)


def test_the_model_is_left_as_it_was() -> None:
    model = ResNet(1).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    esper.slots(model, IMAGES)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())


def test_one_slot_of_the_list_may_be_passed_by_itself() -> None:
    model = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 3))
    example = torch.randn(2, 2)
    found = esper.slots(model, example)
    assert [slot.path for slot in esper.attach(model, found[1], example).slots] == ["1"]


@pytest.mark.parametrize("columns", [110, 60])
def test_long_paths_are_listed_without_a_word_lost(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    model = nn.Sequential()
    model.add_module("a_stem_with_a_name_that_leaves_hardly_any_room_for_others", nn.Linear(4, 4))
    model.add_module("another_with_a_name_of_its_own", nn.Sequential(nn.LayerNorm(4), nn.Hardswish(), nn.Linear(4, 2)))
    lines = str(esper.slots(model, torch.randn(2, 4))).splitlines()
    assert max(map(len, lines)) <= columns
    words = " ".join(lines).replace(";", "").split()
    assert words.count("LayerNorm") == 5, "of a module, and of the style of four slots"
    assert "another_with_a_name_of_its_own.1" in words
    marks = [line for line in lines if "●" in line and "chosen" not in line]
    assert marks
    assert all(line.split()[1].startswith("a") for line in marks), "a mark stands beside its slot"


def test_an_example_that_is_an_array_is_refused_with_the_cure() -> None:
    with pytest.raises(AttachError, match=r"at least one row: of an array or a frame make one, torch.tensor\("):
        esper.slots(nn.Linear(4, 2), torch.randn(2, 4).numpy())

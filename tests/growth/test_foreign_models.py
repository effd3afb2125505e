"""Models of other libraries, grown by a schedule: what is exported is what was measured, it loads again, nothing leaks.

Covers: R149
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import esper
from esper.growth.attach import attach
from esper.growth.plain import plain_model
from esper.lifecycle import Rules, Stage
from esper.policy.schedule import FixedSchedule, Planting
from small_worlds import force

QUICK = Rules(training_epochs=1, blending_epochs=1, prune_age=1, shadow_benefit=-100.0, contribution=-100.0)
AROUND = {"conv1d": "conv", "conv2d": "depthwise", "sequence": "attention", "dense": "mlp"}
"""For each layout a kind of seed that looks at other positions, if there is one."""
CLASSES, SYMBOLS, TIME = 5, 11, 12


def timm() -> Any:
    """The library, also beside a torchvision that was built for a GPU: its operators are declared, and not used."""
    if find_spec("timm") is None:
        pytest.skip("timm is not installed: pip install timm")
    declared = torch.library.Library("torchvision", "FRAGMENT")
    for _ in range(20):
        try:
            return import_module("timm")
        except RuntimeError as error:
            missing = re.search(r"operator torchvision::(\w+) does not exist", str(error))
            if missing is None:
                pytest.skip(f"timm cannot be imported here: {error}")
            declared.define(f"{missing[1]}(Tensor x) -> Tensor")
            _DECLARED.append(declared)
            for name in [name for name in sys.modules if name.partition(".")[0] in ("timm", "torchvision")]:
                del sys.modules[name]
    raise AssertionError("torchvision wants more operators than it has")


_DECLARED: list[torch.library.Library] = []
"""A declaration holds as long as its object lives."""


def of_timm(name: str, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: timm().create_model(name, pretrained=False, num_classes=CLASSES, **settings)


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=SYMBOLS, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1
        )
    )


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=SYMBOLS,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=32,
            num_labels=CLASSES,
        )
    )


class TCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, 8)
        self.layers = nn.ModuleList(nn.Conv1d(8, 8, 3, dilation=2**i) for i in range(2))
        self.head = nn.Linear(8, SYMBOLS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x).transpose(1, 2)
        for layer in self.layers:
            h = torch.relu(layer(F.pad(h, (2 * layer.dilation[0], 0))))
        return self.head(h.transpose(1, 2))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.core = kind(3, 8, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.core(x)[0][:, -1])


class UNet(nn.Module):
    """A class for each pixel, over a way down and up again with a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, stride=2)
        self.up, self.head = nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv2d(16, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = torch.relu(self.down(x))
        return self.head(torch.cat([high, self.up(torch.relu(self.deep(high)))], 1))


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    slots: tuple[str, ...]
    data: Callable[[], tuple[Tensor, Tensor]]
    visibility: str
    loss: Callable[..., Tensor] | None = None
    metric: Callable[..., Tensor] | None = None


def images(size: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(12, 3, size, size), torch.arange(12) % CLASSES)


def text() -> tuple[Tensor, Tensor]:
    lines = torch.randint(0, SYMBOLS, (24, TIME + 1))
    return lines[:, :-1].contiguous(), lines[:, 1:].contiguous()


def steps() -> tuple[Tensor, Tensor]:
    return torch.randn(24, TIME, 3), torch.arange(24) % CLASSES


def logits(outputs: Any) -> Tensor:
    return outputs if isinstance(outputs, Tensor) else outputs.logits


def symbol_loss(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits(outputs).flatten(0, -2), targets.flatten())


def symbols_right(outputs: Any, targets: Tensor) -> Tensor:
    return 100.0 * (logits(outputs).argmax(-1) == targets).float().reshape(len(targets), -1).mean(1)


def pixels_right(outputs: Tensor, targets: Tensor) -> Tensor:
    return 100.0 * (outputs.argmax(1) == targets).float().flatten(1).mean(1)


LANGUAGE: dict[str, Any] = {"data": text, "visibility": "causal", "loss": symbol_loss, "metric": symbols_right}
CASES: dict[str, Case] = {
    "resnet18": Case(of_timm("resnet18"), ("layer1", "layer4.1"), images(32), "both"),
    "mobilenetv3": Case(of_timm("mobilenetv3_small_050"), ("blocks.1.0", "blocks.3.0"), images(64), "both"),
    "convnext": Case(of_timm("convnext_atto"), ("stages.0", "stages.2.blocks.1"), images(64), "both"),
    "vit": Case(of_timm("vit_tiny_patch16_224", img_size=32, depth=3), ("blocks.0", "blocks.2"), images(32), "both"),
    "swin": Case(
        of_timm("swin_tiny_patch4_window7_224", img_size=56, embed_dim=24, depths=(1, 1, 1, 1)),
        ("layers.0.blocks.0", "layers.2"),
        images(56),
        "both",
    ),
    "gpt2": Case(gpt2, ("transformer.h.*",), **LANGUAGE),
    "bert": Case(
        bert,
        ("bert.encoder.layer.*",),
        lambda: (torch.randint(0, SYMBOLS, (24, TIME)), torch.arange(24) % CLASSES),
        "both",
        symbol_loss,
        symbols_right,
    ),
    "tcn": Case(TCN, ("layers.*",), **LANGUAGE),
    "lstm": Case(lambda: Recurrent(nn.LSTM), ("core",), steps, "causal"),
    "gru": Case(lambda: Recurrent(nn.GRU), ("core",), steps, "causal"),
    "unet": Case(
        UNet,
        ("down", "deep"),
        lambda: (torch.randn(12, 3, 8, 8), torch.randint(0, CLASSES, (12, 8, 8))),
        "both",
        F.cross_entropy,
        pixels_right,
    ),
}
LARGE = ("resnet18", "mobilenetv3", "convnext", "vit", "swin")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LARGE else n for n in CASES])
def test_a_foreign_model_grows_and_comes_back_as_measured(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model, (x, y) = case.make(), case.data()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    grown = esper.grow(
        model,
        (x, y),
        (x, y),
        slots=case.slots,
        controller=FixedSchedule("all", [Planting(0, "*", AROUND)]),
        epochs=6,
        updates_per_epoch=2,
        batch_size=8,
        rules=QUICK,
        loss=case.loss,
        metric=case.metric,
        device="cpu",
    )
    stories = grown.history.seeds()
    assert len(stories) == len(grown.history.slots)
    assert {story.fate for story in stories} == {Stage.FOSSILIZED}
    assert {story.blueprint for story in stories} <= set(AROUND.values())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with torch.no_grad():
        out = logits(grown.model(x))
    score = (case.metric or symbols_right)(out, y).mean().item()
    assert score == pytest.approx(grown.validation.accuracy, abs=1e-3)
    _loads_again(case, grown, x, out, tmp_path)
    if case.visibility == "causal" and out.dim() == 3:
        _reads_nothing_later(grown.model, x, out)


def _loads_again(case: Case, grown: esper.Grown, x: Tensor, out: Tensor, folder: Path) -> None:
    grown.save(folder)
    again = esper.load(folder, host=case.make())
    with torch.no_grad():
        torch.testing.assert_close(logits(again(x)), out, rtol=1e-4, atol=1e-4)


def _reads_nothing_later(model: nn.Module, x: Tensor, out: Tensor) -> None:
    for t in range(1, TIME):
        other = torch.cat([x[:, :t], (x[:, t:] + 1) % SYMBOLS], 1)
        with torch.no_grad():
            torch.testing.assert_close(logits(model(other))[:, :t], out[:, :t], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(logits(model(x[:, :t])), out[:, :t], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LARGE else n for n in CASES])
def test_what_each_slot_of_a_foreign_model_may_read(name: str) -> None:
    case = CASES[name]
    model = attach(case.make(), list(case.slots), case.data()[0][:2])
    assert {slot.shape.visibility for slot in model.slots} == {case.visibility}
    if name == "swin":
        assert all(slot.shape.channels_last for slot in model.slots)
        assert [slot.shape.channels for slot in model.slots] == [24, 96]


# -- Hugging Face: masks and caches ---------------------------------------------------------------------------------


def _with_attention(model: nn.Module, slots: list[str], example: Any) -> nn.Module:
    growing = attach(model.eval(), slots, example)
    for slot in growing.slots:
        growing.germinate(slot, "attention", "gated", epoch=0)
        with torch.no_grad():
            for parameter in growing.seed_parameters(slot):
                parameter.normal_(std=0.3)
        force(slot, stage=Stage.FOSSILIZED, alpha=1.0)
        slot.set_alpha()
    return plain_model(growing).eval()


def test_padding_does_not_change_what_bert_says() -> None:
    torch.manual_seed(0)
    short = torch.randint(0, SYMBOLS, (3, 8))
    padded = F.pad(short, (0, 4), value=3)
    mask = F.pad(torch.ones_like(short), (0, 4))
    example = {"input_ids": padded, "attention_mask": mask}
    model = _with_attention(bert(), ["bert.encoder.layer.*"], example)
    with torch.no_grad():
        expected = model(input_ids=short, attention_mask=torch.ones_like(short)).logits
        torch.testing.assert_close(model(**example).logits, expected, rtol=1e-4, atol=1e-5)
        unmasked = model(input_ids=padded, attention_mask=torch.ones_like(mask)).logits
    assert not torch.allclose(unmasked, expected, atol=1e-4)


def test_modules_that_see_neither_mask_nor_cache_get_seeds_of_single_positions() -> None:
    ids = torch.randint(0, SYMBOLS, (3, 8))
    example = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for model, path in ((bert(), "bert.encoder.layer.0.output"), (gpt2(), "transformer.h.0.mlp")):
        growing = attach(model, [path], example)
        assert growing.slots[0].shape.visibility == "position"
        assert "attention" not in {b.name for b in growing.candidates(growing.slots[0])}


@pytest.mark.filterwarnings("ignore")
def test_generation_with_and_without_a_cache_never_differs() -> None:
    torch.manual_seed(0)
    prompt = torch.randint(2, SYMBOLS, (2, 5))
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    plain = gpt2().eval()
    plain.generation_config.eos_token_id = None
    assert torch.equal(plain.generate(prompt, **settings), plain.generate(prompt, use_cache=False, **settings))
    grown = _with_attention(plain, ["transformer.h.*"], prompt)
    without = grown.generate(prompt, use_cache=False, **settings)
    assert torch.equal(grown.generate(prompt, **settings), without)  # as it is by default
    with pytest.raises(RuntimeError, match=r"must see all positions, but .*use_cache=False"):
        grown.generate(prompt, use_cache=True, **settings)
    greedy = prompt
    for _ in range(8):
        with torch.no_grad():
            greedy = torch.cat([greedy, grown(greedy, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(without, greedy)
    assert plain.generation_config.use_cache  # the user's own model keeps its settings


@pytest.mark.filterwarnings("ignore")
def test_seeds_of_single_positions_keep_the_cache() -> None:
    torch.manual_seed(0)
    model, prompt = gpt2().eval(), torch.randint(2, SYMBOLS, (2, 5))
    growing = attach(model, ["transformer.h.0"], prompt)
    growing.germinate(growing.slots[0], "mlp", "gated", epoch=0)
    force(growing.slots[0], stage=Stage.FOSSILIZED, alpha=1.0)
    growing.slots[0].set_alpha()
    exported = plain_model(growing).eval()
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert exported.config.use_cache
    with_cache = exported.generate(prompt, use_cache=True, **settings)
    assert torch.equal(with_cache, exported.generate(prompt, use_cache=False, **settings))


def t5() -> tuple[nn.Module, list[str]]:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"vocab_size": SYMBOLS, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config), ["encoder.block.0", "decoder.block.0"]


def bart() -> tuple[nn.Module, list[str]]:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in BART_SIZES.items()}
    settings = {"vocab_size": SYMBOLS, "d_model": 16, "max_position_embeddings": 32, "decoder_start_token_id": 2}
    model = transformers.BartForConditionalGeneration(transformers.BartConfig(**settings, **sizes))
    return model, ["model.encoder.layers.0", "model.decoder.layers.0"]


BART_SIZES = {"layers": 1, "attention_heads": 2, "ffn_dim": 32}


@pytest.mark.parametrize("make", [t5, bart])
def test_an_encoder_decoder_is_looked_at_as_it_is_trained(make: Callable[[], tuple[nn.Module, list[str]]]) -> None:
    """Its decoder reads the labels, one step late: without them it would look as if it read both ways."""
    torch.manual_seed(0)
    model, slots = make()
    ids, labels = torch.randint(3, SYMBOLS, (8, TIME)), torch.randint(3, SYMBOLS, (8, 9))
    growing = attach(model, slots, {"input_ids": ids, "labels": labels})
    assert [slot.shape.visibility for slot in growing.slots] == ["both", "causal"]
    batches = [{"input_ids": ids, "labels": labels}]
    schedule = FixedSchedule("all", [Planting(0, "*", AROUND)])
    grown = esper.grow(model, batches, batches, slots=slots, controller=schedule, epochs=5, rules=QUICK, device="cpu")
    assert len(grown.history.seeds()) == 2
    other = torch.cat([labels[:, :4], labels[:, 4:].flip(1)], 1)
    with torch.no_grad():
        before, after = (grown.model(input_ids=ids, labels=part).logits[:, :5] for part in (labels, other))
    torch.testing.assert_close(before, after, rtol=1e-4, atol=1e-5)

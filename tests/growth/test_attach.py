"""Any `nn.Module` can grow, by module path; what cannot work is refused in one line that says why.

Covers: R149 (seed modules inside a host network that this repository does not define)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from esper.actions import Action, Op
from esper.engine.learner import Learner
from esper.engine.optimizer import GrowingOptimizer
from esper.growth.attach import AttachError, attach, survey
from esper.growth.blueprints import Style, fitting
from esper.growth.model import GrowingModel
from esper.growth.plain import plain_model
from esper.growth.slot_list import slots
from esper.lifecycle import Stage
from esper.tasks.data import Split
from esper.tasks.feed import LoaderFeed, TensorFeed
from esper.tasks.registry import cross_entropy, percent_correct
from small_worlds import EAGER, FOREIGN, PATIENT, WORLDS, force, germinate, plant, run_epoch, same

# -- three models that this repository does not define ------------------------------------------------------------


class BasicBlock(nn.Module):
    """As in torchvision: in-place ReLU, in-place skip."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)  # called twice: `layer1.0.relu` cannot be a slot


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(BasicBlock(4, 4), BasicBlock(4, 4))
        self.layer2 = nn.Sequential(BasicBlock(4, 8, 2), BasicBlock(8, 8))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class EncoderClassifier(nn.Module):
    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=batch_first)
        self.batch_first = batch_first
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        if not self.batch_first:
            return self.head(self.encoder(x.transpose(0, 1)).mean(0))
        return self.head(self.encoder(x).mean(1))


def learner_of(model: GrowingModel, inputs: Any, targets: Tensor, loss: Any = cross_entropy, **kw: Any) -> Learner:
    if isinstance(inputs, Tensor):
        split = Split(inputs, targets)
        feed: Any = TensorFeed(split, split, batch_size=8, updates_per_epoch=2)
    else:
        feed = LoaderFeed([(inputs, targets)] * 2, [(inputs, targets)], torch.device("cpu"))
    optimizer = GrowingOptimizer(torch.optim.AdamW(model.host.parameters(), lr=3e-3), warmup_updates=1)
    return Learner(model, optimizer, feed, loss, kw.pop("score", percent_correct), **kw)


def grow_through_all_stages(learner: Learner, slot: int, blueprint: str) -> None:
    """Germinate, train, blend, hold, fossilize, and train on."""
    record = run_epoch(learner, germinate(slot, blueprint))
    assert record.effect.changed, record.effect.message
    life = learner.model.slots[slot].life
    for _ in range(6):
        if life.stage is Stage.HOLDING:
            break
        run_epoch(learner)
    assert life.stage is Stage.HOLDING
    assert run_epoch(learner, Action(Op.FOSSILIZE, slot)).effect.changed
    seed = learner.model.seeds[str(slot)]
    before = [p.clone() for p in (*learner.model.host.parameters(), *seed.parameters())]
    assert torch.isfinite(torch.tensor(run_epoch(learner).trained.loss))
    after = [*learner.model.host.parameters(), *seed.parameters()]
    moved = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    trainable = [p.requires_grad for p in after]
    assert moved == trainable, "all that is trainable, and nothing else, is trained"


def test_a_resnet_grows_by_path_and_by_pattern() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(16, 3, 8, 8), torch.randint(3, (16,))
    model = attach(ResNet(), ["layer2.1", "layer1.*", "conv1", "bn1"], x, rules=EAGER)
    assert [slot.path for slot in model.slots] == ["conv1", "bn1", "layer1.0", "layer1.1", "layer2.1"]
    assert {slot.shape.layout for slot in model.slots} == {"conv2d"}
    assert (model.slots[4].shape.channels, model.slots[4].shape.sizes) == (8, (4, 4))
    learner = learner_of(model, x, y)
    for slot, name in ((4, "conv"), (1, "depthwise"), (2, "squeeze_excite")):
        grow_through_all_stages(learner, slot, name)
    assert len(model.seeds) == 3


def test_a_transformer_encoder_grows() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(16, 5, 8), torch.randint(3, (16,))
    model = attach(EncoderClassifier(), ["encoder.layers.*"], x, rules=EAGER)
    assert [(s.shape.layout, s.shape.channels, s.shape.sizes) for s in model.slots] == [("sequence", 8, (5,))] * 3
    learner = learner_of(model, x, y)
    for slot, name in ((1, "attention"), (0, "mlp_small")):
        grow_through_all_stages(learner, slot, name)


def test_a_language_model_of_transformers_grows_with_its_tied_weights() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=8, n_embd=8, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    host = transformers.GPT2LMHeadModel(config)
    assert host.lm_head.weight is host.transformer.wte.weight
    symbols = torch.randint(11, (8, 7))
    inputs, targets = {"input_ids": symbols[:, :-1], "use_cache": False}, symbols[:, 1:]
    model = attach(host, ["transformer.h.*"], inputs, rules=EAGER)
    assert [slot.shape.layout for slot in model.slots] == ["sequence"] * 3
    assert model.host_parameters == sum(p.numel() for p in host.parameters())
    learner = learner_of(
        model,
        inputs,
        targets,
        loss=lambda out, y: cross_entropy(out.logits, y),
        score=lambda out, y: percent_correct(out.logits, y),
    )
    grow_through_all_stages(learner, 1, "lora")
    grow_through_all_stages(learner, 2, "attention")
    assert host.lm_head.weight is host.transformer.wte.weight


def test_frozen_parameters_stay_as_they_are_and_a_wholly_frozen_host_can_grow() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(16, 5, 8), torch.randint(3, (16,))
    host = EncoderClassifier()
    host.encoder.layers[0].requires_grad_(False)
    grow_through_all_stages(learner_of(attach(host, ["encoder.layers.1"], x, rules=EAGER), x, y), 0, "mlp")

    host = EncoderClassifier()
    host.requires_grad_(False)
    learner = learner_of(attach(host, ["encoder.layers.1"], x, rules=EAGER), x, y)
    run_epoch(learner)  # nothing to train yet, and that is no error
    grow_through_all_stages(learner, 0, "mlp")


def test_checkpointed_blocks_and_sparse_embeddings_train_as_well() -> None:
    class Economical(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(9, 8, sparse=True)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh()) for _ in range(3))
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.embedding(x).mean(1)
            for block in self.blocks:
                h = checkpoint(block, h, use_reentrant=False) if self.training else block(h)
            return self.head(h)

    torch.manual_seed(0)
    x, y = torch.randint(9, (16, 4)), torch.randint(3, (16,))
    hosts = []
    for grow in (False, True):
        torch.manual_seed(1)
        model = attach(Economical(), ["blocks.*"], x, rules=PATIENT)
        learner = learner_of(model, x, y)
        learner.optimizer = GrowingOptimizer(torch.optim.SGD(model.host.parameters(), lr=0.1))
        for epoch in range(4):
            record = run_epoch(learner, germinate(1, "mlp") if grow and epoch == 1 else None)
            assert record.trained.host_gradient > 0.0
        hosts.append(model.host)
    assert same(hosts[0].parameters(), hosts[1].parameters())


# -- what is refused, and why -------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Outputs of every kind that a slot cannot be."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.twice = nn.Linear(6, 6)
        self.parts = nn.ModuleList([nn.Linear(6, 6)])
        self.integers = Returns(lambda x: x.argmax(1))
        self.five = Returns(lambda x: x[:, None, None, None])
        self.turned = Returns(lambda x: x.transpose(0, 1))
        self.mapping = Returns(lambda x: {"x": x})
        self.nothing = Returns(lambda x: ())
        self.scalar = Returns(lambda x: x.mean())
        self.unused = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.parts[0](self.twice(self.twice(self.stem(x))))
        for part in (self.integers, self.five, self.turned, self.mapping, self.nothing, self.scalar):
            part(x)
        return x


class Returns(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


@pytest.mark.parametrize(
    ("slots", "options", "message"),
    [
        (["stemm"], {}, "slot 'stemm' matches no module of Odd; did you mean stem?"),
        (["zzz*"], {}, "slot 'zzz*' matches no module of Odd; it has modules such as stem, twice, parts"),
        (["parts"], {}, "slot 'parts' is never called in a forward pass"),
        (["unused"], {}, "slot 'unused' is never called in a forward pass"),
        (["twice"], {}, "slot 'twice' is called 2 times in a forward pass; a slot needs exactly one call"),
        (["integers"], {}, "slot 'integers' gives torch.int64 values: a seed needs floating-point activations"),
        (["five"], {}, "slot 'five' gives 5 axes; slots of 2, 3 or 4 axes can grow"),
        (["turned"], {}, "slot 'turned' gives shape [6, 3] for a batch of 3: its first axis must be the batch"),
        (["mapping"], {}, "slot 'mapping' gives a dict: a slot needs a tensor, or a tuple that starts with one"),
        (["nothing"], {}, "slot 'nothing' gives a tuple: a slot needs a tensor"),
        (["scalar"], {}, "slot 'scalar' gives shape [] for a batch of 3: its first axis must be the batch"),
        ("stem", {}, "slots must be a list of module paths, such as ['stem']"),
        ([1], {}, "slots must be module paths, such as ['1'], or slots that esper.slots lists, not 1"),
        ([nn.ReLU()], {}, "slots must be module paths, such as ['1'], or slots that esper.slots lists, not a ReLU"),
        ([], {}, "no slots were named; this model has modules such as stem, twice"),
        (["stem"], {"blueprints": ["mlpp"]}, "unknown blueprint 'mlpp': choose some of"),
        (["stem"], {"layouts": {"stem": "denser"}}, "unknown layout 'denser' for slot 'stem': choose one of"),
        (["stem"], {"layouts": {"st*": "conv2d"}}, "slot 'stem' has 2 axes; conv2d is [batch, channels, height"),
        (["stem"], {"example": torch.zeros(2, 5)}, "Odd does not accept the example batch (torch.float32 [2, 5]): "),
        (["stem"], {"example": torch.zeros(0, 6)}, "the example batch must contain at least one tensor"),
        (["stem"], {"example": {"y": torch.zeros(2, 6)}}, "Odd does not accept the example batch"),
        (["stem"], {"example": "text"}, "the example batch must contain at least one tensor"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason_in_one_line(slots: Any, options: dict, message: str) -> None:
    example = options.pop("example", None) if "example" in options else torch.zeros(4, 6)
    with pytest.raises(AttachError) as refusal:
        attach(Odd(), slots, example, **options)
    assert str(refusal.value).startswith(message)
    assert "\n" not in str(refusal.value)


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(AttachError, match="the model has no parameters: there is nothing to train"):
        attach(nn.Sequential(nn.ReLU()), ["0"], torch.zeros(2, 3))


def test_a_sequence_first_transformer_is_refused_with_the_cure() -> None:
    with pytest.raises(AttachError, match="build them with batch_first=True"):
        attach(EncoderClassifier(batch_first=False), ["encoder.layers.0"], torch.randn(4, 5, 8))


def test_torchs_encoder_with_its_nested_tensors_grows() -> None:
    """What torch's own encoder makes of a padding mask, in evaluation mode and by default: no seed can act on it."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            return self.encoder(x, src_key_padding_mask=padding)

    padding = torch.zeros(4, 5, dtype=torch.bool)
    padding[:, 4] = True
    example = (torch.randn(4, 5, 8), padding)
    model = Padded()
    assert "encoder.layers.0" in [slot.path for slot in slots(model, example).auto]
    assert model.encoder.use_nested_tensor, "looking changes nothing"
    growing = attach(model, ["encoder.layers.0"], example)
    assert (growing.slots[0].shape.layout, growing.slots[0].shape.visibility) == ("sequence", "both")
    before = growing.eval()(*example)  # without a seed
    plant(growing, growing.slots[0], "attention", Stage.FOSSILIZED)
    with torch.no_grad():
        grown = growing(*example)
        assert not torch.allclose(grown, before)
        assert torch.allclose(plain_model(growing).eval()(*example), grown, atol=1e-6)


def test_a_budget_smaller_than_the_host_is_refused() -> None:
    with pytest.raises(ValueError, match="the budget of 10 parameters is smaller than the host, "):
        attach(Odd(), ["stem"], torch.zeros(2, 6), budget=10)


def test_a_shared_module_cannot_be_a_slot_but_may_stand_before_one() -> None:
    with pytest.raises(AttachError, match="'shared' is called 2 times"):
        FOREIGN["tangled"].__class__(FOREIGN["tangled"].make, ("shared",), FOREIGN["tangled"].inputs).grown()
    model = FOREIGN["tangled"].grown()
    plant(model, model.slots[0], "mlp", Stage.HOLDING)
    assert model(FOREIGN["tangled"].examples(2).x).shape == (2, 3)


# -- the probe ----------------------------------------------------------------------------------------------------


class Watchful(nn.Module):
    """Counts its passes in a buffer, also in evaluation; draws random numbers; has a part in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("passes", torch.tensor(0))
        self.register_buffer("last", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        x = self.norm(self.linear(x + torch.randn(())))
        self.last = x.detach()[0]
        return F.dropout(x)


def test_the_probe_leaves_mode_buffers_hooks_and_random_numbers_as_they_were() -> None:
    host = Watchful().train()
    host.norm.eval()
    buffers = [b.clone() for b in host.buffers()]
    torch.manual_seed(3)
    rng = torch.get_rng_state()
    attach(host, ["norm"], torch.randn(4, 6, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), rng)
    assert (host.training, host.linear.training, host.norm.training) == (True, True, False)
    assert same(host.buffers(), buffers)
    assert all(not m._forward_hooks for m in host.modules())
    with pytest.raises(AttachError):
        attach(host, ["norm"], torch.zeros(2, 5))
    assert host.linear.training
    assert same(host.buffers(), buffers)
    assert all(not m._forward_hooks for m in host.modules())


def test_one_example_is_enough_for_the_probe() -> None:
    for world in WORLDS.values():
        model = attach(world.host(), world.slots, world.examples(1).x)
        assert all(fitting(slot.shape) for slot in model.slots)


def test_slots_stand_in_the_order_of_the_forward_pass_whatever_the_order_of_the_names() -> None:
    world = FOREIGN["nested"]
    first = attach(world.host(), ["blocks.1", "blocks.0.down", "blocks.0"], world.examples(2).x)
    assert [slot.path for slot in first.slots] == ["blocks.0.down", "blocks.0", "blocks.1"]
    assert [slot.index for slot in first.slots] == [0, 1, 2]


@pytest.mark.parametrize("name", WORLDS)
def test_a_survey_of_one_host_holds_for_another_of_its_kind(name: str) -> None:
    world = WORLDS[name]
    x = world.examples(4).x
    found = survey(world.host(0), world.slots, x)
    told, looked = GrowingModel(world.host(1), found, rng_seed=1), world.grown(seed=1)
    without_style = tuple((path, replace(shape, style=Style())) for path, shape in looked.survey.slots)
    # `attach` adds the style, and looks which random numbers are drawn.
    assert told.survey == replace(looked.survey, slots=without_style, uses_other_rngs=True)
    for one, other in zip(told.slots, looked.slots, strict=True):
        assert (one.index, one.path, one.shape) == (other.index, other.path, replace(other.shape, style=Style()))
        assert one.module is told.host.get_submodule(one.path)
    for tap, path in zip(told._recorder.taps, found.taps, strict=True):
        assert tap is told.host.get_submodule(path)
    with torch.no_grad():
        assert same([told.eval()(x)], [looked.eval()(x)])


def test_arguments_by_position_and_by_keyword_both_reach_the_model() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(2, 4)

        def forward(self, x: Tensor, z: Tensor, scale: float = 1.0) -> Tensor:
            return self.a(x) + scale * self.b(z)

    x, z = torch.randn(5, 3), torch.randn(5, 2)
    for example in ((x, z), [x, z, 2.0], {"x": x, "z": z}, {"z": z, "scale": 0.5, "x": x}):
        assert attach(Two(), ["a", "b"], example).slots[1].shape.channels == 4


def test_a_second_name_of_a_module_is_found_and_is_no_second_slot() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
            self.net = nn.Sequential(self.first, nn.ReLU(), self.head)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    assert [slot.path for slot in attach(Twice(), ["net.0"], torch.randn(2, 4)).slots] == ["net.0"]
    assert len(attach(Twice(), ["net.*", "first"], torch.randn(2, 4)).slots) == 3


def test_slots_around_what_grew_go_by_the_names_they_always_had() -> None:
    host = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))
    growing = attach(host, ["0"], torch.randn(2, 4))
    growing.germinate(growing.slots[0], "mlp", "linear", epoch=0)
    force(growing.slots[0], stage=Stage.FOSSILIZED, alpha=1.0)
    again = attach(plain_model(growing), ["0.*"], torch.randn(2, 4))
    assert [slot.path for slot in again.slots] == ["0.0", "0.1"]
    with pytest.raises(AttachError, match="matches no module"):
        attach(plain_model(growing), ["0.seed.norm"], torch.randn(2, 4))

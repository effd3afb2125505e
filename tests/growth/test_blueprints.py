"""What every seed promises, for each blueprint × layout × blend, and the registry that hands blueprints out."""

from __future__ import annotations

import ast
import copy
import inspect
import math
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from esper.actions import BLENDS
from esper.agent.policies import LearnedController
from esper.agent.shipped import shipped_path
from esper.growth.blueprints import (
    LAYOUTS,
    Gated,
    Layout,
    SlotShape,
    Visibility,
    blueprint,
    blueprint_names,
    conv,
    dense,
    fitting,
    gate,
    get_blueprint,
    parts,
    registry,
    sequence,
)
from esper.growth.graft import readable
from esper.growth.seed import Seed, parameter_count

CONV = ["norm", "squeeze_excite", "depthwise", "pointwise", "conv", "wide", "bottleneck", "attention"]
EXPECTED: dict[Layout, list[str]] = {
    "conv1d": CONV,
    "conv2d": CONV,
    "sequence": ["norm", "attention", "lora", "lora_large", "mlp_small", "mlp"],
    "dense": ["norm", "lora", "mlp_small", "mlp"],
}
# Odd sizes and 12 channels: nothing may rely on powers of two.
SHAPES: dict[Layout, SlotShape] = {
    "conv1d": SlotShape("conv1d", 12, (7,)),
    "conv2d": SlotShape("conv2d", 12, (5, 3)),
    "sequence": SlotShape("sequence", 12, (9,)),
    "dense": SlotShape("dense", 12),
}
KINDS = [(name, layout) for layout, names in EXPECTED.items() for name in names]
SEEDS = [(name, layout, blend) for name, layout in KINDS for blend in BLENDS]

every_kind = pytest.mark.parametrize(("name", "layout"), KINDS)
every_seed = pytest.mark.parametrize(("name", "layout", "blend"), SEEDS)


def grown(name: str, layout: Layout, blend: str, shape: SlotShape | None = None) -> Seed:
    """A seed that is no longer an identity: all its parameters moved, as after training."""
    torch.manual_seed(0)
    seed = Seed(name, shape or SHAPES[layout], blend)
    with torch.no_grad():
        for parameter in seed.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return seed


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A copy of the registry, so that a test's blueprints end with the test."""
    monkeypatch.setattr(registry, "_REGISTRY", {name: dict(entry) for name, entry in registry._REGISTRY.items()})
    parameter_count.cache_clear()
    yield
    parameter_count.cache_clear()


# --- what there is ---


def test_every_layout_has_its_blueprints() -> None:
    for layout, names in EXPECTED.items():
        assert sorted(found.name for found in fitting(SHAPES[layout])) == sorted(names)


def test_the_order_of_names_is_fixed() -> None:
    # Checkpoints of policies count in this order: append, never reorder.
    assert blueprint_names()[:12] == (*CONV, "lora", "lora_large", "mlp_small", "mlp")
    assert blueprint_names() == registry.BUILT_IN, "a new built-in blueprint needs an id: append it to the table"
    assert [found.name for found in fitting(SHAPES["sequence"])] == [
        name for name in blueprint_names() if name in EXPECTED["sequence"]
    ]


@every_kind
def test_blueprints_introduce_themselves_in_one_line(name: str, layout: Layout) -> None:
    summary = get_blueprint(name, layout).summary
    assert 10 < len(summary) < 120
    assert not summary.endswith(".")


# --- what every seed promises ---


@every_seed
def test_a_newborn_seed_changes_nothing(name: str, layout: Layout, blend: str) -> None:
    h = 3 * SHAPES[layout].example(4)
    assert torch.equal(Seed(name, SHAPES[layout], blend)(h), h)


@every_seed
def test_a_grown_seed_changes_something_of_the_same_shape(name: str, layout: Layout, blend: str) -> None:
    seed, h = grown(name, layout, blend), SHAPES[layout].example(4)
    before = h.clone()
    out = seed(h)
    assert out.shape == h.shape
    assert out.isfinite().all()
    assert not torch.allclose(out, h)
    assert torch.equal(h, before)  # nothing in place: the host still needs h


@every_kind
@settings(max_examples=8, deadline=None)
@given(st.data())
def test_any_size_works(name: str, layout: Layout, data: st.DataObject) -> None:
    axes = len(SHAPES[layout].sizes)
    sizes = tuple(data.draw(st.lists(st.integers(1, 11), min_size=axes, max_size=axes)))
    shape = SlotShape(layout, data.draw(st.integers(2, 33)), sizes)
    blend = data.draw(st.sampled_from(BLENDS))
    seed = Seed(name, shape, blend).train()
    h = shape.example(data.draw(st.integers(1, 3)))
    out = seed(h)
    assert torch.equal(out, h)
    out.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in seed.parameters())
    assert parameter_count(name, shape, blend) == sum(p.numel() for p in seed.parameters())


# Written out by hand, for C channels, kernel volume k (5 in 1-D, 9 in 2-D), and 8 place features per axis.
FORMULAE = {
    "norm": lambda c, k, axes: 3 * c,
    "squeeze_excite": lambda c, k, axes: 2 * c * (c // 4) + c // 4 + c,
    "depthwise": lambda c, k, axes: k * c + 2 * c + c * c + c,
    "pointwise": lambda c, k, axes: 4 * c * c + 5 * c,
    "conv": lambda c, k, axes: 2 * k * c * c + 3 * c,
    "wide": lambda c, k, axes: 8 * k * c * c + 9 * c,
    "bottleneck": lambda c, k, axes: 2 * c * (c // 4) + k * (c // 4) ** 2 + 4 * (c // 4) + c,
    "attention": lambda c, k, axes: 4 * c * c + 3 * c + 24 * axes * c,
    "lora": lambda c, k, axes: 16 * c,
    "lora_large": lambda c, k, axes: 64 * c,
    "mlp_small": lambda c, k, axes: 4 * c * c + 5 * c,
    "mlp": lambda c, k, axes: 8 * c * c + 7 * c,
}


@every_kind
@pytest.mark.parametrize("channels", [32, 64])
def test_parameter_counts_by_hand(name: str, layout: Layout, channels: int) -> None:
    volume, axes = {"conv1d": (5, 1), "conv2d": (9, 2)}.get(layout, (0, 0))
    shape = SlotShape(layout, channels, SHAPES[layout].sizes)
    expected = FORMULAE[name](channels, volume, axes)
    assert parameter_count(name, shape) == parameter_count(name, shape, "sigmoid") == expected
    hidden = channels // 4
    gate_size = channels * hidden + hidden + hidden + 1
    assert parameter_count(name, shape, "gated") == expected + gate_size


@every_seed
def test_counting_draws_no_random_numbers(name: str, layout: Layout, blend: str) -> None:
    before = torch.get_rng_state()
    parameter_count.cache_clear()
    parameter_count(name, SHAPES[layout], blend)
    assert torch.equal(torch.get_rng_state(), before)


@every_seed
def test_after_two_steps_every_parameter_has_a_gradient(name: str, layout: Layout, blend: str) -> None:
    torch.manual_seed(1)
    shape = SHAPES[layout]
    seed, h, target = Seed(name, shape, blend), shape.example(16), shape.example(16)
    optimizer = torch.optim.SGD(seed.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        F.mse_loss(seed(h), target).backward()
        alive = {key: bool(p.grad is not None and p.grad.abs().max() > 0) for key, p in seed.named_parameters()}
        assert any(alive.values()), f"dead in step {step}"
        optimizer.step()
    assert all(alive.values()), [key for key, value in alive.items() if not value]


@every_seed
def test_learning_lowers_the_loss(name: str, layout: Layout, blend: str) -> None:
    torch.manual_seed(1)
    shape = SHAPES[layout]
    seed, h, target = Seed(name, shape, blend), shape.example(16), shape.example(16)
    optimizer = torch.optim.Adam(seed.parameters(), lr=1e-2)
    start = F.mse_loss(seed(h), target).item()
    for _ in range(30):
        optimizer.zero_grad()
        loss = F.mse_loss(seed(h), target)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.97 * start


@every_seed
def test_the_gradient_reaches_the_host(name: str, layout: Layout, blend: str) -> None:
    h = SHAPES[layout].example(2).requires_grad_()
    Seed(name, SHAPES[layout], blend)(h).sum().backward()
    assert h.grad is not None
    assert torch.allclose(h.grad, torch.ones_like(h), atol=1e-6)  # an identity's gradient


@every_seed
def test_each_example_stands_for_itself(name: str, layout: Layout, blend: str) -> None:
    seed, h = grown(name, layout, blend).train(), SHAPES[layout].example(5)
    together = seed(h)
    for i in range(5):
        torch.testing.assert_close(seed(h[i : i + 1]), together[i : i + 1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(seed.eval()(h), together)  # and a seed has no second mode


CAUSAL: dict[Layout, SlotShape] = {
    layout: replace(SHAPES[layout], visibility="causal") for layout in ("conv1d", "sequence")
}
LOOKING_AROUND = {"squeeze_excite", "depthwise", "conv", "wide", "bottleneck", "attention"}
"""Kinds whose outputs depend on other positions, in every layout that has some."""


@pytest.mark.parametrize("blend", BLENDS)
@pytest.mark.parametrize(("name", "layout"), [kind for kind in KINDS if kind[1] in CAUSAL])
def test_in_a_causal_slot_no_position_sees_a_later_one(name: str, layout: Layout, blend: str) -> None:
    seed, h = grown(name, layout, blend, CAUSAL[layout]), CAUSAL[layout].example(3)
    axis = 1 if layout == "sequence" else 2
    whole = seed(h)
    for t in range(1, h.shape[axis]):
        # A shorter example is no different from the beginning of a longer one, so one may generate step by step.
        torch.testing.assert_close(seed(h.narrow(axis, 0, t)), whole.narrow(axis, 0, t), rtol=1e-4, atol=1e-5)
        probe = h.clone().requires_grad_()
        seed(probe).narrow(axis, 0, t).square().sum().backward()
        assert probe.grad is not None
        assert not probe.grad.narrow(axis, t, h.shape[axis] - t).any()  # exactly none


@pytest.mark.parametrize(("name", "layout"), [kind for kind in KINDS if kind[1] in CAUSAL])
@pytest.mark.parametrize("visibility", ["causal", "both"])
def test_what_looks_around_does_so_as_far_as_it_may(name: str, layout: Layout, visibility: Visibility) -> None:
    shape = replace(SHAPES[layout], visibility=visibility)
    seed, h = grown(name, layout, "linear", shape), shape.example(1).requires_grad_()
    axis = 1 if layout == "sequence" else 2
    middle = h.shape[axis] // 2
    seed(h).select(axis, middle).square().sum().backward()
    assert h.grad is not None
    before, after = (bool(h.grad.select(axis, middle + step).any()) for step in (-1, 1))
    by_whole_example = layout == "conv1d" and visibility == "both"  # norms over all positions
    around = name in LOOKING_AROUND
    assert before is (around or by_whole_example)
    assert after is (visibility == "both" and (around or by_whole_example))


@every_kind
def test_what_a_slot_forbids_does_not_fit_it(name: str, layout: Layout) -> None:
    entry, around = get_blueprint(name, layout), name in LOOKING_AROUND
    shape = SHAPES[layout]
    assert entry.fits(shape)
    assert entry.fits(replace(shape, visibility="position")) is not around
    assert entry.fits(replace(shape, visibility="causal")) is (not around or layout != "conv2d")


def test_a_blueprint_of_a_user_that_would_leak_does_not_fit_a_causal_slot(own_registry: None) -> None:
    @blueprint("blur", "conv1d")
    class Blur(nn.Module):
        def __init__(self, channels: int, layout: str) -> None:
            super().__init__()
            self.mix = nn.Parameter(torch.zeros(()))

        def forward(self, h: Tensor) -> Tensor:
            return h + self.mix * F.avg_pool1d(h, 3, 1, 1)

    assert "blur" in {b.name for b in fitting(SHAPES["conv1d"])}
    assert "blur" not in {b.name for b in fitting(CAUSAL["conv1d"])}
    with pytest.raises(ValueError, match="'peek' looks at other positions of a sequence, so it must respect padding"):

        @blueprint("peek", "sequence")
        class Peek(nn.Module):
            def __init__(self, channels: int, layout: str) -> None:
                super().__init__()
                self.mix = nn.Parameter(torch.zeros(()))

            def forward(self, h: Tensor) -> Tensor:
                return h + self.mix * h.mean(1, keepdim=True)


@pytest.mark.parametrize("blend", BLENDS)
@pytest.mark.parametrize("visibility", ["causal", "both"])
def test_attention_reads_no_padding(visibility: Visibility, blend: str) -> None:
    shape = replace(SHAPES["sequence"], visibility=visibility)
    seed, h = grown("attention", "sequence", blend, shape), shape.example(2)
    shown = torch.ones(2, 1, 1, h.shape[1], dtype=torch.bool)
    shown[0, :, :, :3] = False
    out = seed(h, shown)
    other = h.clone()
    other[0, :3] += 1.0
    assert torch.equal(seed(other, shown)[:, 3:], out[:, 3:])
    assert not torch.equal(seed(other)[:, 3:], out[:, 3:])  # it would have
    assert out.isfinite().all()


SHOWN = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]], dtype=torch.bool)
MASK_FORMS: dict[str, tuple[str, Tensor]] = {
    "transformers, integers": ("attention_mask", SHOWN.long()),
    "transformers, yes or no": ("attention_mask", SHOWN),
    "transformers, 1.0 or 0.0": ("attention_mask", SHOWN.float()),
    "added, by position": ("attention_mask", torch.where(SHOWN, 0.0, -1e9)),
    "added, four axes": ("attention_mask", torch.where(SHOWN, 0.0, -torch.inf)[:, None, None, :].expand(2, 3, 4, 4)),
    "yes or no, four axes": ("attention_mask", SHOWN[:, None, None, :].expand(2, 1, 4, 4)),
    "torch, yes or no": ("key_padding_mask", ~SHOWN),
    "torch, added": ("src_key_padding_mask", torch.where(SHOWN, 0.0, -torch.inf)),
}


@pytest.mark.parametrize("form", MASK_FORMS)
def test_masks_of_every_form_hide_the_same(form: str) -> None:
    name, mask = MASK_FORMS[form]
    h = torch.randn(2, 4, 8)
    for found in (readable(("h", name), (h, mask), {}, h), readable(("h",), (h,), {name: mask}, h)):
        assert found is not None
        assert found.shape[1] == 1  # one for all heads
        assert torch.equal(found.expand(2, 1, 4, 4), SHOWN[:, None, None, :].expand(2, 1, 4, 4))


def test_a_cache_of_the_past_is_refused_in_every_form() -> None:
    h = torch.randn(2, 1, 8)
    for name, past in (("layer_past", (h, h)), ("past_key_values", SimpleNamespace(get_seq_length=lambda: 5))):
        with pytest.raises(RuntimeError, match="use_cache=False"):
            readable(("h", name), (h, past), {}, h)
    assert readable(("h", "layer_past"), (h, None), {}, h) is None
    assert readable(("h", "past_key_values"), (h, SimpleNamespace(get_seq_length=lambda: 1)), {}, h) is None


def test_where_everything_is_padding_a_seed_still_gives_numbers() -> None:
    seed = grown("attention", "sequence", "gated")
    assert seed(SHAPES["sequence"].example(2), torch.zeros(2, 1, 1, 9, dtype=torch.bool)).isfinite().all()


def test_the_last_step_of_causal_squeeze_excite_sees_the_whole_mean() -> None:
    causal, both = (grown("squeeze_excite", "conv1d", "linear", s) for s in (CAUSAL["conv1d"], SHAPES["conv1d"]))
    h = SHAPES["conv1d"].example(2)
    torch.testing.assert_close(causal(h)[:, :, -1], both(h)[:, :, -1])


def test_a_blueprint_that_looks_far_ahead_is_found_out(own_registry: None) -> None:
    @blueprint("far", "conv1d")
    class Far(nn.Module):
        def __init__(self, channels: int, layout: str) -> None:
            super().__init__()
            self.conv = nn.Conv1d(channels, channels, 3, dilation=4, padding=4)
            nn.init.zeros_(self.conv.weight)
            nn.init.zeros_(self.conv.bias)

        def forward(self, h: Tensor) -> Tensor:
            return h + self.conv(h)

    assert "far" not in {b.name for b in fitting(CAUSAL["conv1d"])}


def test_channels_last_is_the_same_seed_with_its_axes_moved() -> None:
    shape = replace(SHAPES["conv2d"], channels_last=True)
    for blend in BLENDS:
        last, first = grown("conv", "conv2d", blend, shape), grown("conv", "conv2d", blend)
        h = shape.example(2)
        assert h.shape == (2, 5, 3, 12)
        assert torch.equal(last(h), first(h.movedim(-1, 1)).movedim(1, -1))


@pytest.mark.parametrize("name", CONV)
def test_maps_in_channels_last_order_have_the_same_gradients(name: str) -> None:
    """A GroupNorm of torch's ended the process for such an input of a seed in incubation, which needs no gradient."""
    seed, h = grown(name, "conv2d", "linear"), SHAPES["conv2d"].example(4)
    plain, last = (
        torch.autograd.grad(seed(x).square().sum(), list(seed.parameters()))
        for x in (h, h.to(memory_format=torch.channels_last))
    )
    torch.testing.assert_close(last, plain, rtol=1e-3, atol=1e-3)


def test_sequence_attention_does_look_back() -> None:
    seed, h = grown("attention", "sequence", "linear"), SHAPES["sequence"].example(1).requires_grad_()
    seed(h)[:, -1].square().sum().backward()
    assert h.grad is not None
    assert h.grad.abs().amax(-1).gt(0).all()


@every_seed
def test_dtypes_and_devices(name: str, layout: Layout, blend: str) -> None:
    h = SHAPES[layout].example(2)
    seed = grown(name, layout, blend)
    single = seed(h)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.allclose(seed(h).float(), single, rtol=0.1, atol=0.2)
    double = copy.deepcopy(seed).double()(h.double())
    assert double.dtype == torch.float64
    torch.testing.assert_close(double.float(), single, rtol=1e-4, atol=1e-4)
    assert copy.deepcopy(seed).bfloat16()(h.bfloat16()).dtype == torch.bfloat16
    assert seed.to("meta")(h.to("meta")).device.type == "meta"  # makes no tensor on a device of its own


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    for name, layout, blend in SEEDS:
        seed, h = grown(name, layout, blend), SHAPES[layout].example(2)
        expected = seed(h)
        torch.testing.assert_close(seed.cuda()(h.cuda()).cpu(), expected, rtol=1e-2, atol=1e-2)


@every_seed
def test_deep_copies_and_state_dicts_carry_everything(name: str, layout: Layout, blend: str) -> None:
    seed, h = grown(name, layout, blend), SHAPES[layout].example(3)
    out = seed(h)
    twin = copy.deepcopy(seed)
    other = Seed(name, SHAPES[layout], blend)
    other.load_state_dict(seed.state_dict())
    with torch.no_grad():
        for parameter in seed.parameters():
            parameter.zero_()
    assert torch.equal(twin(h), out)
    assert torch.equal(other(h), out)
    assert (twin.blueprint, twin.shape, twin.blend) == (name, SHAPES[layout], blend)


@every_seed
def test_no_batch_norm_no_dropout_nothing_in_place(name: str, layout: Layout, blend: str) -> None:
    seed = Seed(name, SHAPES[layout], blend)
    for module in seed.modules():
        assert "BatchNorm" not in type(module).__name__
        assert not isinstance(module, nn.modules.dropout._DropoutNd)
        assert not getattr(module, "inplace", False)
    assert not list(seed.buffers())


# --- particular ones ---


def test_norm_can_take_the_scale_of_an_example_away() -> None:
    for layout in LAYOUTS:
        seed = Seed("norm", SHAPES[layout])
        with torch.no_grad():
            dict(seed.named_parameters())["body.mix"].fill_(20.0)  # tanh → 1
        h = SHAPES[layout].example(2)
        torch.testing.assert_close(seed(10 * h), seed(h), rtol=1e-2, atol=1e-2)


def test_conv_attention_relates_the_far_ends_and_knows_where_they_are() -> None:
    seed, h = grown("attention", "conv1d", "linear"), SHAPES["conv1d"].example(1)
    out = seed(h)
    h[:, :, -1] += 1
    assert not torch.allclose(seed(h)[:, :, 0], out[:, :, 0])
    flipped = seed(out.flip(-1)).flip(-1)  # without a code of places the two would be equal
    assert not torch.allclose(flipped, seed(out))


@pytest.mark.parametrize(("layout", "sizes"), [("conv1d", (2500,)), ("conv2d", (41, 33)), ("conv2d", (3, 1000))])
def test_attention_over_a_large_map_sees_it_coarsely(layout: Layout, sizes: tuple[int, ...]) -> None:
    shape = SlotShape(layout, 4, sizes)
    seed, h = Seed("attention", shape), shape.example(2)
    body = seed.body
    assert isinstance(body, conv.ConvAttention)
    assert math.prod(body.coarse(h).shape[2:]) <= body.MOST_KEYS
    assert torch.equal(seed(h), h)


def test_places_are_the_same_first_and_last_at_any_size() -> None:
    device = torch.device("cpu")
    short, long = conv.ConvAttention.place((5,), device), conv.ConvAttention.place((50,), device)
    assert short.shape == (8, 5)
    torch.testing.assert_close(short[:, [0, -1]], long[:, [0, -1]])
    assert conv.ConvAttention.place((4, 6), device).shape == (16, 4, 6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gates_are_between_0_and_1_per_example_or_position(layout: Layout) -> None:
    shape = SHAPES[layout]
    gated = Gated(nn.Identity(), shape.channels, layout)
    for scale in (1e-3, 1.0, 1e3):  # no saturation, however large the activations
        opening = gated.gate(scale * shape.example(6))
        assert ((opening > 0.3) & (opening < 0.99)).all()
        expected = (6, *shape.sizes, 1) if layout == "sequence" else (6,) + (1,) * (len(shape.sizes) + 1)
        assert opening.shape == expected


def test_a_closed_gate_hides_the_seed_and_an_open_one_shows_it() -> None:
    seed, h = grown("depthwise", "conv1d", "gated"), SHAPES["conv1d"].example(2)
    assert isinstance(seed.body, Gated)
    last = seed.body.decide[2]
    assert isinstance(last, nn.Linear)
    with torch.no_grad():
        last.weight.zero_()
        for bias, expected in ((-100.0, h), (100.0, seed.body.body(h))):
            last.bias.fill_(bias)
            torch.testing.assert_close(seed(h), expected)


def test_seed_refuses_an_unknown_blend() -> None:
    with pytest.raises(ValueError, match="unknown blend 'cosine': choose one of linear, sigmoid, gated"):
        Seed("norm", SHAPES["dense"], "cosine")


# --- leaving home: what export relies on ---


def sources() -> str:
    """All classes and functions of blueprints as text, without decorators, in the order of their definition."""
    texts = ["from __future__ import annotations"]
    for module in (parts, conv, dense, sequence, gate):
        for node in ast.parse(inspect.getsource(module)).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                text = inspect.getsource(getattr(module, node.name))
                lines = textwrap.dedent(text).splitlines()
                texts.append("\n".join(lines[next(i for i, x in enumerate(lines) if x[:4] in ("clas", "def ")) :]))
    return "\n\n".join(texts)


def test_classes_work_from_their_source_and_torch_alone() -> None:
    namespace: dict[str, object] = {"torch": torch, "nn": nn, "F": F, "math": math, "__name__": "exported"}
    namespace |= {"ACTIVATIONS": parts.ACTIVATIONS, "NORMS": parts.NORMS}
    exec(compile(sources(), "model.py", "exec"), namespace)
    for name, layout in KINDS:
        seed, h = grown(name, layout, "gated"), SHAPES[layout].example(2)
        found = get_blueprint(name, layout)
        body = namespace[found.module.__name__](**found.arguments(SHAPES[layout]))  # type: ignore[operator]
        plain = namespace["Gated"](body, SHAPES[layout].channels, layout)  # type: ignore[operator]
        plain.load_state_dict(seed.body.state_dict())
        assert type(plain.body).__module__ == "exported"
        assert torch.equal(plain(h), seed(h))


@pytest.mark.parametrize(("name", "layout"), [kind for kind in KINDS if kind[0] in ("attention", "conv", "norm")])
def test_torch_export_with_any_batch(name: str, layout: Layout) -> None:
    seed = grown(name, layout, "gated").eval()
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(seed, (SHAPES[layout].example(2),), dynamic_shapes=({0: batch},))
    h = SHAPES[layout].example(5)
    torch.testing.assert_close(program.module()(h), seed(h), rtol=1e-4, atol=1e-5)


def test_causal_attention_exports_with_any_length() -> None:
    seed = grown("attention", "sequence", "gated").eval()
    axes = {0: torch.export.Dim("batch", min=2, max=64), 1: torch.export.Dim("time", min=2, max=64)}
    program = torch.export.export(seed, (SHAPES["sequence"].example(3),), dynamic_shapes=(axes,))
    h = torch.randn(2, 13, SHAPES["sequence"].channels)
    torch.testing.assert_close(program.module()(h), seed(h), rtol=1e-4, atol=1e-5)


# --- the registry ---


def test_an_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(ValueError, match=r"unknown blueprint 'atention': choose one of norm, .*'attention'\?"):
        get_blueprint("atention", "conv1d")
    with pytest.raises(ValueError, match="unknown blueprint 'zzz'"):
        Seed("zzz", SHAPES["dense"])


def test_a_name_that_does_not_fit_the_slot_is_refused() -> None:
    with pytest.raises(ValueError, match="'wide' does not fit a dense slot: it is for conv1d, conv2d"):
        Seed("wide", SHAPES["dense"])
    with pytest.raises(ValueError, match="'wide' does not fit a dense slot: it is for conv1d, conv2d"):
        get_blueprint("wide", "conv1d").build(SHAPES["dense"])


def test_one_name_serves_several_layouts() -> None:
    assert get_blueprint("attention", "conv2d").module is conv.ConvAttention
    assert get_blueprint("attention", "sequence").module is sequence.SequenceAttention
    assert get_blueprint("attention").name == "attention"


def test_users_add_a_blueprint_in_one_place(own_registry: None) -> None:
    @blueprint("shift", "dense", start=0.0)
    @blueprint("shift_much", "dense", "sequence", start=5.0)
    class Shift(nn.Module):
        """Adds a learned constant.

        More about it.
        """

        def __init__(self, channels: int, layout: str, start: float) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.full((channels,), start))
            torch.randn(3, device="cpu")

        def forward(self, h: Tensor) -> Tensor:
            return h + self.by

    shape = SlotShape("dense", 6)
    assert blueprint_names()[-2:] == ("shift_much", "shift")
    assert "shift" in [found.name for found in fitting(shape)]
    assert "shift" not in [found.name for found in fitting(SHAPES["sequence"])]
    assert get_blueprint("shift", "dense").summary == "Adds a learned constant (start 0.0)"
    state = torch.get_rng_state()
    assert parameter_count("shift", shape) == 6
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(Seed("shift", shape, "gated")(torch.ones(2, 6)), torch.ones(2, 6))
    assert get_blueprint("shift_much", "dense").arguments(shape) == {"channels": 6, "layout": "dense", "start": 5.0}


class Mine(nn.Module):
    """Mine."""

    def __init__(self, channels: int, layout: str) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.randn(channels))

    def forward(self, h: Tensor) -> Tensor:
        return h


class OldStyle(Mine):
    def __init__(self, channels: int) -> None:
        super().__init__(channels, "dense")


class Shrinking(Mine):
    def forward(self, h: Tensor) -> Tensor:
        return h[:, :1]


class Idle(nn.Module):
    def __init__(self, channels: int, layout: str) -> None:
        super().__init__()

    def forward(self, h: Tensor) -> Tensor:
        return h


class Tuples(Mine):
    def forward(self, h: Tensor) -> Tensor:
        return (h, h)  # type: ignore[return-value]


class Formless(Mine):
    def forward(self, h: Tensor) -> Tensor:
        return h @ torch.zeros(3, 3)


@pytest.mark.parametrize(
    ("made", "options", "message"),
    [
        (
            OldStyle,
            {},
            r"\(OldStyle\) cannot be built as __init__\(self, channels, layout\): .*unexpected keyword",
        ),
        (Mine, {"rank": 3}, r"cannot be built as __init__\(self, channels, layout, rank\): .*'rank'"),
        (Shrinking, {}, r"must give a tensor of the shape that it gets: \[2, 8\] became \[2, 1\]"),
        (Tuples, {}, "became tuple"),
        (Idle, {}, r"\(Idle\) has no parameter to train"),  # it ended in the middle of a run: list index out of range
        (Formless, {}, r"fails for an activation of \[2, 8\] \(dense\)"),
        (lambda channels, layout: None, {}, r"must be a class of nn.Module with __init__\(self, channels, layout\)"),
    ],
)
def test_what_cannot_grow_is_refused_at_registration(
    own_registry: None, made: type[nn.Module], options: dict[str, object], message: str
) -> None:
    names, state = blueprint_names(), torch.get_rng_state()
    with pytest.raises(ValueError, match=message) as caught:
        blueprint("own", "dense", **options)(made)
    assert "\n" not in str(caught.value)
    assert blueprint_names() == names  # nothing is left behind, in the registry or in the random numbers
    assert torch.equal(torch.get_rng_state(), state)
    blueprint("own", "dense")(Mine)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_class_that_names_itself_is_taken_on_trust(own_registry: None) -> None:
    @blueprint("own", "dense")
    class Own(nn.Module):
        """Its name exists only when the decorator is done."""

        def __init__(self, channels: int, layout: str) -> None:
            super(Own, self).__init__()  # noqa: UP008  (as many people write it)

        def forward(self, h: Tensor) -> Tensor:
            return h

    assert "own" in blueprint_names()


def test_a_name_is_taken_per_layout(own_registry: None) -> None:
    with pytest.raises(ValueError, match="'norm' is registered already for dense, as FeatureNorm"):
        blueprint("norm", "dense")(Mine)
    with pytest.raises(ValueError, match="'lora' is registered already for dense"):
        blueprint("lora", "conv1d", "dense")(Mine)
    with pytest.raises(ValueError, match="does not fit a conv1d slot"):  # the refusal left nothing behind
        get_blueprint("lora", "conv1d")
    blueprint("lora", "conv1d")(Mine)
    assert get_blueprint("lora", "conv1d").module is Mine
    assert get_blueprint("lora", "dense").module is dense.LowRank
    assert blueprint_names()[:12][-4] == "lora"  # and kept its place


def test_ids_do_not_depend_on_the_order_of_registration(own_registry: None) -> None:
    """A kind that is registered before all others, as one at the top of conv.py would be, takes the next free id."""
    names = blueprint_names()
    entries = [entry for by_layout in registry._REGISTRY.values() for entry in dict.fromkeys(by_layout.values())]
    registry._REGISTRY.clear()
    blueprint("early", "conv1d", "dense")(Mine)
    for entry in reversed(entries):
        blueprint(entry.name, *sorted(entry.layouts), **entry.options)(entry.module)
    assert blueprint_names() == (*names, "early")
    assert [found.name for found in fitting(SHAPES["dense"])] == [*EXPECTED["dense"], "early"]
    for name in ("small",):
        LearnedController.load(shipped_path(name)).reset([0])  # refuses a policy whose kinds have other ids


def test_layouts_must_exist(own_registry: None) -> None:
    with pytest.raises(ValueError, match=r"needs layouts out of conv1d, .*got \['conv3d'\]"):
        blueprint("cube", "conv3d")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got none"):
        blueprint("nowhere")

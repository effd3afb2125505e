"""The grown model leaves Esper: as a plain module, and as files that work where Esper cannot be imported."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from growing import STAGES, built_in, grow, plant
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import esper.tasks  # noqa: F401  (registers the built-in hosts)
from esper.actions import BLENDS
from esper.growth.attach import attach
from esper.growth.blueprints import blueprint, fitting
from esper.growth.blueprints.registry import _REGISTRY
from esper.growth.costs import flops_per_example
from esper.growth.export import ExportError, LoadError, grafts_of, load, plain_model, save
from esper.growth.graft import SEEDS, fill
from esper.growth.plain import grafted
from esper.growth.standalone import NotPortableError, model_source
from saved_models import sealed
from small_worlds import stages_of

HOSTS = ("mlp", "conv1d", "conv2d", "gpt")
SLOPE = 0.1


class Helper(nn.Module):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return F.leaky_relu(h, SLOPE)


class UsersBlueprint(nn.Module):
    """As a user writes it: with a helper class and a constant of its file."""

    def __init__(self, channels: int, layout: str) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(channels, *[1] * (layout == "conv1d")))
        self.helper = Helper()

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.scale * self.helper(h)


@pytest.fixture(scope="module", autouse=True)
def _users_blueprint() -> Iterator[None]:
    """Registered for these tests alone: others count blueprints."""
    blueprint("users", "conv1d", "dense")(UsersBlueprint)
    yield
    del _REGISTRY["users"]


def names(host: str) -> list[str]:
    layout = {"mlp": "dense", "gpt": "sequence"}.get(host, host)
    model, x = built_in(host)
    return [b.name for b in fitting(attach(model, stages_of(model), x).slots[0].shape) if layout in b.layouts]


def run_source(source: str) -> dict[str, object]:
    namespace: dict[str, object] = {"__name__": "model", "__file__": "model.py"}
    exec(compile(source, "model.py", "exec"), namespace)
    return namespace


# -- the plain model ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("blend", BLENDS)
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_plain_model_and_its_source_give_the_growing_models_outputs(host: str, blend: str, whole: bool) -> None:
    """Every kind of seed with one blend, and every blend; `whole`: every pair."""
    chosen = names(host) if whole else names(host)[BLENDS.index(blend) :: len(BLENDS)]
    assert chosen
    bare = plain_model(grow(*built_in(host), []))
    for name in chosen:
        module, x = built_in(host)
        growing = grow(module, x, [(1, name, blend, "FOSSILIZED")])
        plain = plain_model(growing)
        assert [path for path, m in plain.named_modules() if m._forward_hooks] == [growing.slots[1].path]
        assert [path for path, _ in grafted(plain)] == [growing.slots[1].path]
        assert torch.equal(plain(x), growing(x))
        assert not torch.equal(plain(x), bare(x)), "the seed does nothing: the test would see nothing"

        namespace = run_source(model_source(plain, grafts_of(plain), {}))
        rebuilt = namespace["build"]()
        fill(rebuilt, plain.state_dict(), {})
        assert torch.equal(rebuilt(x), growing(x))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_topology_exports_to_what_it_computes(data: st.DataObject) -> None:
    host = data.draw(st.sampled_from(HOSTS))
    slots = data.draw(st.lists(st.integers(0, 2), unique=True, min_size=1))
    choice = st.tuples(st.sampled_from(names(host)), st.sampled_from(BLENDS), st.sampled_from(STAGES))
    module, x = built_in(host)
    growing = grow(module, x, [(slot, *data.draw(choice)) for slot in slots])
    before = {name: value.clone() for name, value in growing.state_dict().items()}

    plain = plain_model(growing)
    torch.testing.assert_close(plain(x), growing(x), rtol=0, atol=1e-6)
    acting = [slot.path for slot in growing.slots if slot.life.alpha > 0]
    assert [record.path for record, _ in grafts_of(plain)] == acting

    assert all(torch.equal(value, before[name]) for name, value in growing.state_dict().items())
    for parameter in plain.parameters():  # a copy: what happens to it is nothing to the growing model
        parameter.data.zero_()
    assert all(torch.equal(value, before[name]) for name, value in growing.state_dict().items())


def test_alpha_of_an_unfinished_seed_is_kept_as_it_acts() -> None:
    module, x = built_in("conv1d")
    growing = grow(module.double(), x.double(), [(0, "conv", "sigmoid", "BLENDING")])
    plain = plain_model(growing)
    assert 0 < growing.slots[0].life.alpha < 1
    assert grafted(plain)[0][1].alpha == float(growing.slots[0].alpha)
    assert torch.equal(plain(x.double()), growing(x.double()))  # exact in float64, where a rounded alpha would show


def test_hooks_of_the_user_stay_and_recording_leaves_none() -> None:
    module, x = built_in("mlp")
    seen: list[str] = []
    module.stages[0].register_forward_hook(lambda *_: seen.append("users"))
    growing = grow(module, x, [(0, "mlp", "linear", "HOLDING")])
    with growing.recording():
        plain = plain_model(growing)
    assert [len(m._forward_hooks) for m in plain.modules() if m._forward_hooks] == [2]  # the user's, and the seed's
    seen.clear()
    plain(x)
    assert seen == ["users"]
    assert growing.slots[0]._handle is not None
    assert len(module.stages[0]._forward_hooks) == 2


def test_a_plain_model_trains_copies_and_looks_like_its_host() -> None:
    module, x = built_in("conv1d")
    growing = grow(module, x, [(0, "conv", "linear", "FOSSILIZED")])
    plain = plain_model(growing).train()
    plain(x).sum().backward()
    assert all(parameter.grad is not None for parameter in plain.parameters())
    twin = copy.deepcopy(plain).eval()
    assert torch.equal(twin(x), plain.eval()(x))
    assert type(plain.stages[0]) is type(module.stages[0])
    assert len(plain.stages[0]) == len(module.stages[0])  # an nn.Sequential: the seed is no layer of it
    assert set(module.state_dict()) == {key for key in plain.state_dict() if SEEDS not in key}


def test_slots_inside_of_slots() -> None:
    module, x = built_in("conv1d")
    growing = grow(module, x, [], slots=["stages.1", "stages.1.0", "stages.0"])
    for slot in growing.slots:
        plant(growing, slot, "conv", "gated", "HOLDING")
    plain = plain_model(growing)
    assert torch.equal(plain(x), growing(x))
    rebuilt = run_source(model_source(plain, grafts_of(plain), {}))["build"]()
    fill(rebuilt, plain.state_dict(), {})
    assert torch.equal(rebuilt(x), growing(x))


def test_tuples_and_modules_with_two_names() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRU(4, 6, batch_first=True)
            self.alias = self.cell

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.alias(x)

    x = torch.randn(3, 5, 4)
    growing = grow(Two(), x, [(0, "mlp", "linear", "HOLDING")], slots=["cell"])
    plain = plain_model(growing)
    assert plain.cell is plain.alias
    for ours, theirs in zip(plain(x), growing(x), strict=True):
        assert torch.equal(ours, theirs)


def test_flops() -> None:
    module, x = built_in("mlp")
    assert flops_per_example(module, x) == 2 * (12 * 16 + 16 * 16 + 16 * 8 + 8 * 5)
    growing = grow(module, x, [(0, "lora", "linear", "HOLDING")])
    assert flops_per_example(growing, x) == flops_per_example(plain_model(growing), x)
    assert flops_per_example(growing, x) == 2 * (12 * 16 + 16 * 16 + 16 * 8 + 8 * 5) + 2 * (2 * 16 * 8)
    # Attention is counted: two products of [time, width] with [width, time] for each of three layers.
    gpt, ids = built_in("gpt")
    linear = 3 * 12 * (16 * 48 + 16 * 16 + 2 * 16 * 64) + 12 * 16 * 20
    assert flops_per_example(gpt, ids) == 2 * (linear + 3 * 2 * 12 * 12 * 16)


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_flops_of_recurrent_layers(kind: type[nn.RNNBase], gates: int) -> None:
    onednn = torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()
    assert flops_per_example(kind(12, 16, batch_first=True), torch.randn(3, 5, 12)) == 2 * 5 * gates * 16 * (12 + 16)
    assert (torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()) == onednn  # as it was


# -- files, where Esper cannot be imported ----------------------------------------------------------------------------

PLANTINGS = {
    "mlp": [(0, "mlp", "linear", "FOSSILIZED"), (1, "lora", "gated", "HOLDING"), (2, "norm", "sigmoid", "TRAINING")],
    "conv1d": [(0, "users", "linear", "FOSSILIZED"), (1, "attention", "gated", "BLENDING")],
    "conv2d": [(0, "depthwise", "sigmoid", "BLENDING"), (1, "squeeze_excite", "gated", "retiring")],
    "gpt": [(0, "attention", "linear", "HOLDING"), (2, "lora_large", "gated", "FOSSILIZED")],
}

WITHOUT_ESPER = """
import importlib.util, json, sys
from pathlib import Path

class NoEsper:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "esper":
            raise ImportError("esper cannot be imported here")

sys.meta_path.insert(0, NoEsper())
import torch
from safetensors.torch import load_file

report = {}
for folder in map(Path, sys.argv[1:]):
    check = load_file(folder / "check.safetensors")
    spec = importlib.util.spec_from_file_location("model_" + folder.name, folder / "model.py")
    source = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(source)
    models = {"model.pt2": torch.export.load(folder / "model.pt2").module(), "model.py": source.load()}
    report[folder.name] = {
        name: float((model(check["x"]) - check["y"]).abs().max()) for name, model in models.items()
    }
assert "esper" not in sys.modules
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory for each built-in host, with inputs of another batch size than the example's and their outputs."""
    root = tmp_path_factory.mktemp("exported")
    for host, plantings in PLANTINGS.items():
        module, x = built_in(host)
        growing = grow(module, x, plantings)
        saved = save(growing, root / host, x, history={"epochs": []})
        assert saved.warnings == ()
        assert set(saved.files) == {file.name for file in (root / host).iterdir()}
        inputs = torch.cat([x, x.flip(0), x[:1]])  # nine, where the example had four
        with torch.no_grad():
            save_file({"x": inputs, "y": growing(inputs)}, root / host / "check.safetensors")
    return root


def test_files_work_where_esper_cannot_be_imported(exported: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-c", WITHOUT_ESPER, *(str(exported / host) for host in HOSTS)],
        cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert set(report) == set(HOSTS)
    for host, gaps in report.items():
        assert set(gaps) == {"model.pt2", "model.py"}
        assert max(gaps.values()) <= 1e-5, (host, gaps)


@pytest.mark.parametrize("host", HOSTS)
def test_load_rebuilds_the_module_without_disturbing_random_numbers(exported: Path, host: str) -> None:
    check = load_file(exported / host / "check.safetensors")
    torch.manual_seed(5)
    expected = torch.rand(())
    torch.manual_seed(5)
    model = load(exported / host)
    assert torch.rand(()) == expected
    assert not model.training
    torch.testing.assert_close(model(check["x"]), check["y"], rtol=0, atol=1e-5)
    architecture = json.loads((exported / host / "architecture.json").read_text())
    assert architecture["parameters"]["total"] == sum(p.numel() for p in model.parameters())
    assert [g["path"] for g in architecture["grafts"]] == [record.path for record, _ in grafts_of(model)]
    assert architecture["flops_per_example"] == flops_per_example(model, check["x"])
    if host in ("conv1d", "conv2d"):
        assert model.stages[0][1].num_batches_tracked == 2  # the buffers came along


def test_load_needs_no_other_import_of_esper(exported: Path) -> None:
    code = "import sys, esper; print(type(esper.load(sys.argv[1])).__name__)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(exported / "gpt")], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "GPTHost", done.stderr


def test_language_model_program_takes_other_lengths(exported: Path) -> None:
    program = torch.export.load(exported / "gpt" / "model.pt2").module()
    ids = torch.randint(0, 20, (1, 7))
    torch.testing.assert_close(program(ids), load(exported / "gpt")(ids), rtol=0, atol=1e-5)


def test_a_loaded_model_can_be_saved_again_over_itself(exported: Path, tmp_path: Path) -> None:
    model = load(exported / "mlp")
    check = load_file(exported / "mlp" / "check.safetensors")
    (tmp_path / "model.py").write_text("stale")
    save(model.to(torch.bfloat16), tmp_path, check["x"].to(torch.bfloat16))
    again = load(tmp_path)
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    assert torch.equal(again(check["x"].to(torch.bfloat16)), model(check["x"].to(torch.bfloat16)))
    assert "stale" not in (tmp_path / "model.py").read_text()
    assert not list(tmp_path.glob(".*"))  # no temporary file is left


# -- what cannot travel -----------------------------------------------------------------------------------------------


def test_a_source_that_needs_more_than_torch_is_refused_with_the_name() -> None:
    class Nested(UsersBlueprint):
        def forward(self, h: torch.Tensor) -> torch.Tensor:
            return h + self.scale * factor * h

    factor = 2.0
    module, x = built_in("mlp")
    plain = plain_model(grow(module, x, [(0, "users", "linear", "HOLDING")]))
    grafted(plain)[0][1].seed.__class__ = Nested
    with pytest.raises(NotPortableError, match="uses 'factor', which is no name of its file"):
        model_source(plain, grafts_of(plain), {})


def test_a_built_in_host_that_was_changed_is_not_rebuilt_from_its_config(tmp_path: Path) -> None:
    module, x = built_in("mlp")
    module.head = nn.Linear(8, 7)
    saved = save(module, tmp_path, x)
    assert saved.warnings == (
        "no model.py: this MLPHost is not what its config builds, or the config is not plain JSON data; use model.pt2, "
        "or esper.load(folder, host=…)",
    )
    assert torch.equal(load(tmp_path, trust_program=True)(x), module(x))


# -- damaged and missing files ----------------------------------------------------------------------------------------


@pytest.fixture
def damaged(exported: Path, tmp_path: Path) -> Path:
    for name in ("architecture.json", "model.safetensors"):
        (tmp_path / name).write_bytes((exported / "mlp" / name).read_bytes())
    return tmp_path


def refused(folder: Path, match: str) -> None:
    with pytest.raises(LoadError, match=match) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def edit(folder: Path, change: Callable[[dict], object]) -> None:
    path = folder / "architecture.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(sealed(data, folder)))


def test_missing_files(damaged: Path) -> None:
    refused(damaged / "nowhere", "holds no saved model")
    (damaged / "model.safetensors").unlink()
    refused(damaged, "without the weights there is no model")


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "[" * 100_000, '{"format": "other"}', "\x00\xff"])
def test_garbage_for_an_architecture(damaged: Path, text: str) -> None:
    (damaged / "architecture.json").write_text(text, encoding="latin-1")
    refused(damaged, "is damaged|does not describe a model saved by Esper")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda d: d.update(version=5), "has format 5; this Esper reads up to 4: update Esper"),
        (lambda d: d.pop("grafts"), "it has no 'grafts'"),
        (lambda d: d["grafts"][0].update(blueprint="gone"), "'gone', which is not registered here: import the file"),
        (lambda d: d["grafts"][0].update(path="stages.9"), "does not describe a model"),
        (lambda d: d["grafts"][0].pop("alpha"), "does not describe a model"),
        (lambda d: d["grafts"][0]["arguments"].update(channels="many"), "does not describe a model"),
        (lambda d: d["grafts"][0]["arguments"].update(channels=4), "belongs to another model: .*shape"),
        (lambda d: d["host"].update({"class": "Elsewhere"}), "needs the host 'Elsewhere'"),
        (lambda d: d["host"]["config"].update(widths=[16, 16]), "does not have stages.2"),
        (lambda d: d["host"].update(config=[1]), "does not describe a model"),
        (lambda d: d.update(host="mlp"), "pass host="),
        (lambda d: d.update(tied=3), "damaged or belongs"),
        (lambda d: d["grafts"][0].update(alpha=7), "alpha must lie between 0 and 1, not be 7"),
        (lambda d: d["grafts"][0].update(alpha=float("nan")), "alpha must lie between 0 and 1, not be nan"),
        (lambda d: d["grafts"][0].update(alpha="1"), "alpha must be float, not '1'"),
        (lambda d: d["grafts"][0].update(blend="cosine"), "blend must be one of linear, sigmoid, gated, not 'cosine'"),
        (lambda d: d["grafts"][0].update(layout=None), "layout must be str, not None"),
        (lambda d: d["grafts"][0].update(stage="DORMANT"), "stage must be one of BLENDING, HOLDING, FOSSILIZED, not"),
        (lambda d: d["grafts"][0].update(arguments=[1]), "arguments must be dict"),
        (lambda d: d["host"]["config"].update(classes=True), "the host's classes must be int, not True"),
        (lambda d: d["host"]["config"].update(widths=["a"]), r"the host's widths must be list\[int\], not \['a'\]"),
        (lambda d: d.update(tied={"a": "b"}), "'a' cannot share 'b', because there is no such tensor"),
        (lambda d: d.update(tied={"head.bias": "head.weight"}), "because it has weights of its own"),
        (lambda d: d.update(tied={"nobody": "head.weight"}), "the model does not have nobody"),
        (lambda d: d.update(tied={"head.bias": 3}), "damaged or belongs"),
    ],
)
def test_architectures_that_do_not_fit(damaged: Path, change: Callable[[dict], object], match: str) -> None:
    edit(damaged, change)
    refused(damaged, match)


@pytest.mark.parametrize("fault", ["norm", "activation"])
@pytest.mark.parametrize("value", ["layer", 1, None])
def test_a_kind_of_norm_or_activation_that_no_host_knows(
    exported: Path, tmp_path: Path, fault: str, value: object
) -> None:
    for name in ("architecture.json", "model.safetensors"):
        (tmp_path / name).write_bytes((exported / "conv1d" / name).read_bytes())
    edit(tmp_path, lambda d: d["host"]["config"].update({fault: value}))
    refused(tmp_path, f"the host's {fault} must be bool, not {value!r}")


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b[:5], lambda b: b"", lambda b: b"\xff" * 99])
def test_damaged_weights(damaged: Path, damage: Callable[[bytes], bytes]) -> None:
    weights = damaged / "model.safetensors"
    weights.write_bytes(damage(weights.read_bytes()))
    refused(damaged, "model.safetensors is damaged")


def test_places_where_nothing_can_be_written(tmp_path: Path) -> None:
    module, x = built_in("mlp")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ExportError, match="cannot write the model to"):
        save(grow(module, x, []), tmp_path / "file", x)


def test_an_example_that_the_model_does_not_take(tmp_path: Path) -> None:
    module, x = built_in("mlp")
    with pytest.raises(ExportError, match="MLPHost does not accept the example batch"):
        save(grow(module, x, []), tmp_path, torch.randn(2, 5))
    assert not list(tmp_path.iterdir())

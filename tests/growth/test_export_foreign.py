"""Models that this repository does not define leave Esper, too; and files made to do harm are refused."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from growing import grow, plant
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.export.pt2_archive._package import load_pt2

from esper.growth.attach import attach
from esper.growth.export import LoadError, load, plain_model, save
from saved_models import sealed


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)) + self.skip(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(Block(3, 8), Block(8, 8))
        self.layer2 = nn.Sequential(Block(8, 16), Block(16, 16))
        self.fc = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(self.layer1(x), 2)
        return self.fc(self.layer2(x).mean((2, 3)))


class CountsItsBatch(nn.Module):
    """torch.export takes `len` of a tensor for a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.stage(x) / len(x)


class Unexportable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stage = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stage(x)
        return x if float(x.detach().sum()) > 0 else x.flip(1)  # a choice that only the data can make


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


FOREIGN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[str], list[str]]] = {
    "resnet": (ResNet, (4, 3, 12, 12), ["layer1", "layer2.*"], ["depthwise", "conv", "attention"]),
    "encoder": (encoder, (4, 6, 16), ["layers.*"], ["mlp", "attention"]),
}

WITHOUT_ESPER = """
import sys

class NoEsper:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "esper":
            raise ImportError("esper cannot be imported here")

sys.meta_path.insert(0, NoEsper())
import torch
from safetensors.torch import load_file

for folder in sys.argv[1:]:
    check = load_file(folder + "/check.safetensors")
    model = torch.export.load(folder + "/model.pt2").module()
    print(float((model(check["x"]) - check["y"]).abs().max()))
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("foreign")
    for name, (make, shape, slots, blueprints) in FOREIGN.items():
        torch.manual_seed(0)
        x = torch.randn(*shape)
        plantings = [(i, blueprint, "gated", "HOLDING") for i, blueprint in enumerate(blueprints)]
        growing = grow(make(), x, plantings, slots=slots)
        saved = save(growing, root / name, x)
        assert len(saved.warnings) == 1
        assert "no model.py: Esper does not copy the source of" in saved.warnings[0]
        inputs = torch.cat([x, x[:3]])
        with torch.no_grad():
            save_file({"x": inputs, "y": growing(inputs)}, root / name / "check.safetensors")
    return root


@pytest.mark.slow
def test_programs_work_where_esper_cannot_be_imported(exported: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-c", WITHOUT_ESPER, *(str(exported / name) for name in FOREIGN)],
        cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    gaps = [float(line) for line in done.stdout.split()]
    assert len(gaps) == len(FOREIGN)
    assert max(gaps) <= 1e-5


@pytest.mark.parametrize("name", FOREIGN)
def test_load_gives_the_program_or_fills_a_fresh_host(exported: Path, name: str) -> None:
    check = load_file(exported / name / "check.safetensors")
    for model in (load(exported / name, trust_program=True), load(exported / name, host=FOREIGN[name][0]())):
        torch.testing.assert_close(model(check["x"]), check["y"], rtol=0, atol=1e-5)
    with pytest.raises(LoadError, match="does not describe this Linear"):
        load(exported / name, host=nn.Linear(2, 2))


def test_transformers_model_with_tied_weights(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=30, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    ids = torch.randint(0, 30, (4, 12))
    growing = attach(transformers.GPT2LMHeadModel(config), ["transformer.h.*"], {"input_ids": ids})
    plant(growing, growing.slots[0], "mlp", "gated", "HOLDING")
    growing.eval()
    saved = save(growing, tmp_path, {"input_ids": ids})
    assert growing.host.config.use_cache  # a program has no key-value cache; the model keeps its own
    assert saved.warnings == (
        "no model.py: Esper does not copy the source of GPT2LMHeadModel; use model.pt2 (import transformers before you "
        "load it; it has no key-value cache, as with use_cache=False), or esper.load(folder, host=…)",
    )
    architecture = json.loads((tmp_path / "architecture.json").read_text())
    assert architecture["tied"] == {"lm_head.weight": "transformer.wte.weight"}
    assert architecture["parameters"]["total"] == growing.parameter_count

    other = torch.randint(0, 30, (3, 9))
    expected = growing(other)["logits"]
    torch.testing.assert_close(
        load(tmp_path, trust_program=True)(input_ids=other)["logits"], expected, rtol=0, atol=1e-5
    )
    filled = load(tmp_path, host=transformers.GPT2LMHeadModel(config))
    assert filled.lm_head.weight is filled.transformer.wte.weight
    torch.testing.assert_close(filled(other)["logits"], expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_decoder_that_reads_attributes_of_its_layers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=30, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(0, 30, (4, 12))
    growing = attach(transformers.LlamaForCausalLM(config), ["model.layers.*"], ids)
    plant(growing, growing.slots[1], "mlp", "linear", "FOSSILIZED")
    growing.eval()
    assert torch.equal(plain_model(growing)(ids)["logits"], growing(ids)["logits"])
    save(growing, tmp_path, ids)
    torch.testing.assert_close(
        load(tmp_path, trust_program=True)(ids)["logits"], growing(ids)["logits"], rtol=0, atol=1e-5
    )


def test_a_program_for_one_batch_size_says_so(tmp_path: Path) -> None:
    x = torch.randn(4, 4)
    growing = grow(CountsItsBatch(), x, [(0, "mlp", "linear", "HOLDING")], slots=["stage"])
    saved = save(growing, tmp_path, x)
    assert any("use model.pt2 (takes batches of 4 only, because torch.export said" in line for line in saved.warnings)
    assert json.loads((tmp_path / "architecture.json").read_text())["model.pt2"]["batch"] == "only 4"
    torch.testing.assert_close(load(tmp_path, trust_program=True)(x), growing(x))


def test_a_model_that_cannot_become_a_program_keeps_its_weights(tmp_path: Path) -> None:
    x = torch.randn(4, 4)
    growing = grow(Unexportable(), x, [(0, "mlp", "linear", "HOLDING")], slots=["stage"])
    saved = save(growing, tmp_path, x)
    assert any("and no model.pt2 (torch.export said: " in line for line in saved.warnings)
    assert saved.files == ("model.safetensors", "architecture.json")
    with pytest.raises(LoadError, match="Esper cannot rebuild a Unexportable: pass host="):
        load(tmp_path)
    assert torch.equal(load(tmp_path, host=Unexportable())(x), growing(x))


# -- programs made to do harm -----------------------------------------------------------------------------------------


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


def archive(source: Path, target: Path, change: Callable[[str, bytes], bytes], more: dict[str, bytes]) -> None:
    """A copy of a .pt2 with its records changed."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        root = old.namelist()[0].partition("/")[0]
        for name in old.namelist():
            new.writestr(name, change(name.partition("/")[2], old.read(name)))
        for name, content in more.items():
            new.writestr(f"{root}/{name}", content)


@pytest.fixture
def hostile(exported: Path, tmp_path: Path) -> Path:
    for name in ("architecture.json", "model.safetensors", "model.pt2"):
        (tmp_path / name).write_bytes((exported / "resnet" / name).read_bytes())
    return tmp_path


def refused(folder: Path, match: str) -> None:
    """Even by those who ask for the program, and with digests that fit."""
    path = folder / "architecture.json"
    path.write_text(json.dumps(sealed(json.loads(path.read_text()), folder)))
    with pytest.raises(LoadError, match=match) as caught:
        load(folder, trust_program=True)
    assert "\n" not in str(caught.value)
    assert not (folder / "exploded").exists()


def test_pickled_example_inputs_are_refused(exported: Path, hostile: Path) -> None:
    bomb = pickle.dumps(Bomb(hostile / "exploded"))
    path = hostile / "model.pt2"
    change = lambda name, content: bomb if name.startswith("data/sample_inputs") else content  # noqa: E731
    archive(exported / "resnet" / "model.pt2", path, change, {})
    refused(hostile, "holds pickled example inputs")
    with pytest.raises(RuntimeError, match="Invalid magic number"):  # after torch's own loader has run it
        load_pt2(path)
    assert (hostile / "exploded").exists()


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        (b"torch.ops.aten.relu.default", b"torch.os.system", "asks for .target"),
        (b"torch.ops.aten.relu.default", b"_operator.call", "asks for .target"),
        (b"torch.ops.aten.relu.default", b"torch.ops.aten.from_file.default", "asks for .target"),
        (b"Symbol('s", b"__import__('os').mkdir('exploded') or Symbol('s", "asks for .expr_str"),
        (b'"use_pickle": false', b'"use_pickle": true', "asks for .use_pickle"),
    ],
)
def test_programs_that_ask_for_more_than_arithmetic(
    exported: Path, hostile: Path, old: bytes, new: bytes, match: str
) -> None:
    source = exported / "resnet" / "model.pt2"
    archive(source, hostile / "model.pt2", lambda _, content: content.replace(old, new), {})
    assert old in source.read_bytes()
    refused(hostile, match)


@pytest.mark.parametrize(
    "record",
    ["data/aotinductor/model/evil.so", "data/weights/model.pt", "data/constants/opaque_obj_0", "models/b.json"],
)
def test_records_that_no_program_needs(exported: Path, hostile: Path, record: str) -> None:
    archive(exported / "resnet" / "model.pt2", hostile / "model.pt2", lambda _, content: content, {record: b"{}"})
    refused(hostile, f"holds '{record}'")


def test_files_that_are_no_archive(hostile: Path) -> None:
    path = hostile / "model.pt2"
    whole = path.read_bytes()
    for content in (
        pickle.dumps(Bomb(hostile / "exploded")),
        whole[: len(whole) // 2],
        b"",
        b"PK\x03\x04" + b"\0" * 99,
    ):
        path.write_bytes(content)
        refused(hostile, "is not a .pt2 archive, or it is damaged")


def test_saving_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder) -> None:
    """torch.export warns of weights of an LSTM, and logs graphs of whatever it could not trace."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.core(x)[0])

    for model, example in ((Recurrent(), torch.randn(2, 5, 3)), (Unexportable(), torch.randn(2, 4))):
        save(model.eval(), tmp_path / type(model).__name__, example)
    assert capfd.readouterr() == ("", "")
    assert not [w for w in recwarn if issubclass(w.category, UserWarning)]

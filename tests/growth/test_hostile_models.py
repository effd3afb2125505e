"""Model folders made to do harm, or damaged: no code of theirs runs, no memory is taken for what is not there."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from growing import built_in, grow
from safetensors.torch import load_file, save_file
from test_export_foreign import ResNet, archive

from esper.growth.export import LoadError, load, save
from esper.growth.plain import grafted, grafts_of
from esper.growth.program import read_program
from esper.growth.standalone import _HOSTS, NotPortableError, model_source, portable_host
from esper.tasks.hosts import MLPHost
from saved_models import sealed

EVIL = "(__import__('pathlib').Path('exploded').touch())"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`mlp` can be rebuilt from data; `resnet` is the user's class, so that only its program is there."""
    root = tmp_path_factory.mktemp("made")
    module, x = built_in("mlp")
    save(grow(module, x, [(0, "mlp", "gated", "FOSSILIZED")]), root / "mlp", x, history={"epochs": []})
    images = torch.randn(2, 3, 8, 8)
    save(grow(ResNet(), images, [(0, "conv", "linear", "HOLDING")], slots=["layer1"]), root / "resnet", images)
    return root


@pytest.fixture
def mlp(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "mlp", tmp_path / "mlp"))


@pytest.fixture
def resnet(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "resnet", tmp_path / "resnet"))


@pytest.fixture(autouse=True)
def _nothing_explodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    assert not Path("exploded").exists(), "code of a hostile file ran"


def edit(folder: Path, change: Callable[[dict], object]) -> None:
    """Change an architecture as an attacker does: with digests that fit."""
    path = folder / "architecture.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(sealed(data, folder)))


def refused(folder: Path, match: str, **options: object) -> None:
    with pytest.raises(LoadError, match=match) as caught:
        load(folder, **options)
    assert "\n" not in str(caught.value)


# -- code -------------------------------------------------------------------------------------------------------------


def test_a_program_is_loaded_on_request_alone(resnet: Path) -> None:
    refused(resnet, r"can run any code .* host= .* trust_program=True")
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(load(resnet, trust_program=True)(x), load(resnet, host=ResNet())(x), rtol=0, atol=1e-5)


def test_the_class_name_of_a_graft_is_the_seeds_own(mlp: Path) -> None:
    edit(mlp, lambda d: d["grafts"][0].update(class_name=f"{EVIL} or FeatureMLP"))
    refused(mlp, "class_name must be a name")
    edit(mlp, lambda d: d["grafts"][0].update(class_name="print"))
    model = load(mlp)
    assert [record.class_name for record, _ in grafts_of(model)] == ["FeatureMLP"]
    grafted(model)[0][1].grown["class_name"] = f"{EVIL} or FeatureMLP"  # whatever way it came in
    source = model_source(model, grafts_of(model), {})
    assert "exploded" not in source
    assert "FeatureMLP(channels=16" in source


@pytest.mark.parametrize("key", [f"x={EVIL}, channels", "class", "", "other"])
def test_argument_names_that_the_class_does_not_have(mlp: Path, key: str) -> None:
    model = load(mlp)
    grafted(model)[0][1].grown["arguments"][key] = 1
    with pytest.raises(NotPortableError, match="has no argument"):
        model_source(model, grafts_of(model), {})
    edit(mlp, lambda d: d["grafts"][0]["arguments"].update({key: 1}))
    refused(mlp, "does not describe a model")


class _Shown(str):
    """Text whose repr is code: JSON has no such thing, a program that builds grafts by hand may."""

    def __repr__(self) -> str:
        return EVIL


@pytest.mark.parametrize("field", ["path", "layout", "alpha"])
def test_every_text_in_the_source_is_plain_data(mlp: Path, field: str) -> None:
    model = load(mlp)
    ((record, seed),) = grafts_of(model)
    with pytest.raises(NotPortableError, match="is not plain data"):
        model_source(model, [(replace(record, **{field: _Shown("stages.0")}), seed)], {})
    with pytest.raises(NotPortableError, match="is not plain data"):
        model_source(load(mlp), [], {"a": _Shown("b")})


NAMES = {
    "input": (b'"name": "x"', f'"name": "x={EVIL}"'.encode()),
    "every mention of the input": (b'"x"', f'"x={EVIL}"'.encode()),
    "node": (b'"relu"', f'"relu;{EVIL}"'.encode()),
    "keyword": (b'"relu"', b'"lambda"'),
    "argument": (b'"forward_arg_names": ["x"]', f'"forward_arg_names": ["x={EVIL}"]'.encode()),
    "parameter": (b"fc.weight", b'fc\\").weight'),
    "guard": (b'"guards_code": []', f'"guards_code": ["{EVIL}"]'.encode()),
    "specification": (b'"in_spec": "', f'"in_spec": "{EVIL}'.encode()),
}


@pytest.mark.parametrize("name", NAMES)
def test_every_name_in_a_program_is_an_identifier(made: Path, tmp_path: Path, name: str) -> None:
    old, new = NAMES[name]
    source = made / "resnet" / "model.pt2"
    with zipfile.ZipFile(source) as whole:
        assert any(old in whole.read(entry) for entry in whole.namelist()), "the test changes nothing"
    archive(source, tmp_path / "model.pt2", lambda _, content: content.replace(old, new), {})
    with pytest.raises(LoadError, match="more than arithmetic"):
        read_program(tmp_path / "model.pt2")


def test_a_program_says_nothing_about_the_machine_it_was_made_on(made: Path) -> None:
    content = (made / "resnet" / "model.pt2").read_bytes()
    for private in (b".py", b"File ", b"line ", b"forward(", os.path.expanduser("~").encode() + b"/", b"ResNet"):
        assert private not in content, private


# -- digests ----------------------------------------------------------------------------------------------------------


def test_every_file_of_the_folder_has_a_digest(mlp: Path) -> None:
    data = json.loads((mlp / "architecture.json").read_text())
    assert set(data["digests"]) == {file.name for file in mlp.iterdir()}


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt2", "model.py", "history.json", "architecture.json"])
@pytest.mark.parametrize("place", [0.01, 0.3, 0.6, 0.99])
def test_any_flip_is_refused(mlp: Path, name: str, place: float) -> None:
    content = bytearray((mlp / name).read_bytes())
    content[int(place * len(content))] ^= 4
    (mlp / name).write_bytes(content)
    refused(mlp, f"{name} (is|has|does)")


def test_folders_without_digests_still_load_if_they_are_old(mlp: Path) -> None:
    path = mlp / "architecture.json"
    data = json.loads(path.read_text())
    del data["digests"]
    path.write_text(json.dumps(data))
    refused(mlp, "it has no 'digests'")
    shutil.copytree(Path(__file__).parent / "saved_before" / "nested", mlp, dirs_exist_ok=True)
    del (data := json.loads(path.read_text()))["digests"]
    path.write_text(json.dumps({**data, "version": 2}))
    check = load_file(mlp / "check.safetensors")
    torch.testing.assert_close(load(mlp)(check["x"]), check["y"])  # recorded on another processor


@pytest.mark.parametrize("listed", [{"/dev/zero": "sha256:0"}, {"../x": "sha256:0"}, ["model.py"], {"model.py": 3}])
def test_digests_of_other_files_are_not_looked_at(mlp: Path, listed: object) -> None:
    path = mlp / "architecture.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "digests": listed}))
    refused(mlp, "digests")


def test_a_folder_that_was_not_saved_to_the_end_is_recognised(mlp: Path) -> None:
    (mlp / "architecture.json").unlink()
    refused(mlp, "was not saved to the end: there is no architecture.json, which is written last")


@pytest.mark.parametrize("name", ["architecture.json", "model.safetensors", "model.pt2"])
def test_what_is_no_file_is_not_opened(resnet: Path, name: str) -> None:
    (resnet / name).unlink()
    os.mkfifo(resnet / name)
    refused(resnet, f"{name} .*not a file", trust_program=True)


# -- bombs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def _little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of more than a million values is made, except where it takes no memory."""
    plain = torch.empty

    def empty(*shape: object, **options: object) -> torch.Tensor:
        made = plain(*shape, **options)
        assert made.is_meta or made.numel() < 1_000_000
        return made

    monkeypatch.setattr(torch, "empty", empty)


BOMBS: dict[str, Callable[[dict], object]] = {
    "wide host": lambda d: d["host"]["config"].update(widths=[10_000] * 3),
    "many stages": lambda d: d["host"]["config"].update(widths=[1] * 100_000),
    "wider than memory": lambda d: d["host"]["config"].update(widths=[2**40]),
    "wide seed": lambda d: d["grafts"][0]["arguments"].update(channels=20_000),
    "deep seed": lambda d: d["grafts"][0]["arguments"].update(expansion=10_000_000),
    "many grafts": lambda d: d.update(grafts=d["grafts"] * 50_000),
}


@pytest.mark.usefixtures("_little_memory")
@pytest.mark.parametrize("bomb", BOMBS)
def test_sizes_are_those_of_the_weights_before_memory_is_taken(mlp: Path, bomb: str) -> None:
    edit(mlp, BOMBS[bomb])
    for host in (None, MLPHost(12, [16, 16, 8], 5)):
        if host is not None and ("host" in bomb or "stages" in bomb or "memory" in bomb):
            continue  # the host is given, and the file's is not built
        refused(mlp, "more than|does not describe|overflow|too large", host=host)


@pytest.mark.usefixtures("_little_memory")
def test_layers_without_number(tmp_path: Path) -> None:
    module, x = built_in("gpt")
    save(grow(module, x, []), tmp_path / "gpt", x)
    edit(tmp_path / "gpt", lambda d: d["host"]["config"].update(layers=10**9))
    refused(tmp_path / "gpt", "more than")


def test_an_architecture_of_megabytes_is_not_read(mlp: Path) -> None:
    with (mlp / "architecture.json").open("ab") as file:
        file.truncate(2**40)
    refused(mlp, "architecture.json .* it has more than .* bytes")


def test_compressed_programs_are_refused_before_they_are_unpacked(made: Path, tmp_path: Path) -> None:
    bomb = tmp_path / "model.pt2"
    with zipfile.ZipFile(made / "resnet" / "model.pt2") as old, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, b"\0" * 50_000_000 if name.endswith("weight_0") else old.read(name))
    with pytest.raises(LoadError, match=r"unpacks to .* more than the file itself"):
        read_program(bomb)


def test_weights_of_another_kind_than_the_models(mlp: Path) -> None:
    weights = {name: value.to(torch.int8) for name, value in load(mlp).state_dict().items()}
    save_file(weights, mlp / "model.safetensors")
    edit(mlp, lambda d: None)
    refused(mlp, "int8")


def test_a_host_that_cannot_be_sized_is_not_rebuilt_from_data(tmp_path: Path) -> None:
    """Its class reads values while it is built; so its sizes cannot be known without taking the memory."""

    class Reading(MLPHost):
        def __init__(self, **config: object) -> None:
            super().__init__(**config)
            self.scale = float(self.head.weight.detach().abs().max())

    portable_host(Reading)
    try:
        x = torch.randn(4, 12)
        module = Reading(in_features=12, widths=[8], classes=3)
        saved = save(module, tmp_path / "reading", x)
        assert any("no model.py" in warning for warning in saved.warnings)
        assert torch.equal(load(tmp_path / "reading", host=Reading(**module.config))(x), module(x))
    finally:
        del _HOSTS["Reading"]

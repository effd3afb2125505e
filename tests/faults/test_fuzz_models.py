"""Model folders, damaged in every way: refused in one line, or read as what was saved; little memory, little time.

`ESPER_FUZZ_CASES=10000 pytest tests/faults/test_fuzz_models.py` tries that many of each kind.
"""

from __future__ import annotations

import json
import os
import random
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from fuzzing import HUGE, Kind, attack, cases, damage_json
from torch import Tensor, nn

from esper.growth.attach import attach
from esper.growth.export import LoadError, load, save
from esper.growth.graft import is_record
from esper.growth.model import GrowingModel
from esper.lifecycle import Stage
from esper.tasks.hosts import Conv1dHost, GPTHost, MLPHost
from saved_models import sealed
from small_worlds import advance

COUNT = int(os.environ.get("ESPER_FUZZ_CASES", "0"))
BATCH = 100
"""Cases in one test: a test of its own for each would take longer than most cases do."""


class Users(nn.Module):
    """A class that Esper does not have: only the program, or `host=`, brings it back."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stage(x))  # type: ignore[no-any-return]


def grown(host: nn.Module, example: Tensor, slots: list[str], blueprint: str) -> GrowingModel:
    """One seed, kept, that acts."""
    model = attach(host, slots, example)
    slot = model.slots[0]
    model.germinate(slot, blueprint, "gated", epoch=0)
    for parameter in model.seed_parameters(slot):
        nn.init.normal_(parameter, std=0.3)
    while slot.life.stage is not Stage.HOLDING:
        advance(slot)
    model._follow(slot)
    return model.eval()


def make(kind: str, folder: Path) -> None:
    torch.manual_seed(0)
    host, example, slots, blueprint = {
        "mlp": (MLPHost(6, [8, 8], 3), torch.randn(4, 6), ["stages.0"], "mlp"),
        "conv": (Conv1dHost(1, [4, 4], [3, 3], 3), torch.randn(4, 1, 12), ["stages.0"], "conv"),
        "gpt": (GPTHost(7, 8, 8, 2, 2), torch.randint(0, 7, (4, 6)), ["blocks.0"], "attention"),
        "users": (Users(), torch.randn(4, 6), ["stage"], "lora"),
    }[kind]
    save(grown(host, example, slots, blueprint), folder, example, history={"epochs": [1, 2]})


def same(found: nn.Module, original: nn.Module) -> bool:
    """In all weights. What a seed says about itself is text that nothing more is computed from."""
    ours, theirs = ({k: v for k, v in m.state_dict().items() if not is_record(k)} for m in (found, original))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# -- what an attacker does --------------------------------------------------------------------------------------------


def architecture(folder: Path, rng: random.Random) -> str:
    """One value, with digests that fit. What nothing is rebuilt from may be anything."""
    path = folder / "architecture.json"
    data = json.loads(path.read_text())
    needed = {key: data[key] for key in ("host", "grafts", "tied", "version", "format")}
    what = damage_json(needed, rng)
    rest = {key: value for key, value in data.items() if key not in ("host", "grafts", "tied", "version", "format")}
    path.write_text(json.dumps(sealed({**rest, **needed}, folder)))
    return f"architecture.json, {what}"


def sizes(folder: Path, rng: random.Random) -> str:
    """A network that is far larger than its weights."""
    path = folder / "architecture.json"
    data = json.loads(path.read_text())
    settings = (
        rng.choice([data["host"]["config"] or {}, data["grafts"][0]["arguments"]]) or data["grafts"][0]["arguments"]
    )
    key = rng.choice([key for key, value in sorted(settings.items()) if isinstance(value, int | list)])
    number = rng.choice(HUGE)
    settings[key] = [number] * rng.choice([1, 3, 20_000]) if isinstance(settings[key], list) else number
    path.write_text(json.dumps(sealed(data, folder)))
    return f"architecture.json, {key} is {str(settings[key])[:40]}"


def header(folder: Path, rng: random.Random) -> str:
    """Of the weights: other shapes, types, places and names."""
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    data = json.loads(content[8 : 8 + length])
    what = damage_json(data, rng)
    if rng.random() < 0.3:
        length = rng.choice([0, 2**62, 2**64 - 1, length + 1])
        text = content[8 : 8 + length]
    else:
        text = json.dumps(data).encode("utf-8", "surrogatepass")
        length = len(text)
    path.write_bytes(length.to_bytes(8, "little") + text + content[8 + len(text) :])
    _seal(folder)
    return f"model.safetensors, {what}"


def program(folder: Path, rng: random.Random) -> str:
    """One value of a document of the program, or one record that is far larger than the file."""
    path = folder / "model.pt2"
    with zipfile.ZipFile(path) as old:
        records = {name: old.read(name) for name in old.namelist()}
    if rng.random() < 0.2:
        name = rng.choice(sorted(records))
        records[name] = bytes(rng.choice([10**6, 2 * 10**7]))
        what = f"{name} is zeros"
    else:
        name = rng.choice([name for name in sorted(records) if name.endswith(".json")])
        data = json.loads(records[name])
        what = damage_json(data, rng)
        records[name] = json.dumps(data).encode()
    with zipfile.ZipFile(path, "w", rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as new:
        for name, content in records.items():
            new.writestr(name, content)
    _seal(folder)
    return f"model.pt2, {what}"


def _seal(folder: Path) -> None:
    path = folder / "architecture.json"
    path.write_text(json.dumps(sealed(json.loads(path.read_text()), folder)))


# -- the table --------------------------------------------------------------------------------------------------------


def _kind(name: str, forged: tuple[object, ...], host: type[nn.Module] | None = None) -> Kind:
    def read(folder: Path) -> nn.Module:
        return load(folder, host=None if host is None else host())

    return Kind(name, partial(make, name), read, same, (LoadError,), forged)  # type: ignore[arg-type]


KINDS = [
    _kind("mlp", (architecture, sizes, header)),
    _kind("conv", (architecture, sizes, header)),
    _kind("gpt", (architecture, sizes, header)),
    _kind("users", (architecture, sizes, header), Users),
]


@pytest.fixture(autouse=True)
def _nothing_explodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / "exploded").exists(), "code of a hostile file ran"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_damaged_models_are_refused_or_as_they_were(kind: Kind, tmp_path: Path) -> None:
    valid = tmp_path / "valid"
    kind.make(valid)
    original = kind.read(valid)
    assert same(kind.read(valid), original)
    for case in cases(kind, COUNT or BATCH):
        attack(case, valid, original, tmp_path / str(case))


def test_damaged_programs_run_nothing(tmp_path: Path) -> None:
    """Whoever trusts a program gets it as it was, or a refusal; one changed on purpose may compute something else."""

    def read(folder: Path) -> nn.Module:
        return load(folder, trust_program=True)

    def computes(found: nn.Module, original: nn.Module) -> bool:
        return isinstance(found, nn.Module)

    accidents = Kind("program", partial(make, "users"), read, same, (LoadError,))
    on_purpose = Kind("program-forged", partial(make, "users"), read, computes, (LoadError,), (program,) * 4)
    valid = tmp_path / "valid"
    accidents.make(valid)
    original = read(valid)
    for case in [*cases(accidents, COUNT or 30), *cases(on_purpose, COUNT or 30)]:
        attack(case, valid, original, tmp_path / str(case))

"""Seeds in folders and in checkpoints of others, damaged in every way: refused in one line, or read as what was saved.

`ESPER_FUZZ_CASES=10000 pytest tests/faults/test_fuzz_seeds.py` tries that many of each kind.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
import torch
from fuzzing import Kind, attack, cases, damage_json
from safetensors.torch import load_file, save_file
from test_fuzz_models import Users, grown, header, same
from torch import nn

import esper
from esper.growth.export import LoadError, plain_model
from esper.growth.folder import with_digests
from esper.growth.graft import is_record
from esper.growth.seeds import DOCUMENT, WEIGHTS

COUNT = int(os.environ.get("ESPER_FUZZ_CASES", "0")) or 60


def model() -> nn.Module:
    torch.manual_seed(0)
    return plain_model(grown(Users(), torch.randn(4, 6), ["stage"], "lora"))


def folder(path: Path) -> None:
    esper.save_seeds(model(), path)


def checkpoint(path: Path) -> None:
    path.mkdir()
    save_file(model().state_dict(), path / "model.safetensors")


def document(path: Path, rng: random.Random) -> str:
    """One value, with digests that fit."""
    data = json.loads((path / DOCUMENT).read_text())
    del data["digests"]
    what = damage_json(data, rng)
    files = {WEIGHTS: (path / WEIGHTS).read_bytes()}
    (path / DOCUMENT).write_text(json.dumps(with_digests(data, files, DOCUMENT)))
    return f"{DOCUMENT}, {what}"


def record(path: Path, rng: random.Random) -> str:
    """One value of what the seed says about itself."""
    tensors = load_file(path / "model.safetensors")
    (key,) = (name for name in tensors if is_record(name))
    data = json.loads(bytes(tensors[key].tolist()))
    what = damage_json(data, rng)
    tensors[key] = torch.tensor(list(json.dumps(data).encode()), dtype=torch.uint8)
    save_file(tensors, path / "model.safetensors")
    return f"the record, {what}"


def weights(path: Path, rng: random.Random) -> str:
    """The host's weights are not read from here, so only names and shapes of the seeds' matter."""
    tensors = load_file(path / "model.safetensors")
    key = rng.choice([name for name in tensors if "esper_seeds" in name])
    way = rng.choice(["gone", "larger", "integers"])
    value = tensors.pop(key)
    if way == "larger":
        tensors[key] = torch.zeros(*value.shape, 3)
    elif way == "integers" and not is_record(key):
        tensors[key] = value.to(torch.int8)
    save_file(tensors, path / "model.safetensors")
    return f"{key} is {way}"


def read(path: Path) -> nn.Module:
    return esper.load_seeds(Users(), path)


def same_seeds(found: nn.Module, original: nn.Module) -> bool:
    for host in (found, original):  # a host's weights are its own
        for name, parameter in host.named_parameters():
            if "esper_seeds" not in name:
                nn.init.zeros_(parameter)
    return same(found, original)


def same_shapes(found: nn.Module, original: nn.Module) -> bool:
    """A checkpoint of others has no digests: one of its numbers may be another."""
    ours, theirs = ({k: v.shape for k, v in m.state_dict().items() if not is_record(k)} for m in (found, original))
    return ours == theirs


KINDS = [
    Kind("seeds", folder, read, same_seeds, (LoadError,), (document, document)),
    Kind("checkpoint", checkpoint, read, same_shapes, (LoadError,), (record, record, weights, header)),
]


@pytest.mark.filterwarnings("ignore::esper.GrowthWarning")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_damaged_seeds_are_refused_or_as_they_were(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("test_fuzz_models._seal", lambda folder: None)  # a checkpoint has no digests
    valid = tmp_path / "valid"
    kind.make(valid)
    original = kind.read(valid)
    assert same_seeds(kind.read(valid), original)
    for case in cases(kind, COUNT):
        attack(case, valid, original, tmp_path / str(case))
    assert not (tmp_path / "exploded").exists()

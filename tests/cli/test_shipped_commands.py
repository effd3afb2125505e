"""A shipped controller by its name, in every command that takes a controller; and in `esper.grow`.

Covers: R081, R149
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import esper
from esper.agent import shipped
from esper.agent.checkpoints import load_checkpoint
from esper.agent.shipped import provenance, shipped_path
from esper.cli import main
from esper.offline.recording import growth_schema, read
from esper.tasks.family import TaskFamily
from esper.training.run_folder import RunFolder

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder, and episodes of three epochs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(TaskFamily.__init__, "__kwdefaults__", {**TaskFamily.__init__.__kwdefaults__, "horizon": 3})


def test_grow(capsys: Capture) -> None:
    assert main(["grow", "--task", "digits", "--epochs", "3", "--controller", "small", "--no-control", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["controller"] == "small"
    assert facts["out"] == "grown/digits-small-0"


def test_grow_without_a_name_is_the_default(capsys: Capture) -> None:
    assert main(["grow", "--task", "digits", "--epochs", "1", "--no-control", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["controller"] == shipped.DEFAULT_CONTROLLER


def test_compare() -> None:
    words = ["compare", "--task", "digits", "--controllers", "none,small,again=small", "--episodes", "1"]
    assert main([*words, "--no-controls", "--workers", "1", "--out", "kept"]) == 0
    facts = json.loads(Path("kept/comparison.json").read_text())
    assert [row["name"] for row in facts["rows"]] == ["none", "small", "again"]
    assert facts["rows"][1]["score"] == facts["rows"][2]["score"]
    assert facts["best_rule"] == "none"  # a learned one is no rule


def test_record() -> None:
    words = ["record", "--task", "digits", "--controllers", "small", "--episodes", "1", "--workers", "1"]
    assert main([*words, "--out", "recorded"]) == 0
    assert read(Path("recorded"), growth_schema()).episodes.controllers == ("small",)


TRAIN = ["train", "--task", "digits", "--envs", "1", "--updates", "1", "--evaluate-every", "0"]
QUICK = ["--compare-episodes", "0", "--workers", "1"]


def test_train_starts_from_it_and_a_run_from_that_run() -> None:
    assert main([*TRAIN, *QUICK, "--init", "small", "--teacher-kl", "0.5", "--run", "first"]) == 0
    first = RunFolder(Path("first"))
    assert first.start.read_bytes() == shipped_path("small").read_bytes()
    trained = load_checkpoint(first.checkpoint(1)).tensors
    start = load_checkpoint(first.start).tensors
    name = "network/op_head.out.weight"
    assert trained[name].dtype == torch.float32
    assert 0.0 < float((trained[name] - start[name]).abs().max()) < 0.05
    assert main([*TRAIN, *QUICK, "--init", "first", "--run", "second"]) == 0
    assert RunFolder(Path("second")).start.read_bytes() == first.checkpoint(1).read_bytes()


def test_info(capsys: Capture) -> None:
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert "small" in facts["controllers"]
    assert facts["learned"]["small"]["sha256"] == provenance("small").sha256
    assert main(["info"]) == 0
    assert f"small: {provenance('small').summary}" in capsys.readouterr().out.replace("\n", " ").replace("  ", " ")


def test_in_python() -> None:
    torch.manual_seed(0)
    x = torch.randn(96, 2)
    data = (x, (x[:, 0] * x[:, 1] > 0).long())
    host = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 2))
    grown = esper.grow(host, data, data, slots=["1"], controller="small", epochs=3, batch_size=32, device="cpu")
    assert grown.history.controller == "small"


@pytest.mark.parametrize(
    "words",
    [
        ["grow", "--task", "digits", "--controller", "small"],
        ["compare", "--task", "digits", "--controllers", "none,small"],
        ["record", "--task", "digits", "--controllers", "small"],
        [*TRAIN, "--init", "small", "--run", "run"],
    ],
    ids=lambda words: words[0],
)
def test_a_flipped_byte_ends_every_command_with_one_line(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(shipped.SHIPPED_FOLDER, folder)
    monkeypatch.setattr(shipped, "SHIPPED_FOLDER", folder)
    weights = folder / "small.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1000] ^= 16
    weights.write_bytes(content)
    assert main(words) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "is not the file that was shipped as 'small'" in said
    assert not Path("run").exists()

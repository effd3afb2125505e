"""`python -m esper.training`: a run in parts, on a machine that has none of the optional packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from esper.agent.checkpoints import load_checkpoint
from esper.training import __main__ as command
from esper.training.run_folder import RunFolder
from esper.training.session import duration_of
from esper.training.train_config import PRESETS

CHANGES = ["--preset", "demo", "--seed", "3", "--device", "cpu", "--workers", "1"]
SET = ["--set", "envs=2", "draws=2", "updates=2", "rent=varied", "ppo.epochs=1", "ppo.minibatches=1"]
WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"tyro", "gymnasium", "pydantic", "matplotlib", "starlette", "ray", "lightning"}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import runpy
sys.argv[0] = "esper.training"
runpy.run_module("esper.training", run_name="__main__")
"""


@pytest.mark.slow
def test_a_run_in_parts_without_optional_packages_ends_with_the_same_weights(tmp_path: Path) -> None:
    """The parts are processes: one that stops before its first update, one that ends, one that runs alone."""
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    first = [sys.executable, "-c", WITHOUT, *CHANGES, "--run", str(parts), "--stop-after", "0", *SET]
    done = subprocess.run(first, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "stopped after update 0 of 2: continue with --resume" in done.stdout
    assert command.main(["--run", str(parts), "--resume", "--device", "cpu", "--workers", "1"]) == 0
    assert command.main([*CHANGES, "--run", str(whole), *SET]) == 0
    ends = [load_checkpoint(RunFolder(path).checkpoint(2)).tensors for path in (parts, whole)]
    assert all(torch.equal(ends[0][name], tensor) for name, tensor in ends[1].items())
    assert RunFolder.open(parts)[1].rent == "varied"


def test_the_limit_counts_the_longest_update(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 40.0, 40.0, 50.0, 59.0, 61.0])
    monkeypatch.setattr(command.time, "monotonic", lambda: next(clock))
    limit = command.TimeLimit(100.0, began=0.0)
    assert not limit.is_near()  # at 0
    limit.note()  # an update of 40
    assert not limit.is_near()  # at 40
    limit.note()  # one of 10
    assert not limit.is_near()  # at 59: 99
    assert limit.is_near()  # at 61: 101


def test_a_change_that_is_none_is_refused() -> None:
    with pytest.raises(SystemExit, match="NAME=VALUE"):
        command.configured("demo", 0, ["envs"])
    with pytest.raises(ValueError, match="unknown setting"):
        command.configured("demo", 0, ["ppo.learning_rte=1"])


@pytest.mark.slow
def test_a_long_run_says_how_long_and_a_short_one_does_not() -> None:
    config = command.configured("demo", 0, ["envs=1024", "updates=10", "draws=null", "task=grammar/vector"])
    said = duration_of(config, "stacked", "cpu", 1)
    assert said.startswith("0.2 million env-steps at about ")
    assert said.endswith(" on this device (cpu)")
    assert duration_of(PRESETS["demo"], "eager", "cpu", 1) == ""


def test_changes_may_be_given_in_several_parts() -> None:
    """The last --set won, and a run of two networks had 2,048."""
    options = command._parser().parse_args(["--run", "r", "--set", "envs=2", "--set", "updates=1", "seed=7"])
    config = command.configured("demo", options.seed, options.set)
    assert (config.envs, config.updates, config.seed) == (2, 1, 7)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--set", "ppo.learning_rte=1"], "unknown setting 'learning_rte'"),
        (["--set", "init=smal"], "there is no checkpoint smal"),
        (["--set", "ppo.teacher_kl=0.5"], "needs a teacher"),
        (["--set", "precision=bf16"], "--precision bf16 is for GPUs"),
        (["--set", "engine=graphs"], "--engine graphs needs a GPU"),
        (["--set", "tensorboard=true"], "has an effect in `esper train` only"),
        (["--set", "ppo=3", "ppo.epochs=1"], "gives ppo a value and ppo.epochs another"),
        (["--workers", "-3"], "--workers must be at least 1"),
        (["--device", "cuda:99"], "device 'cuda:99' cannot be used here"),
        (["--resume"], "holds no training run"),
    ],
)
def test_what_cannot_be_is_one_line_and_leaves_no_run(
    tmp_path: Path, words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was a traceback, and a folder in which the corrected command was refused."""
    preset = [] if "--resume" in words else ["--preset", "demo"]
    device = [] if "--device" in words else ["--device", "cpu"]
    assert command.main(["--run", str(tmp_path / "run"), *preset, *device, *words]) in (1, 2)
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_takes_no_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They were taken, and had no effect."""
    assert command.main(["--run", str(tmp_path), "--resume", "--set", "updates=9", "--device", "cpu"]) == 1
    assert "a resumed run keeps its configuration" in capsys.readouterr().err

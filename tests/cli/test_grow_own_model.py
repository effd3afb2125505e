"""`esper grow --model FILE.py:FUNCTION --data …`: grows a model of one's own, or says in one line why not."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import esper
from esper.cli import main, user_code

Capture = pytest.CaptureFixture[str]
FILE = """
import torch
from torch import nn
from beside import rings

def make_model():
    return nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))

def make_data():
    return rings(200), rings(100)

def with_test():
    return (*make_data(), rings(100))

def batches():
    x, y = rings(200)
    return [list(zip(x.split(50), y.split(50)))] * 2

def fails():
    return 1 / 0

def fails_beside():
    return rings("many")

def nothing():
    pass

def needs(size):
    return size

def leaves():
    raise SystemExit(3)

class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.passes = nn.Linear(2, 6), nn.Linear(6, 3), 0

    def forward(self, x):
        self.passes += 1
        if self.passes > 5:  # in training: what a probe counts is forgotten
            raise KeyError("what")
        return self.last(self.first(x))

def asks_esper():
    import esper
    return esper.attach(make_model(), ["9"], torch.randn(2, 2))

number = 3
"""
BESIDE = """
import torch

def rings(count):
    x = torch.randn(count, 2)
    return x, (x.norm(dim=1) * 1.5).long().clamp(max=2)
"""
LINES = FILE.splitlines()
QUICK = ("--controller", "schedule", "--epochs", "10")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my.py").write_text(FILE)
    (tmp_path / "beside.py").write_text(BESIDE)
    monkeypatch.chdir(tmp_path)
    paths, modules = list(sys.path), set(sys.modules)
    monkeypatch.setattr(user_code, "_LOADED", {})
    monkeypatch.setattr(user_code, "_FOLDERS", [])
    yield
    sys.path[:] = paths
    for name in set(sys.modules) - modules:
        if name in ("my", "beside", "odd"):
            del sys.modules[name]


def grow(*words: str, model: str = "my.py:make_model", data: str = "my.py:make_data") -> int:
    return main(["grow", "--model", model, "--data", data, *QUICK, *words])


def test_a_model_of_ones_own_is_grown_and_kept(capsys: Capture) -> None:
    assert grow("--no-control") == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "epoch 10/10: loss" in said.out
    assert "Sequential of my.py:make_model" in said.out
    assert "note: slots='auto' chose 0, 2" in said.out
    out = Path("grown/my-schedule-0")
    assert {path.name for path in out.iterdir()} >= {
        "model.safetensors",
        "architecture.json",
        "history.json",
        "growth.png",
    }
    host = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    assert esper.load(out, host=host)(torch.randn(2, 2)).shape == (2, 3)


def test_it_is_the_same_run_as_in_python(capsys: Capture) -> None:
    assert grow("--json", "--slots", "1, 3", "--seed", "4", data="my.py:with_test") == 0
    facts = json.loads(capsys.readouterr().out)
    sys.path.insert(0, ".")
    import my  # type: ignore[import-not-found]

    torch.manual_seed(4)
    model = my.make_model()
    train, val, test = my.with_test()
    grown = esper.grow(
        model, train, val, test_data=test, slots=["1", "3"], controller="schedule", epochs=10, seed=4, control=True
    )
    assert grown.test is not None
    assert grown.control is not None
    assert facts["test_accuracy"] == grown.test.accuracy
    assert facts["test_accuracy_not_grown"] == grown.control.accuracy
    assert facts["parameters"] == grown.parameters
    assert facts["flops_per_example"] == grown.flops
    assert facts["task"] == "my.py:make_model"
    assert [seed["slot"] for seed in facts["seeds"]] == [story.slot for story in grown.history.seeds()]


def test_loaders_patience_and_the_best_epoch(capsys: Capture) -> None:
    assert grow("--json", "--epochs", "60", "--patience", "2", "--keep-best", data="my.py:batches") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["epochs"] < 60
    assert facts["kept_epochs"] <= facts["epochs"]
    assert facts["val_accuracy_not_grown"] is not None
    assert facts["test_accuracy"] is None
    assert "patience" in " ".join(facts["remarks"])


def test_a_checkpoint_goes_on(capsys: Capture) -> None:
    assert grow("--json", "--checkpoint", "state") == 0
    first = json.loads(capsys.readouterr().out)
    assert grow("--json", "--checkpoint", "state") == 0  # nothing is left to do, and the end is the same
    again = json.loads(capsys.readouterr().out)
    assert {**again, "out": first["out"]} == first


def test_what_is_known_before_the_training_is_a_note(capsys: Capture) -> None:
    assert grow("--epochs", "2", "--no-control") == 0
    said = capsys.readouterr()
    remark = "note: The run is too short for a seed: it has 2 epochs"
    assert 0 <= said.out.index(remark) < said.out.index("epoch 2/2")
    assert said.err == ""


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(LINES, 1) if text in line)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"model": "my.py"}, "--model must be FILE.py:FUNCTION, such as my.py:make_model, not 'my.py'"),
        ({"data": "my.make_data"}, "--data must be FILE.py:FUNCTION, such as my.py:make_data, not 'my.make_data'"),
        ({"model": "no.py:make_model"}, "--model cannot be read: there is no file no.py"),
        ({"model": "folder.py:x"}, "--model cannot be read: folder.py is a folder"),
        ({"model": "fifo.py:x"}, "--model cannot be read: fifo.py is a FIFO"),
        ({"model": "my.py:make_modle"}, "--model: my.py has no function 'make_modle': did you mean 'make_model'?"),
        ({"model": "my.py:number"}, "--model: 'number' of my.py is no function: define it, without arguments"),
        (
            {"model": "my.py:needs"},
            "--model: 'needs' of my.py must work without arguments: missing a ",
        ),
        ({"model": "my.py:nothing"}, "--model my.py:nothing must return a torch.nn.Module, and returned None"),
        (
            {"model": "my.py:make_data"},
            "must return a torch.nn.Module, and returned a tuple of 2",
        ),
        (
            {"model": "my.py:fails"},
            f"--model my.py:fails failed at my.py:{line_of('1 / 0')}: ZeroDivisionError: division",
        ),
        ({"model": "my.py:leaves"}, f"--model my.py:leaves failed at my.py:{line_of('SystemExit')}: SystemExit: 3"),
        ({"model": "my.py:Breaks"}, f"--model my.py:Breaks failed at my.py:{line_of('KeyError')}: KeyError: 'what'"),
        ({"data": "my.py:fails_beside"}, "--data my.py:fails_beside failed at beside.py:5: TypeError: "),
        (
            {"data": "my.py:nothing"},
            "--data my.py:nothing must return (train, validation) or (train, validation, test), each in a form that "
            "esper.grow takes, and returned None",
        ),
        ({"data": "my.py:make_model"}, "and returned a Sequential"),
        ({"model": "my.py:asks_esper"}, "esper grow: slot '9' matches no module of Sequential; it has"),
        ({"model": "odd.py:x"}, "--model odd.py failed at odd.py:2: SyntaxError: "),
    ],
)
def test_what_is_wrong_with_the_file_is_one_line(words: dict[str, str], expected: str, capsys: Capture) -> None:
    Path("odd.py").write_text("x = 1\ndef :\n")
    Path("folder.py").mkdir()
    os.mkfifo("fifo.py")
    assert grow(**words) == 1
    said = capsys.readouterr()
    assert said.err.startswith("esper grow: ")
    assert expected in said.err
    assert said.err.count("\n") == 1
    assert not Path("grown").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--model", "my.py:make_model"], "--model and --data belong together: add --data FILE.py:FUNCTION"),
        (["--data", "my.py:make_data"], "--model and --data belong together: add --model FILE.py:FUNCTION"),
        (["--slots", "1"], "--slots is for --model: a task has its own"),
        (["--batch-size", "8"], "--batch-size is for --model: a task has its own"),
        (["--patience", "0"], "--patience must be at least 1, not 0"),
    ],
)
def test_options_that_do_not_go_together(words: list[str], expected: str, capsys: Capture) -> None:
    assert main(["grow", *words]) == 1
    assert capsys.readouterr().err == f"esper grow: {expected}\n"


@pytest.mark.parametrize("words", [["--task", "digits"], ["--draw", "1"], ["--data-dir", "."]])
def test_a_task_and_an_own_model_exclude_each_other(words: list[str], capsys: Capture) -> None:
    assert grow(*words) == 1
    assert f"are a problem of their own: leave {words[0]} out" in capsys.readouterr().err


def test_a_file_of_settings_runs_no_code(capsys: Capture) -> None:
    Path("odd.py").write_text("open('ran', 'w')\n")
    Path("my.toml").write_text('model = "odd.py:x"\n')
    assert main(["grow", "--config", "my.toml", "--data", "odd.py:x"]) == 1
    assert "my.toml: model names code that is run: give it as --model" in capsys.readouterr().err
    assert not Path("ran").exists()


def test_slots_that_are_none_are_named(capsys: Capture) -> None:
    assert grow("--slots", "1,9") == 1
    assert "slot '9' matches no module of Sequential" in capsys.readouterr().err
    assert not Path("grown").exists()


def test_a_file_named_as_a_module_that_is_loaded_does_not_replace_it() -> None:
    Path("json.py").write_text(textwrap.dedent(FILE))
    before = sys.modules["json"]
    assert grow("--no-control", model="json.py:make_model") == 0
    assert sys.modules["json"] is before


def test_help_names_the_options(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["grow", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    for option in ("--model", "--data", "--slots", "--patience", "--keep-best", "--checkpoint"):
        assert option in said
    assert "FILE.py:FUNCTION" in said

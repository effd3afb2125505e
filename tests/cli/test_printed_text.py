"""Names, paths and messages are printed as they are: what rich would take for a style or an emoji is neither."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import esper.cli
from esper.cli import main
from esper.tasks.family import TaskFamily

Capture = pytest.CaptureFixture[str]
NAME = "a[bold]b[/x]:smile:c"  # a closing tag that nothing opened is an error to rich
DIGITS = ["--task", "digits", "--workers", "1"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder, and episodes of one epoch, played in this process: `esper clone` has no --workers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(TaskFamily.__init__, "__kwdefaults__", {**TaskFamily.__init__.__kwdefaults__, "horizon": 1})
    monkeypatch.setattr("esper.cli.options.pick_workers", lambda wanted, device: 1)


def said_by(capsys: Capture, *words: str) -> str:
    capsys.readouterr()
    assert main(words) == 0
    return capsys.readouterr().out


def test_paths_and_names_are_printed_as_they_are(capsys: Capture) -> None:
    recording, policy, run = (f"{kind}{NAME}".replace("/", "-") for kind in ("recording", "policy", "run"))
    made = said_by(capsys, "record", *DIGITS, "--episodes", "7", "--out", recording, "--controllers", f"{NAME}=none")
    assert f"{NAME}: 7 episodes" in made
    assert f"Next: esper clone {recording}" in made
    words = ("--epochs", "1", "--compare-episodes", "1", "--out", f"{policy}.safetensors")
    learned = said_by(capsys, "clone", recording, *words)
    assert f"Written: {policy}.safetensors" in learned
    assert f"Grow with it: esper grow --controller {policy}.safetensors" in learned
    trained = said_by(
        capsys,
        *("train", *DIGITS, "--envs", "1", "--updates", "1", "--compare-episodes", "0", "--evaluate-every", "0"),
        *("--run", run),
    )
    assert "1 episodes, in 0:0" in trained
    assert run in trained
    grown = said_by(capsys, "grow", "--task", "digits", "--epochs", "1", "--controller", "none", "--out", run + "g")
    assert f"Saved in {run}g" in grown


def test_a_comparison_with_hostile_names(capsys: Capture) -> None:
    words = ("compare", *DIGITS, "--episodes", "1", "--no-controls", "--controllers", f"none,{NAME}=heuristic")
    said = said_by(capsys, *words, "--out", NAME)
    assert NAME in said.replace("\n", "")
    assert f"Written: {NAME}/comparison.json" in said


def test_what_to_install_is_named_in_full(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """rich took [plot] for a style, and `pip install 'esper'` was left."""
    for module in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # an import of None is an ImportError
    words = ("compare", *DIGITS, "--episodes", "1", "--no-controls", "--controllers", "none")
    assert "pip install 'esper[plot]'" in said_by(capsys, *words)


def test_every_console_prints_text_as_it_is() -> None:
    """They are made in one place."""
    makers = [path.name for path in Path(esper.cli.__file__).parent.glob("*.py") if "Console(" in path.read_text()]
    assert makers == ["terminal.py"]
    source = (Path(esper.cli.__file__).parent / "terminal.py").read_text()
    assert source.count(" Console(") == source.count("markup=False, emoji=False") == 2

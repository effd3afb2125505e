"""A command that cannot be done is refused before its first step, with one line, and leaves nothing behind.

Covers: R141
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from refusing import NEEDED, contents, copy_material, make_material, replace_work, within

from esper.cli import COMMANDS, main
from esper.cli.options import RANGES
from esper.tasks import load_task
from esper.telemetry.store import STORE_NAME
from esper.training.catalogue import make_controller

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("material")
    make_material(folder)
    return folder


@pytest.fixture(autouse=True)
def at_once() -> Iterator[None]:
    with within(60):
        yield


@pytest.fixture
def place(material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copy_material(material, tmp_path)
    monkeypatch.chdir(tmp_path)
    replace_work(monkeypatch, lambda: pytest.fail("work was begun"))
    return tmp_path


def refused(place: Path, words: list[str], capsys: Capture) -> str:
    """The one line with which the command was refused."""
    before = contents(place)
    capsys.readouterr()
    try:
        code = main(words)
    except SystemExit as stopped:  # argument parsing
        code = int(stopped.code or 0)
    said = capsys.readouterr()
    assert code in (1, 2), (words, said.out)
    assert said.err.count("\n") == 1, said.err
    assert said.out == ""
    assert contents(place) == before, words
    return said.err


def number_options() -> Iterator[tuple[str, str, type]]:
    for command in COMMANDS:
        kind = importlib.import_module(f"esper.cli.{command.replace('-', '_')}").COMMAND
        hints = get_type_hints(kind)
        for field in dataclasses.fields(kind):
            found = {hints[field.name], *get_args(hints[field.name])} & {int, float}
            if found:
                yield command, field.name, found.pop()


def test_every_number_has_a_range() -> None:
    assert {name for _, name, _ in number_options()} <= set(RANGES)


NUMBERS = list(number_options())
HUGE = [str(2**63), "-" + str(2**63), "1" + "0" * 400, "9" * 5000]
HOSTILE_NUMBERS = ["-1", *HUGE, "nan", "inf", "-inf", "1e400", "x", ""]


@pytest.mark.parametrize(("command", "name", "kind"), NUMBERS, ids=lambda part: getattr(part, "__name__", part))
def test_a_number_out_of_range(command: str, name: str, kind: type, place: Path, capsys: Capture) -> None:
    option = f"--{name.replace('_', '-')}"
    for value in HOSTILE_NUMBERS:
        said = refused(place, [command, *NEEDED.get(command, []), option, value], capsys)
        assert option in said, said
        config = place / "c.toml"
        text = value if value not in ("x", "", "1e400") else f'"{value}"'
        config.write_text(f"{name} = {text}\n")
        said = refused(place, [command, *NEEDED.get(command, []), "--config", "c.toml"], capsys)
        assert name in said.replace("-", "_") or "not valid TOML" in said, said


TABLE: list[tuple[list[str], str]] = [
    # names
    (["grow", "--task", "nonsense"], "unknown task"),
    (["grow", "--controller", "nonsense"], "unknown controller"),
    (["grow", "--device", "nonsense"], "cannot be used here"),
    (["grow", "--task", "digits", "--param-budget", "10"], "smaller than the host"),
    (["grow", "--task", "digits", "--param-budget", "10", "--out", "new/er"], "smaller than the host"),
    (["train", "--task", "nonsense"], "unknown task family"),
    (["train", "--task", "digits", "--init", "nonsense"], "there is no checkpoint nonsense"),
    (["train", "--task", "digits", "--device", "nonsense"], "cannot be used here"),
    (["train", "--task", "digits", "--profile", "/proc/esper", "--run", "r"], "cannot write"),
    (["train", "--task", "digits", "--profile", "a-file", "--run", "r"], "a-file"),
    (["train", "--task", "digits", "--run", "a-file"], "choose another folder with --run"),
    (["train", "--task", "digits", "--run", "/proc/esper"], "choose another folder with --run"),
    (["train", "--preset", "nonsense"], "--preset"),
    (["train", "--reward", "nonsense"], "--reward"),
    (["compare", "--task", "nonsense", "--out", "c"], "unknown task family"),
    (["compare", "--controllers", "nonsense", "--out", "c"], "unknown controller"),
    (["compare", "--controllers", ",", "--out", "c"], "no controller is named"),
    (["compare", "--device", "nonsense", "--out", "c"], "cannot be used here"),
    (["compare", "--task", "digits", "--json", "no/such/\0", "--out", "c"], "NUL"),
    (["record", "--task", "nonsense", "--out", "c"], "unknown task family"),
    (["record", "--controllers", "nonsense", "--out", "c"], "unknown controller"),
    (["record", "--out", "a-file"], "a-file"),
    (["clone", "recording", "--task", "nonsense"], "unknown task family"),
    (["clone", "recording", "--task", "nonsense", "--out", "new/er/x.safetensors"], "unknown task family"),
    (["clone", "recording", "--teacher", "nonsense", "--out", "new/x.safetensors"], "nonsense"),
    (["clone", "recording", "--out", "a-file/x.safetensors"], "choose another file with --out"),
    (["clone", "nothing"], "there is no recording"),
    (["offline"], "missing: PATH A folder that esper record wrote; `esper offline --help`"),
    (["offline", "recording", "--task", "nonsense"], "unknown task family"),
    (["offline", "recording", "--temperature", "0"], "--temperature must be a number above 0"),
    (["offline", "recording", "--expectile", "1"], "--expectile must be"),
    (["tune-heuristic", "--task", "nonsense", "--out", "new/x.toml"], "unknown task family"),
    (["tune-heuristic", "--task", "digits", "--budget-steps", "5", "--out", "new/x.toml"], "too small"),
    (["tune-heuristic", "--device", "nonsense", "--out", "new/x.toml"], "cannot be used here"),
    (["bench", "--envs", "1,,2"], "--envs takes numbers"),
    (["bench", "--envs", "1,99999999999"], "--envs"),
    (["bench", "--device", "nonsense"], "cannot be used here"),
    (["checkpoint", "inspect", "nothing"], "nothing"),
    (["checkpoint", "nonsense", "nothing"], "nonsense"),
    (["query", "nothing"], "neither a run's folder nor a run store"),
    (["query", "run", ""], "gives no rows"),
    (["query", "run", "SELECT nonsense"], "nonsense"),
    (["info", "--nonsense"], "--nonsense"),
    (["info", "nonsense"], "nonsense"),
    (["clone"], "A folder that esper record wrote"),
    # what is no file, or no folder
    (["grow", "--task", "text", "--text-file", "fifo"], "a FIFO"),
    (["grow", "--task", "text", "--text-file", "/dev/zero"], "a device"),
    (["grow", "--task", "text", "--text-file", "run"], "is a directory"),
    (["grow", "--task", "cifar10", "--data-dir", "a-file"], "is not a directory"),
    (["grow", "--controller", "fifo.toml"], "a FIFO"),
    (["grow", "--controller", "fifo.safetensors"], "a FIFO"),
    (["grow", "--config", "fifo.toml"], "a FIFO"),
    (["grow", "--config", "/dev/zero"], "a device"),
    (["grow", "--config", "run"], "is a directory"),
    (["grow", "--out", "a-file"], "a-file"),
    (["compare", "--controllers", "none,mine=fifo.toml"], "a FIFO"),
    (["record", "--controllers", "fifo.safetensors"], "a FIFO"),
    (["train", "--task", "digits", "--init", "fifo.safetensors"], "a FIFO"),
    (["train", "--task", "digits", "--init", "fifo"], "a FIFO"),
    (["train", "--resume", "fifo"], "a FIFO"),
    (["train", "--resume", "a-file"], "is not a directory"),
    (["train", "--resume", "nothing"], "holds no training run"),
    (["clone", "fifo"], "a FIFO"),
    (["clone", "a-file"], "PATH must be a folder, and a-file is not a directory"),
    (["checkpoint", "inspect", "fifo"], "a FIFO"),
    (["checkpoint", "inspect", "/dev/zero"], "a device"),
    (["checkpoint", "inspect", "run"], "PATH must be a file, and run is a directory"),
    (["query", "fifo"], "a FIFO"),
    (["query", "/dev/zero"], "a device"),
    (["compare", "--task", "digits", "--json", "fifo"], "nobody reads"),
    (["compare", "--task", "digits", "--out", "fifo"], "a FIFO"),
    (["clone", "recording", "--out", "fifo.safetensors"], "a FIFO"),
    (["tune-heuristic", "--task", "digits", "--out", "fifo.toml"], "a FIFO"),
    (["train", "--task", "digits", "--run", "/dev/null"], "a device"),
    # words that are no text
    (["grow", "--task", "a\nb\x1b[31mc"], "unknown task"),
    (["grow", "--out", "a\udcffb"], "UTF-8"),
    (["grow", "--task", "[/nope]"], "[/nope]"),
]


@pytest.mark.parametrize(("words", "message"), TABLE, ids=[ascii(" ".join(words)) for words, _ in TABLE])
def test_a_refused_command_leaves_nothing(words: list[str], message: str, place: Path, capsys: Capture) -> None:
    said = refused(place, words, capsys)
    assert message in said, said
    assert "\x1b" not in said


@pytest.mark.parametrize("name", ["config.json", STORE_NAME, "checkpoints/update-000001.safetensors"])
def test_a_fifo_inside_a_run_does_not_block(name: str, place: Path, capsys: Capture) -> None:
    file = place / "run" / name
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    for words in (["train", "--resume", "run"], ["grow", "--controller", "run"], ["query", "run"]):
        assert "a FIFO" in refused(place, words, capsys)


def test_a_fifo_inside_a_recording_does_not_block(place: Path, capsys: Capture) -> None:
    os.mkfifo(place / "recording" / "episodes-000009-00000000.safetensors")
    for words in (["clone", "recording"], ["record", "--task", "digits", "--out", "recording"]):
        assert "a FIFO" in refused(place, words, capsys)


def test_a_program_of_ones_own_does_not_block_either(place: Path) -> None:
    with pytest.raises(ValueError, match="a FIFO"):
        make_controller("fifo.toml")
    with pytest.raises(ValueError, match="a FIFO"):
        load_task("text", text_file="fifo")

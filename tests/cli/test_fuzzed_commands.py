"""Random command lines with hostile values: refused in one line with nothing left, or the work begins.

Never a traceback, never a wait, never success with nothing done. ESPER_FUZZ multiplies the number of command lines.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from refusing import contents, copy_material, make_material, replace_work, within

from esper.cli import COMMANDS, main

CASES = 300 * int(os.environ.get("ESPER_FUZZ", "1"))
NUMBERS = ["0", "1", "-1", "2", "1.5", "1e-300", "1e308", "0x10", "1_0"]
NO_NUMBERS = ["nan", "inf", "-inf", "1" + "0" * 30, "9" * 4400]
NAMES = ["none", "digits", "mixed/vector", "mixed+digits", "natural", "heuristic", "cpu", "auto"]
NO_NAMES = ["", " ", "x", "-", "--", "a\nb", "\x1b[2J", "a\udcffb", "é" * 300, "[/x]", "a,b", "%s", "{0}", "@a"]
SIGNS = ["=", "x=", "=x", ",", "+", "/", "*"]
PATHS = ["run", "recording", "a-file", "nothing", "..", ".", "~", "new/er/x", "x.toml", "x.safetensors"]
NO_PATHS = ["fifo", "fifo.toml", "fifo.safetensors", "/dev/zero", "/dev/null", "/proc/x", "a-file/x"]
INSIDE = ["run/config.json", "run/run.sqlite"]
WRITING = ["DROP TABLE metrics", "ATTACH 'x' AS y", "VACUUM INTO 'x'", "PRAGMA user_version = 9"]
SQL = ["SELECT 1", *WRITING, "SELECT", ";", "--"]
VALUES = [*NUMBERS, *NO_NUMBERS, *NAMES, *NO_NAMES, *SIGNS, *PATHS, *NO_PATHS, *INSIDE, *SQL]
SOUND: dict[str, list[str]] = {
    "task": ["digits"],
    "device": ["cpu"],
    "recording": ["recording"],
    "folder": ["run"],
    "path": ["sweep.toml"],
    "runs": ["run"],
    "port": ["8499"],
    "host": ["127.0.0.1"],
}
"""Values that let a command come further."""
IDLE = ("doctor", "completion")
"""Commands that read nothing and write nothing."""


class Begun(BaseException):
    """Everything was checked, and the work would begin."""


def begin() -> None:
    raise Begun


def options_of(command: str) -> list[tuple[str, Any]]:
    kind: Any = importlib.import_module(f"esper.cli.{command.replace('-', '_')}").COMMAND
    return [(field.name, field.default) for field in dataclasses.fields(kind) if field.name not in ("ppo", "reward")]


def command_line(rng: random.Random) -> list[str]:
    command = rng.choice([name for name in COMMANDS if name not in IDLE and (name != "info" or rng.random() < 0.2)])
    words, options = [command], options_of(command)
    for name, default in options:
        required = default is dataclasses.MISSING
        if required and rng.random() < 0.9 and command != "checkpoint":
            words.append(rng.choice(SOUND[name]) if rng.random() < 0.7 else rng.choice(VALUES))
        elif command == "checkpoint" and required:
            words.append(rng.choice(["inspect", "upgrade"]) if name == "action" else rng.choice(VALUES))
        elif command == "query" and name == "sql":
            words += [rng.choice(SQL)] if rng.random() < 0.8 else []
        elif name in SOUND and rng.random() < 0.7:
            words += [f"--{name}", rng.choice(SOUND[name])]
    for name, default in rng.sample(options, min(len(options), rng.randint(0, 3))):
        spelled = {"run_dir": "run"}.get(name, name).replace("_", "-")
        if isinstance(default, bool):
            words.append(rng.choice([f"--{spelled}", f"--no-{spelled}"]))
        else:
            words += [f"--{spelled}", rng.choice(VALUES)]
    if rng.random() < 0.1:
        words += rng.choice([["--config", rng.choice(VALUES)], ["--nonsense"], [rng.choice(VALUES)], ["--config"]])
    return words


def test_a_random_command_line_is_refused_or_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    material, place = tmp_path / "material", tmp_path / "place"
    material.mkdir()
    place.mkdir()
    make_material(material)
    monkeypatch.delenv("ESPER_DATA_DIR", raising=False)
    replace_work(monkeypatch, begin)
    monkeypatch.chdir(place)
    copy_material(material, place)
    rng, before = random.Random(22), contents(place)
    seen = {"refused": 0, "begun": 0, "done": 0}
    for _ in range(CASES):
        words = command_line(rng)
        outcome = outcome_of(words, capsys)
        seen[outcome] += 1
        if outcome == "refused":
            assert contents(place) == before, words
        elif contents(place) != before:  # work that began may keep what it had made
            for path in place.iterdir():
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            copy_material(material, place)
    assert min(seen.values()) > CASES // 100, seen


def outcome_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    try:
        with within(30):
            code = main(words)
    except Begun:
        return "begun"
    except Exception as error:
        raise AssertionError(f"a traceback from {words!a}") from error
    said = capsys.readouterr()
    if code == 0:
        assert said.out.strip(), f"nothing done: {words!a}"
        return "done"
    assert code in (1, 2), words
    assert said.err.count("\n") == 1, words
    assert "Traceback" not in said.err
    assert "\x1b" not in said.err
    return "refused"

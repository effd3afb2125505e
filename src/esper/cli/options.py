"""What options may be, checked in one place before a command begins: numbers in range, text that is text, inputs that
are files or folders. What only a command can find out, it finds out itself."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

from esper.config import ABOVE_0, COUNTS, SHARE, WITHIN_0_AND_1, Count, Range, check_count, check_number, special_kind

MOST_WEIGHT = 1e6
"""Of a term in a loss: far above any use, and its products are finite."""
WEIGHT = Range(f"a number from 0 to {MOST_WEIGHT:,.0f}", lambda x: 0 <= x <= MOST_WEIGHT)
POSITIVE = Range(f"{ABOVE_0.words} and at most {MOST_WEIGHT:,.0f}", lambda x: 0 < x <= MOST_WEIGHT)

RANGES: dict[str, Count | Range] = {
    **COUNTS,
    "budget_steps": Count(1, 100_000_000),
    "draw": Count(0, 10**15),
    "epochs": Count(1, 1_000_000),
    "episodes": Count(1, 1_000_000),
    "max_seeds": Count(0, 1_000_000),
    "param_budget": Count(1, 10**15),
    "workers": Count(1, 1_024),
    "balance": SHARE,
    "conservative": WEIGHT,
    "expectile": WITHIN_0_AND_1,
    "floor": SHARE,
    "noise": SHARE,
    "rent": WEIGHT,
    "teacher_kl": WEIGHT,
    "temperature": POSITIVE,
}
"""By option, whatever the command. A test fails for a number that has no range."""

FILES = ("text_file", "path")
OUTPUTS = ("out", "run_dir", "profile", "json")
"""Where results go."""
FOLDERS = ("data_dir", "resume", "recording")
EITHER = ("folder", "controller", "init")
READ_IN_FOLDERS = ("config.json", "run.sqlite", "checkpoints/*.safetensors", "episodes-*.safetensors")
"""Of a run or a recording."""


def check_options(name: str, command: object) -> None:
    """Refuse, in one line, what the command `name` could not work with."""
    given = {option: value for option, value in _options(command) if value is not None}
    for option, value in given.items():
        spelled = option_name(option)
        if isinstance(value, str | Path):
            _check_text(spelled, str(value))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            wanted = RANGES[option]
            check_count(spelled, value, wanted) if isinstance(wanted, Count) else check_number(spelled, value, wanted)
    for option, path in _inputs(name, given):
        _check_input(option, path)
    for option in OUTPUTS:
        if isinstance(value := given.get(option), str | Path):
            _check_output(option, Path(value))


def option_name(field: str) -> str:
    """A field as an option: its name, but for the one that has another on the shell."""
    return {"run_dir": "--run", "ppo": "[ppo]"}.get(field, f"--{field.replace('_', '-')}")


def _options(command: object) -> Iterator[tuple[str, object]]:
    assert dataclasses.is_dataclass(command)
    for field in dataclasses.fields(command):
        yield field.name, getattr(command, field.name)


def _check_text(option: str, text: str) -> None:
    if "\0" in text:
        raise ValueError(f"{option} has a NUL character, which no name has")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{option} is not UTF-8 text: {text!a}") from error


# -- inputs and outputs -----------------------------------------------------------------------------------------------


def _inputs(name: str, given: dict[str, object]) -> Iterator[tuple[str, Path]]:
    """Option → path that the command reads, if it is there."""
    for option in (*FILES, *FOLDERS, *EITHER):
        if option in given:
            yield option, Path(str(given[option]))
    for word in str(given.get("controllers", "")).split(","):
        yield "controllers", Path(word.strip())
        yield "controllers", Path(word.partition("=")[2].strip() or "none")
    if name == "record" and "out" in given:  # a recording that is there is read before it is added to
        yield "out", Path(str(given["out"]))


def _check_input(option: str, path: Path) -> None:
    kind = special_kind(path)
    if kind is not None:
        raise ValueError(f"{option_name(option)} cannot be read: {path} is {kind}")
    if option in FILES and path.is_dir():
        raise ValueError(f"{option_name(option)} must be a file, and {path} is a directory")
    if option in FOLDERS and path.is_file():
        raise ValueError(f"{option_name(option)} must be a folder, and {path} is not a directory")
    if option not in ("data_dir", *FILES) and path.is_dir():
        for file in (found for pattern in READ_IN_FOLDERS for found in path.glob(pattern)):
            if (kind := special_kind(file)) is not None:
                raise ValueError(f"{option_name(option)} cannot be read: {file} is {kind}")


def _check_output(option: str, path: Path) -> None:
    """Only JSON is written into what is there already: a pipe, or the terminal."""
    kind = special_kind(path)
    if kind is None or (option == "json" and kind == "a device"):
        return
    if option != "json":
        raise ValueError(f"{option_name(option)} cannot be written: {path} is {kind}")
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))  # without O_NONBLOCK it would wait for a reader
    except OSError as error:
        raise ValueError(f"{option_name(option)} cannot be written: {path} is {kind} that nobody reads") from error

"""Settings from a TOML or JSON file, checked strictly: an unknown key is an error that names the nearest known one.

Also the ranges that settings are checked against: they come from files, from the shell and from code alike.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import stat
import tomllib
import types
from collections.abc import Callable, Mapping
from enum import Enum
from math import isfinite
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

_Settings = TypeVar("_Settings")

LARGEST_FILE = 2**20
"""Bytes of a configuration; a real one has a few hundred."""
LARGEST_NUMBER = 2**63
"""Numbers beyond it fit neither a tensor nor SQLite, and far beyond it no float."""


class ConfigError(ValueError):
    """A configuration file that cannot be used, with the reason."""


class Range(NamedTuple):
    """What a number may be. NaN and infinity are in no range."""

    words: str
    holds: Callable[[float], bool]
    whole: bool = False


AT_LEAST_0 = Range("a number of at least 0", lambda x: x >= 0)
ABOVE_0 = Range("a number above 0", lambda x: x > 0)
SHARE = Range("a number from 0 to 1", lambda x: 0 <= x <= 1)
WITHIN_0_AND_1 = Range("a number between 0 and 1", lambda x: 0 < x < 1)
WHOLE_AT_LEAST_0 = Range("a whole number of at least 0", lambda x: x >= 0, whole=True)
WHOLE_AT_LEAST_1 = Range("a whole number of at least 1", lambda x: x >= 1, whole=True)


def check_number(name: str, value: object, wanted: Range, *, optional: bool = False) -> None:
    """Refuse a value outside its range with one line that names the setting; `optional` allows None."""
    if value is None and optional:
        return
    if isinstance(value, int | float) and not isinstance(value, bool):
        usable = abs(value) < LARGEST_NUMBER if isinstance(value, int) else isfinite(value) and not wanted.whole
        if usable and wanted.holds(value):
            return
    limit = " and below 2^63" if isinstance(value, int) and abs(value) >= LARGEST_NUMBER else ""
    raise ValueError(f"{name} must be {wanted.words}{limit}{' or None' if optional else ''}, not {shown(value)}")


class Count(NamedTuple):
    """What a whole number may be. The most is far above any use, and far below what would break something."""

    least: int
    most: int


COUNTS = {
    "envs": Count(1, 10_000),
    "updates": Count(1, 999_999),  # six digits in a checkpoint's name, so that names sort as numbers do
    "seed": Count(0, 2**32 - 1),  # times the million draws of a seed it still fits 64 bits
    "draws": Count(1, 1_000_000),  # those of one seed
    "evaluate_every": Count(0, 999_999),
    "evaluation_episodes": Count(1, 10_000),
    "compare_episodes": Count(0, 10_000),  # the draws of one seed in a comparison
    "keep": Count(1, 999_999),
}
"""Of a training run, whether they come from the shell or from its configuration."""


def check_count(name: str, value: object, wanted: Count) -> None:
    """Refuse what is no whole number of that range, in one line."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be a whole number, not {shown(value)}")
    if value < wanted.least:
        raise ValueError(f"{name} must be at least {wanted.least}, not {shown(value)}")
    if value > wanted.most:
        raise ValueError(f"{name} must be at most {wanted.most:,}, not {shown(value)}")


def shown(value: object) -> str:
    """A value in a message: what a hostile file says must not fill a screen."""
    if isinstance(value, int) and abs(value) >= 10**40:  # Python refuses to write very long ones at all
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# -- files ------------------------------------------------------------------------------------------------------------


def special_kind(path: Path) -> str | None:
    """What a path is that can be read neither as a file nor as a folder: reading it may block, or never end."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):  # it is not there, or its name is none: its reader says so
        return None
    kinds = {stat.S_ISFIFO: "a FIFO", stat.S_ISSOCK: "a socket", stat.S_ISCHR: "a device", stat.S_ISBLK: "a device"}
    return next((name for is_so, name in kinds.items() if is_so(mode)), None)


def read_small(path: Path) -> str:
    """The text of a regular file of at most `LARGEST_FILE` bytes."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO would block without a writer
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"it is {special_kind(path) or 'a directory'}, not a file")
        with open(handle, "rb", closefd=False) as file:
            content = file.read(LARGEST_FILE + 1)
    finally:
        os.close(handle)
    if len(content) > LARGEST_FILE:
        raise OSError(f"it has more than {LARGEST_FILE:,} bytes")
    return content.decode("utf-8")


def read_config(path: Path, kind: type[_Settings]) -> _Settings:
    """An instance of the dataclass `kind` with the file's values in place of its defaults."""
    return kind(**read_settings(path, kind))


def read_settings(path: Path, kind: type) -> dict[str, Any]:
    """The file's values, by the names of the fields of the dataclass `kind`."""
    values = _read(path)
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a table of settings, not a {type(values).__name__}")
    return checked(values, kind, str(path))


def checked(values: Mapping[str, Any], kind: type, where: str) -> dict[str, Any]:
    """The settings in `values`, by the names of the fields of the dataclass `kind`, each of its field's type."""
    hints = get_type_hints(kind)
    known = _spellings(kind)
    settings: dict[str, Any] = {}
    for key, value in values.items():
        name = known.get(key.replace("-", "_"))
        if name is None:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the settings are {', '.join(known)}"
            raise ConfigError(f"{where}: unknown setting {shown(key)}; {hint}")
        settings[name] = _typed(value, hints[name], f"{where}: {key}")
    return settings


def _spellings(kind: type) -> dict[str, str]:
    """Setting → field. An option that the shell knows under another name (`tyro.conf.arg`) has that name here, too."""
    marks = get_type_hints(kind, include_extras=True)
    found = {}
    for field in dataclasses.fields(kind):
        if field.init:
            given = [getattr(mark, "name", None) for mark in getattr(marks[field.name], "__metadata__", ())]
            found[next((name for name in given if isinstance(name, str)), field.name)] = field.name
    return found


def _read(path: Path) -> Any:
    try:
        text = read_small(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from error
    try:
        return json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid {'JSON' if path.suffix == '.json' else 'TOML'}: {error}") from error


def _typed(value: Any, hint: Any, where: str) -> Any:
    """`value` if it is of the hinted type, with the conversions that files need (paths, whole numbers as floats)."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for option in options:
        if get_origin(option) is Literal and isinstance(value, str) and value in get_args(option):
            return value
        if get_origin(option) is dict and isinstance(value, dict):
            return value
        if get_origin(option) is tuple and isinstance(value, list | tuple) and len(value) == len(get_args(option)):
            return tuple(_typed(one, each, where) for one, each in zip(value, get_args(option), strict=True))
        if isinstance(option, type) and (made := _made(value, option, where)) is not None:
            return made
        if option is type(None) and value is None:
            return None
    wanted = " or ".join(_spelled(option) for option in options if option is not type(None))
    raise ConfigError(f"{where} must be {wanted}, not {shown(value)}")


def _made(value: Any, kind: type, where: str) -> Any:
    """`value` as one of `kind`; None where it cannot be one."""
    if kind is Path:
        return Path(value) if isinstance(value, str) else None
    if issubclass(kind, Enum):
        return next((one for one in kind if one.value == value), None)
    if dataclasses.is_dataclass(kind):
        return kind(**checked(value, kind, where)) if isinstance(value, dict) else None
    if kind in (int, float) and (isinstance(value, bool) or (isinstance(value, int) and abs(value) >= LARGEST_NUMBER)):
        return None
    if kind is float and isinstance(value, int):
        return float(value)
    return value if isinstance(value, kind) else None


def _spelled(option: Any) -> str:
    if get_origin(option) is Literal:
        return "one of " + ", ".join(map(str, get_args(option)))
    if get_origin(option) is tuple:
        return f"a list of {len(get_args(option))}"
    if isinstance(option, type) and issubclass(option, Enum):
        return "one of " + ", ".join(str(one.value) for one in option)
    is_table = get_origin(option) is dict or dataclasses.is_dataclass(option)
    return "a table" if is_table else str(option.__name__)

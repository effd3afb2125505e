"""Settings from a TOML or JSON file, checked strictly: an unknown key is an error that names the nearest known one.

Also the ranges that settings are checked against: those of the agent come from files and from code alike.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
import types
from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

_Settings = TypeVar("_Settings")


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
        usable = isinstance(value, int) or (isfinite(value) and not wanted.whole)
        if usable and wanted.holds(value):
            return
    raise ValueError(f"{name} must be {wanted.words}{' or None' if optional else ''}, not {value!r}")


def read_config(path: Path, kind: type[_Settings]) -> _Settings:
    """An instance of the dataclass `kind` with the file's values in place of its defaults."""
    values = _read(path)
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a table of settings, not a {type(values).__name__}")
    return kind(**checked(values, kind, str(path)))


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
            raise ConfigError(f"{where}: unknown setting {key!r}; {hint}")
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
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from error
    try:
        return json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not valid {'JSON' if path.suffix == '.json' else 'TOML'}: {error}") from error


def _typed(value: Any, hint: Any, where: str) -> Any:
    """`value` if it is of the hinted type, with the conversions that files need (paths, whole numbers as floats)."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for option in options:
        if get_origin(option) is Literal and value in get_args(option):
            return value
        if get_origin(option) is dict and isinstance(value, dict):
            return value
        if get_origin(option) is tuple and isinstance(value, list) and len(value) == len(get_args(option)):
            return tuple(_typed(one, each, where) for one, each in zip(value, get_args(option), strict=True))
        if option is Path and isinstance(value, str):
            return Path(value)
        if option is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if isinstance(option, type) and isinstance(value, option) and not (option is int and isinstance(value, bool)):
            return value
    wanted = " or ".join(_spelled(option) for option in options if option is not type(None))
    raise ConfigError(f"{where} must be {wanted}, not {value!r}")


def _spelled(option: Any) -> str:
    if get_origin(option) is Literal:
        return "one of " + ", ".join(map(str, get_args(option)))
    if get_origin(option) is tuple:
        return f"a list of {len(get_args(option))}"
    return "a table" if get_origin(option) is dict else str(option.__name__)

"""Settings as dataclasses: read from data strictly, and checked against their ranges.

One reader for everything that holds settings: configuration files, run folders, the headers of checkpoints, tuned
heuristics. What is unknown, of the wrong type or out of range is one line that names the setting.
"""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import tomllib
import types
from collections.abc import Callable, Mapping
from enum import Enum
from math import isfinite
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from esper.errors import did_you_mean, refused, shown

_Settings = TypeVar("_Settings")

LARGEST_FILE = 2**20
"""Bytes of a configuration; a real one has a few hundred."""
LARGEST_NUMBER = 2**63
"""Numbers beyond it fit neither a tensor nor SQLite, and far beyond it no float."""
EngineName = Literal["eager", "graphs", "stacked"]
"""What trains growing networks; see `training/engines.py`."""
EngineOption = Literal["auto", "eager", "graphs", "stacked"]
"""As a person gives it."""
FORMER_NAMES = {"gamma": "discount", "family": "signal"}
"""Settings that older files have under another name."""


class ConfigError(ValueError):
    """Settings that cannot be used, with the reason."""


# -- ranges -----------------------------------------------------------------------------------------------------------


class Range(NamedTuple):
    """What a number may be. NaN and infinity are in no range."""

    words: str
    holds: Callable[[float], bool]
    whole: bool = False
    optional: bool = False
    """Whether None turns the setting off."""


AT_LEAST_0 = Range("a number of at least 0", lambda x: x >= 0)
ABOVE_0 = Range("a number above 0", lambda x: x > 0)
SHARE = Range("a number from 0 to 1", lambda x: 0 <= x <= 1)
WITHIN_0_AND_1 = Range("a number between 0 and 1", lambda x: 0 < x < 1)
WHOLE_AT_LEAST_0 = Range("a whole number of at least 0", lambda x: x >= 0, whole=True)
WHOLE_AT_LEAST_1 = Range("a whole number of at least 1", lambda x: x >= 1, whole=True)


def or_none(wanted: Range) -> Range:
    return wanted._replace(optional=True)


class Count(NamedTuple):
    """What a whole number may be. The most is far above any use, and far below what would break something."""

    least: int
    most: int
    optional: bool = False


COUNTS = {
    "envs": Count(1, 10_000),
    "updates": Count(1, 999_999),  # six digits in a checkpoint's name, so that names sort as numbers do
    "seed": Count(0, 2**32 - 1),  # times the million draws of a seed it still fits 64 bits
    "draws": Count(1, 1_000_000, optional=True),  # those of one seed
    "evaluate_every": Count(0, 999_999),
    "evaluation_episodes": Count(1, 10_000),
    "compare_episodes": Count(0, 10_000),  # the draws of one seed in a comparison
    "keep": Count(1, 999_999),
}
"""Of a training run, whether they come from the shell or from its configuration."""


def check_ranges(settings: object, ranges: Mapping[str, Range | Count]) -> None:
    """Refuse settings out of their ranges, in one line that names the setting."""
    for name, wanted in ranges.items():
        check_number(name, getattr(settings, name), wanted)


def check_number(name: str, value: object, wanted: Range | Count) -> None:
    if value is None and wanted.optional:
        return
    problem = _miscounted(value, wanted) if isinstance(wanted, Count) else _out_of_range(value, wanted)
    if problem:
        raise ValueError(f"{name} must be {problem}, not {shown(value)}")


def _miscounted(value: object, wanted: Count) -> str:
    if isinstance(value, bool) or not isinstance(value, Integral):  # numpy's, too
        return "a whole number"
    if int(value) < wanted.least:
        return f"at least {wanted.least}"
    return f"at most {wanted.most:,}" if int(value) > wanted.most else ""


def _out_of_range(value: object, wanted: Range) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        usable = abs(value) < LARGEST_NUMBER if isinstance(value, int) else isfinite(value) and not wanted.whole
        if usable and wanted.holds(value):
            return ""
    return f"{wanted.words}{_limit(value)}{' or None' if wanted.optional else ''}"


def _limit(value: object) -> str:
    return " and below 2^63" if isinstance(value, int) and abs(value) >= LARGEST_NUMBER else ""


# -- data → settings --------------------------------------------------------------------------------------------------


def settings_from(
    data: object, kind: type[_Settings], where: str, *, default: _Settings | None = None, complete: bool = False
) -> _Settings:
    """An instance of the dataclass `kind` with the values of a table of JSON or TOML.

    What the table does not name is as in `default`, or the field's own default; where it must be `complete`, a missing
    setting is refused.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"{where} must hold a table of settings, not a {type(data).__name__}")
    hints, known = get_type_hints(kind), _spellings(kind)
    given: dict[str, Any] = {}
    for key, value in data.items():
        spelled = key.replace("-", "_")
        name = known.get(spelled) or known.get(FORMER_NAMES.get(spelled, ""))
        if name is None:
            hint = did_you_mean(key, known, f"the settings are {', '.join(known)}")
            raise ConfigError(f"{where}: unknown setting {shown(key)}; {hint}")
        given[name] = _typed(value, hints[name], f"{where}: {key}", getattr(default, name, None))
    needed = known.values() if complete else required(kind) if default is None else ()
    if missing := [name for name in needed if name not in given]:
        raise ConfigError(f"{where}: missing {shown(missing)}")
    with refused(ConfigError, where, ValueError):
        return kind(**given) if default is None else cast(_Settings, dataclasses.replace(cast(Any, default), **given))


def required(kind: Any) -> list[str]:
    """Fields of a dataclass that have no default."""
    unset = dataclasses.MISSING
    return [field.name for field in dataclasses.fields(kind) if field.default is field.default_factory is unset]


def _spellings(kind: Any) -> dict[str, str]:
    """Setting → field. An option that the shell has under another name (`tyro.conf.arg`) has that name here, too."""
    marks = get_type_hints(kind, include_extras=True)
    found = {}
    for field in dataclasses.fields(kind):
        given = [getattr(mark, "name", None) for mark in getattr(marks[field.name], "__metadata__", ())]
        found[next((name for name in given if isinstance(name, str)), field.name)] = field.name
    return found


def _typed(value: Any, hint: Any, where: str, default: Any = None) -> Any:
    """`value` if it is of the hinted type, with the conversions that files need (paths, whole numbers as floats)."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for option in options:
        if get_origin(option) is Literal and isinstance(value, str) and value in get_args(option):
            return value
        if get_origin(option) in (tuple, list) and isinstance(value, list | tuple):
            kinds = get_args(option)
            if get_origin(option) is list or kinds[-1] is Ellipsis:
                kinds = kinds[:1] * len(value)
            if len(kinds) == len(value):
                return get_origin(option)(_typed(one, each, where) for one, each in zip(value, kinds, strict=True))
        if isinstance(option, type) and (made := _made(value, option, where, default)) is not None:
            return made
        if option is type(None) and value is None:
            return None
    wanted = " or ".join(_described(option) for option in options if option is not type(None))
    raise ConfigError(f"{where} must be {wanted}{_limit(value)}, not {shown(value)}")


def _made(value: Any, kind: type, where: str, default: Any) -> Any:
    """`value` as one of `kind`; None where it cannot be one."""
    if kind is Path:
        return Path(value) if isinstance(value, str) else None
    if issubclass(kind, Enum):
        return next((one for one in kind if one.value == value), None)
    if dataclasses.is_dataclass(kind):
        return settings_from(value, kind, where, default=default) if isinstance(value, dict) else None
    if kind in (int, float) and (isinstance(value, bool) or (isinstance(value, int) and abs(value) >= LARGEST_NUMBER)):
        return None
    if kind is float and isinstance(value, int):
        return float(value)
    return value if isinstance(value, kind) else None


def _described(option: Any) -> str:
    if get_origin(option) is Literal:
        return "one of " + ", ".join(map(str, get_args(option)))
    if get_origin(option) in (tuple, list):
        kinds = get_args(option)
        return f"a list of {len(kinds)}" if len(kinds) > 1 and kinds[-1] is not Ellipsis else "a list"
    if isinstance(option, type) and issubclass(option, Enum):
        return "one of " + ", ".join(str(one.value) for one in option)
    plain = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}
    return "a table" if dataclasses.is_dataclass(option) else plain.get(option, str(option.__name__))


# -- files ------------------------------------------------------------------------------------------------------------


def read_table(path: Path) -> Any:
    """What a TOML or JSON file holds."""
    with refused(ConfigError, f"cannot read {path}", OSError, ValueError):
        text = read_small(path)
    kind, parse = ("JSON", json.loads) if path.suffix == ".json" else ("TOML", tomllib.loads)
    with refused(ConfigError, f"{path} is not valid {kind}", ValueError, RecursionError):
        return parse(text)


def read_small(path: Path, most: int = LARGEST_FILE) -> str:
    """The text of a regular file of at most so many bytes."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO would block without a writer
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"it is {special_kind(path) or 'a directory'}, not a file")
        with open(handle, "rb", closefd=False) as file:
            content = file.read(most + 1)
    finally:
        os.close(handle)
    if len(content) > most:
        raise OSError(f"it has more than {most:,} bytes")
    return content.decode("utf-8")


def special_kind(path: Path) -> str | None:
    """What a path is that can be read neither as a file nor as a folder: reading it may block, or never end."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):  # it is not there, or its name is none: its reader says so
        return None
    kinds = {stat.S_ISFIFO: "a FIFO", stat.S_ISSOCK: "a socket", stat.S_ISCHR: "a device", stat.S_ISBLK: "a device"}
    return next((name for is_so, name in kinds.items() if is_so(mode)), None)

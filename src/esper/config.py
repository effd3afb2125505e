"""Settings from a TOML or JSON file, checked strictly: an unknown key is an error that names the nearest known one."""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
import types
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

_Settings = TypeVar("_Settings")


class ConfigError(ValueError):
    """A configuration file that cannot be used, with the reason."""


def read_config(path: Path, kind: type[_Settings]) -> _Settings:
    """An instance of the dataclass `kind` with the file's values in place of its defaults."""
    values = _read(path)
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a table of settings, not a {type(values).__name__}")
    hints = get_type_hints(kind)
    known = [field.name for field in dataclasses.fields(kind) if field.init]  # type: ignore[arg-type]
    settings: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the settings are {', '.join(known)}"
            raise ConfigError(f"{path}: unknown setting {key!r}; {hint}")
        settings[name] = _typed(value, hints[name], f"{path}: {key}")
    return kind(**settings)


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
    return str(option.__name__)

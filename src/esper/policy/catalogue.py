"""Controllers by name, or by the path of a file that holds one.

A TOML file with `[[grow]]` entries is a schedule (`schedule.py`); one with a `[heuristic]` table is the heuristic with
those settings in place of its defaults, as `esper tune-heuristic` writes it.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from esper.config import read_small
from esper.growth.blueprints import blueprint_names
from esper.policy.controller import Controller, NoGrowth, RandomLegal
from esper.policy.heuristic import Heuristic, HeuristicSettings
from esper.policy.schedule import default_schedule, parse_schedule

CONTROLLERS: dict[str, Callable[[], Controller]] = {
    "none": NoGrowth,
    "random": RandomLegal,
    "schedule": default_schedule,
    "heuristic": Heuristic,
}


def make_controller(name: str, others: Sequence[str] = ()) -> Controller:
    """A built-in controller by name, or a schedule or a tuned heuristic by the path of its TOML file.

    `others` are names that only the caller knows; they are named where one is misspelt.
    """
    if name in CONTROLLERS:
        return CONTROLLERS[name]()
    if name.endswith(".toml"):
        return read_controller(Path(name))
    known = [*CONTROLLERS, *others]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "a schedule or a tuned heuristic is given by its .toml file"
    raise ValueError(f"unknown controller {name!r}: choose one of {', '.join(known)}; {hint}")


def read_controller(path: Path) -> Controller:
    try:
        text = read_small(path)
        document = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"cannot read the controller {path}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    if "heuristic" not in document:
        return parse_schedule(text, str(path), default_name=path.stem)
    for key in document:
        if key not in ("name", "heuristic"):
            raise ValueError(f"{path}: unknown key {key!r}; a tuned heuristic has a name and a [heuristic] table")
    controller = Heuristic(heuristic_settings(document["heuristic"], str(path)))
    controller.name = str(document.get("name", path.stem))
    return controller


def heuristic_settings(table: Any, where: str) -> HeuristicSettings:
    """The settings in a table; what it does not name keeps its default, and what nobody knows is an error."""
    if not isinstance(table, dict):
        raise ValueError(f"{where}: heuristic must be a table of settings, [heuristic]")
    defaults = {field.name: getattr(HeuristicSettings(), field.name) for field in fields(HeuristicSettings)}
    given: dict[str, Any] = {}
    for key, value in table.items():
        if key not in defaults:
            near = difflib.get_close_matches(key, defaults, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the settings are {', '.join(defaults)}"
            raise ValueError(f"{where}: the heuristic has no setting {key!r}; {hint}")
        given[key] = _rotation(value, where) if key == "rotation" else _number(key, value, defaults[key], where)
    return HeuristicSettings(**given)


def _number(key: str, value: Any, default: float, where: str) -> float:
    whole = isinstance(default, int)
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not 0 <= value < 1e9:
        kind = "a whole number" if whole else "a number"
        raise ValueError(f"{where}: {key} must be {kind} of at least 0, not {value!r}")
    if key == "plateau_epochs" and value < 1:
        raise ValueError(f"{where}: plateau_epochs must be at least 1: a plateau needs two epochs to compare")
    return int(value) if whole else float(value)


def _rotation(value: Any, where: str) -> tuple[str, ...]:
    known = blueprint_names()
    if not isinstance(value, list) or not value or len(set(map(str, value))) != len(value):
        raise ValueError(f"{where}: rotation must be a list of different blueprints, not {value!r}")
    for name in value:
        if name not in known:
            raise ValueError(f"{where}: unknown blueprint {name!r} in rotation; there are {', '.join(known)}")
    return tuple(value)

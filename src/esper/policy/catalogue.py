"""Controllers by name, or by the path of a file that holds one.

A TOML file with `[[grow]]` entries is a schedule (`schedule.py`); one with a `[heuristic]` table is the heuristic with
those settings in place of its defaults, as `esper tune-heuristic` writes it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

from esper.config import read_small, settings_from
from esper.errors import did_you_mean
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
    hint = did_you_mean(name, known, "a schedule or a tuned heuristic is given by its .toml file")
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
    controller = Heuristic(settings_from(document["heuristic"], HeuristicSettings, str(path)))
    controller.name = str(document.get("name", path.stem))
    return controller

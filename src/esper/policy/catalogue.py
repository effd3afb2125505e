"""Controllers by name, or by the path of a file that holds one."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

from esper.policy.controller import Controller, NoGrowth, RandomLegal
from esper.policy.heuristic import Heuristic
from esper.policy.schedule import default_schedule, read_schedule

CONTROLLERS: dict[str, Callable[[], Controller]] = {
    "none": NoGrowth,
    "random": RandomLegal,
    "schedule": default_schedule,
    "heuristic": Heuristic,
}


def make_controller(name: str) -> Controller:
    """A built-in controller by name, or a schedule by the path of its TOML file."""
    if name in CONTROLLERS:
        return CONTROLLERS[name]()
    if name.endswith(".toml"):
        return read_schedule(Path(name))
    near = difflib.get_close_matches(name, CONTROLLERS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "a schedule is given by the path of its .toml file"
    raise ValueError(f"unknown controller {name!r}: choose one of {', '.join(CONTROLLERS)}; {hint}")

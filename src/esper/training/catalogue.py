"""Every controller, by name or by path: rules, TOML files, shipped policies, checkpoints of others, and whole runs.

A TOML file with `[[grow]]` entries is a schedule (`policy/schedule.py`); one with a `[heuristic]` table is the
heuristic with those settings in place of its defaults, as `esper tune-heuristic` writes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from esper.agent.policies import LearnedController
from esper.agent.shipped import shipped_names, shipped_path
from esper.config import read_table, settings_from
from esper.errors import did_you_mean
from esper.policy.controller import ColumnController, Controller, NoGrowth, RandomLegal
from esper.policy.heuristic import Heuristic, HeuristicSettings
from esper.policy.schedule import default_schedule, parse_schedule
from esper.training.run_folder import RunFolder
from esper.training.train_config import TrainConfig

RULES: dict[str, Callable[[], ColumnController]] = {
    "none": NoGrowth,
    "random": RandomLegal,
    "schedule": default_schedule,
    "heuristic": Heuristic,
}


def make_controller(name: str) -> ColumnController:
    """A rule or a shipped policy by name; a rule by its TOML file; a policy by its checkpoint or its run's folder.

    A name means the same everywhere, also where there is a folder of that name: that is `./NAME`.
    """
    if name in RULES:
        return RULES[name]()
    if name in shipped_names():
        shipped = LearnedController.load(shipped_path(name))
        shipped.name = name
        return shipped
    path = Path(name)
    if path.suffix == ".safetensors" or path.is_dir():
        return LearnedController.load(policy_file(name))
    if name.endswith(".toml"):
        return _read_rule(path)
    known = [*RULES, *shipped_names()]
    if len(path.parts) > 1:
        raise ValueError(f"there is no run or policy {name}; the controllers that come by name: {', '.join(known)}")
    hint = did_you_mean(name, known, "a schedule or a tuned heuristic is given by its .toml file")
    raise ValueError(f"unknown controller {name!r}: choose one of {', '.join(known)}; {hint}")


def as_controller(given: str | Path | Controller) -> Controller:
    """A controller by name or by path, or an object of the user's."""
    if isinstance(given, str | Path):
        return make_controller(str(given))
    can = all(callable(getattr(given, verb, None)) for verb in ("reset", "decide"))
    if isinstance(given, type):
        raise ValueError(f"the controller is the class {given.__name__}: pass an object of it, {given.__name__}(…)")
    if not can or not isinstance(getattr(given, "name", None), str):
        raise ValueError(
            "the controller must be a name, the path of a policy, or an object with a name, reset() and decide(), not "
            f"{given!r:.60}"
        )
    return given


def _read_rule(path: Path) -> ColumnController:
    document = read_table(path)
    if "heuristic" not in document:
        return parse_schedule(document, str(path), path.stem)
    for key in document:
        if key not in ("name", "heuristic"):
            raise ValueError(f"{path}: unknown key {key!r}; a tuned heuristic has a name and a [heuristic] table")
    return Heuristic(
        settings_from(document["heuristic"], HeuristicSettings, str(path)), str(document.get("name", path.stem))
    )


def policy_file(name: str) -> Path:
    """The checkpoint of a learned policy: of a shipped one by name, of a run (its best, else newest), or the path."""
    if name in shipped_names():
        return shipped_path(name)
    path = Path(name)
    if path.is_dir():
        return RunFolder.open(path)[0].policy()
    if not path.exists() and len(path.parts) == 1 and not path.suffix:  # more like a misspelt name than like a file
        raise ValueError(f"there is no checkpoint {name}; the policies that come by name: {', '.join(shipped_names())}")
    return path


def with_start(config: TrainConfig) -> TrainConfig:
    """The configuration of a new run, `init` being the file of a policy that can be started from: it may be the name of
    one, or a run. A teacher's weight without a teacher would do nothing."""
    if config.init is None:
        if config.ppo.teacher_kl:
            raise ValueError("ppo.teacher_kl needs a teacher: name its checkpoint with init")
        return config
    path = policy_file(config.init)
    LearnedController.load(path)
    return replace(config, init=str(path))

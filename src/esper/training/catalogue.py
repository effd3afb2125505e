"""Every controller, by name or by path: rules, TOML files, shipped policies, checkpoints of others, and whole runs."""

from __future__ import annotations

from pathlib import Path

from esper.agent.controller import LearnedController
from esper.agent.shipped import provenance, shipped_names, shipped_path
from esper.policy import catalogue as rules
from esper.policy.by_host import ByHost
from esper.policy.controller import Controller
from esper.training.run_folder import RunFolder


def make_controller(name: str) -> Controller:
    """A rule or a shipped policy by name; a rule by its TOML file; a policy by its checkpoint or its run's folder.

    A name means the same everywhere, also where there is a folder of that name: that is `./NAME`.
    """
    if name in rules.CONTROLLERS:
        return rules.make_controller(name)
    if name in shipped_names():
        return _shipped(name)
    if Path(name).suffix == ".safetensors" or Path(name).is_dir():
        return LearnedController.load(policy_file(name))
    return rules.make_controller(name, others=shipped_names())


def _shipped(name: str) -> Controller:
    asks = provenance(name).asks
    if asks is not None:
        return ByHost(name, *(LearnedController.load(shipped_path(one)) for one in (asks.dense, asks.others)))
    controller = LearnedController.load(shipped_path(name))
    controller.name = name
    return controller


def policy_file(name: str) -> Path:
    """The checkpoint of a learned policy: of a shipped one by name, of a run (its best, else newest), or the path."""
    if name in shipped_names():
        return shipped_path(name)
    path = Path(name)
    if path.is_dir():
        return RunFolder.open(path)[0].policy()
    if not path.exists() and len(path.parts) == 1 and not path.suffix:  # more like a misspelt name than like a file
        policies = [shipped for shipped in shipped_names() if provenance(shipped).asks is None]
        raise ValueError(f"there is no checkpoint {name}; the policies that come by name: {', '.join(policies)}")
    return path

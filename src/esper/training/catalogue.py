"""Every controller, by name or by path: rules, TOML files, checkpoints of learned policies, and whole runs."""

from __future__ import annotations

from pathlib import Path

from esper.agent.controller import LearnedController
from esper.policy import catalogue as rules
from esper.policy.controller import Controller
from esper.training.run_folder import RunFolder


def make_controller(name: str) -> Controller:
    """A rule by name or TOML file; a learned policy by its checkpoint (.safetensors) or its run's folder."""
    path = Path(name)
    if path.suffix == ".safetensors":
        return LearnedController.load(path)
    if path.is_dir():
        folder, _ = RunFolder.open(path)
        checkpoint = folder.best if folder.best.exists() else folder.latest()
        if checkpoint is None:
            raise ValueError(f"the run {path} has no checkpoint yet")
        return LearnedController.load(checkpoint)
    return rules.make_controller(name)

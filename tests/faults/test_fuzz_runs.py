"""Checkpoints, policies, recordings and run configurations, damaged in every way: refused in one line, or as they were.

`ESPER_FUZZ_CASES=10000 pytest tests/faults` tries that many of each kind.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzzing import Kind, attack, cases, damage_json
from toy_environments import CueMemory, make_agent
from toy_recordings import TOY, record_toy

from esper.agent.checkpoints import load_checkpoint, save_checkpoint
from esper.agent.config import PPOConfig
from esper.agent.policies import LearnedController
from esper.agent.ppo import PPOAgent
from esper.agent.shipped import shipped_path
from esper.offline.recording import Recording, append, read
from esper.training.catalogue import make_controller
from esper.training.run_folder import RunFolder
from esper.training.train_config import TrainConfig

COUNT = int(os.environ.get("ESPER_FUZZ_CASES", "0"))


def forged(path: Path, rng: random.Random) -> str:
    """One value of a checkpoint's data, with a digest that fits."""
    whole = load_checkpoint(path)
    data = json.loads(json.dumps(whole.data))
    what = damage_json(data, rng)
    try:
        save_checkpoint(path, whole.tensors, data)
    except (UnicodeEncodeError, ValueError):  # text that no file can hold
        return f"nothing: {what}"
    return what


# -- kinds ------------------------------------------------------------------------------------------------------------


def make_policy(path: Path) -> None:
    whole = load_checkpoint(shipped_path("small"))
    save_checkpoint(path, whole.tensors, whole.data)


def same_policy(a: LearnedController, b: LearnedController) -> bool:
    theirs = b.network.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in a.network.state_dict().items())


def agent() -> PPOAgent:
    return make_agent(CueMemory(4, 0), PPOConfig())


def resumed(path: Path) -> dict[str, torch.Tensor]:
    ours = agent()
    ours.load(path)
    return ours.state_dict()


def same_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def make_recording(folder: Path) -> None:
    append(folder, record_toy("waits", 4, 0.2, 0), TOY, {"task": "toy"})


def same_recording(a: Recording, b: Recording) -> bool:
    return torch.equal(a.episodes.reward, b.episodes.reward) and torch.equal(a.episodes.action, b.episodes.action)


def make_run(folder: Path) -> None:
    RunFolder.create(folder, TrainConfig(task="mixed", envs=4, updates=3))
    for path in folder.iterdir():
        if path.name != "config.json":
            path.rmdir() if path.is_dir() else path.unlink()


def config(folder: Path) -> TrainConfig:
    return RunFolder.open(folder)[1]


def forged_config(folder: Path, rng: random.Random) -> str:
    path = folder / "config.json"
    data = json.loads(path.read_text())
    what = damage_json(data, rng)
    path.write_bytes(json.dumps(data).encode("utf-8", "surrogatepass"))
    return what


def make_schedule(path: Path) -> None:
    path.write_text('name = "mine"\n[[grow]]\nepoch = 2\nslot = "*"\nblueprint = { conv1d = "conv", dense = "mlp" }\n')


def make_heuristic(path: Path) -> None:
    path.write_text('name = "tuned"\n[heuristic]\npatience = 5\nkeep_above = 0.5\nrotation = ["conv", "mlp"]\n')


def controller(path: Path) -> str:
    return make_controller(str(path)).name


def anything(found: Any, original: Any) -> bool:
    """What was changed on purpose, so that it is valid, may be read."""
    return type(found) is type(original)


KINDS = [
    Kind("policy.safetensors", make_policy, LearnedController.load, same_policy, (ValueError,)),
    Kind("forged-policy.safetensors", make_policy, LearnedController.load, anything, (ValueError,), (forged,) * 8),
    Kind("checkpoint.safetensors", lambda path: agent().save(path), resumed, same_tensors, (ValueError,)),
    Kind("forged-checkpoint.safetensors", lambda p: agent().save(p), resumed, anything, (ValueError,), (forged,) * 8),
    Kind("recording", make_recording, lambda folder: read(folder, TOY), same_recording, (ValueError,)),
    Kind("schedule.toml", make_schedule, controller, anything, (ValueError,)),
    Kind("heuristic.toml", make_heuristic, controller, anything, (ValueError,)),
    Kind("run", make_run, config, anything, (ValueError,), (forged_config,) * 4),
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_damaged_files_of_a_run_are_refused_or_as_they_were(kind: Kind, tmp_path: Path) -> None:
    valid = tmp_path / kind.name
    kind.make(valid)
    original = kind.read(valid)
    assert kind.same(kind.read(valid), original)
    for case in cases(kind, COUNT or 60):
        attack(case, valid, original, tmp_path / f"{case.number}-{kind.name}")

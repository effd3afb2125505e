"""Maintainers: put a learned controller into the package, so that it comes by name. Or, without arguments, check them.

    python benchmarks/ship.py runs/best mine --provenance mine.json            # a run, or a checkpoint
    python benchmarks/results.py measure mixed --arms small --learned mine     # judge the very file that ships
    python benchmarks/ship.py mine mine --judged docs/results.json             # note the score

It keeps the network (in float16) and the statistics of observations and returns, and nothing else of the checkpoint.
The file of --provenance states what only a person knows (`STATED`); the default is what is stated already.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

from esper.agent.checkpoints import load_checkpoint, save_checkpoint
from esper.agent.policies import LearnedController
from esper.agent.shipped import (
    SHIPPED_FOLDER,
    STATED,
    Provenance,
    provenance,
    shipped_names,
    shipped_path,
)
from esper.config import settings_from
from esper.files import write_whole
from esper.training.catalogue import RULES, make_controller, policy_file
from esper.training.statistics import bootstrap
from results import LEARNED, column, lead, read


def rounded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The policy alone, its network in float16.

    The statistics stay as they are: they are a few numbers, and a small variance would be lost. Those of returns are no
    part of the policy, but of its critic, without which `esper train --init` could not go on.
    """
    kept = {name: t for name, t in tensors.items() if name.startswith(("network/", "observations/", "values/"))}
    for name, tensor in kept.items():
        if name.startswith("network/"):
            kept[name] = tensor.half()
            if not bool(kept[name].isfinite().all()):
                raise ValueError(f"{name} holds numbers that float16 cannot: up to {float(tensor.abs().max()):g}")
    return kept


def judgement(path: Path, name: str, sha256: str) -> dict[str, Any]:
    """The score on `mixed` in what `results.py` measured, and the difference to the best rule."""
    part = read(path).get("mixed", {})
    if part.get("arms", {}).get(LEARNED, {}).get("made", {}).get("sha256") != sha256:
        raise ValueError(f"{path} is not what `results.py measure mixed` made of the policy that ships as {name}")
    own = bootstrap(column(part, LEARNED))
    rule = max((arm for arm in part["arms"] if arm in RULES), key=lambda arm: column(part, arm).mean())
    versus = lead(part, rule)
    return {
        "on": f"held-out draws {min(part['draws'])} to {max(part['draws'])} of mixed",
        "value": own.value,
        "low": own.low,
        "high": own.high,
        "rule": rule,
        "vs_rule": versus.value,
        "vs_rule_low": versus.low,
        "vs_rule_high": versus.high,
    }


def ship(
    source: str, name: str, stated: dict[str, Any], judged: Path | None, folder: Path = SHIPPED_FOLDER
) -> Provenance:
    """Write the policy and its provenance. The same source gives the same file, byte for byte."""
    _check(name, stated)
    path = policy_file(source)
    layout = LearnedController.load(path).network.config.layout  # what cannot be loaded is not shipped
    checkpoint = load_checkpoint(path)
    blueprints = list(checkpoint.data["caller"]["blueprints"])
    new = folder / f".{name}.new"  # the old controller stays whole until everything about the new one is known
    try:
        if source in shipped_names():  # it is in its last form
            shutil.copyfile(path, new)
        else:
            data = {"network": checkpoint.data["network"], "caller": {"blueprints": blueprints}}
            save_checkpoint(new, rounded(checkpoint.tensors), data)
        sha256 = hashlib.sha256(new.read_bytes()).hexdigest()
        facts = {"sha256": sha256, "blueprints": blueprints, "layout": layout}
        made = _state(folder, name, stated, judged, facts)
        new.replace(folder / f"{name}.safetensors")
    finally:
        new.unlink(missing_ok=True)
    return made


def _check(name: str, stated: dict[str, Any]) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_-]*", name) or name in RULES:
        raise ValueError(
            f"{name!r} cannot be a controller's name: a rule has it, or it is not small letters and digits"
        )
    missing = [key for key in STATED if key not in stated]
    if missing:
        raise ValueError(f"the provenance must state {', '.join(missing)}")


def _state(folder: Path, name: str, stated: dict[str, Any], judged: Path | None, facts: dict[str, Any]) -> Provenance:
    """Write what is stated, what was measured, and what is a fact. A score is of these weights, or it is forgotten."""
    sha256 = facts["sha256"]
    score = stated.get("score") if stated.get("sha256", sha256) == sha256 else None
    measured = score if judged is None else judgement(judged, name, sha256)
    data = {**{key: stated[key] for key in STATED}, "score": measured, **facts}
    made = settings_from(data, Provenance, f"the provenance of {name}", complete=True)
    write_whole(folder / f"{name}.json", json.dumps(asdict(made), indent=1) + "\n")
    return made


def check() -> bool:
    """Whether every shipped controller is whole and can be loaded; says what each is."""
    whole = True
    for name in shipped_names():
        try:
            make_controller(name)
            print(f"{name}: {shipped_path(name).stat().st_size / 1e3:.0f} kB, {provenance(name)}")
        except ValueError as error:
            whole = False
            print(f"{name}: {error}")
    return whole


def main(
    source: tyro.conf.Positional[str] = "",
    name: tyro.conf.Positional[str] = "",
    provenance: Path | None = None,
    judged: Path | None = None,
) -> int:
    """`source` is a checkpoint, a run or a shipped name, which will be called `name`."""
    torch.set_num_threads(1)
    if source:
        stated = json.loads((provenance or SHIPPED_FOLDER / f"{name}.json").read_text("utf-8"))
        made = ship(source, name, stated, judged)
        print(f"{SHIPPED_FOLDER / name}.json, sha256 {made.sha256[:12]}…")
    return 0 if check() else 1


if __name__ == "__main__":
    try:
        raise SystemExit(tyro.cli(main, description=__doc__))
    except (ValueError, TypeError, OSError) as error:
        raise SystemExit(f"ship: {error}") from error

"""Maintainers: put a learned controller into the package, so that it comes by name. Or, without arguments, check them.

    python benchmarks/ship.py runs/best mine --provenance mine.json            # a run, or a checkpoint
    python benchmarks/results/run.py mixed --controller mine                   # judge the very file that ships
    python benchmarks/ship.py mine mine --judged docs/results/mine/mixed.json  # note the score
    python benchmarks/ship.py small-dense+small-conv small                     # a pair: dense slots only, and others

It keeps the network (in float16) and the statistics of observations and returns, and nothing else of the checkpoint.
A pair has no policy of its own, only a provenance. The file of --provenance states what only a person knows
(`STATED`); the default is what is stated already.
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
    FOLDER,
    STATED,
    Pair,
    Provenance,
    provenance,
    shipped_names,
    shipped_path,
)
from esper.config import settings_from
from esper.files import write_whole
from esper.training.catalogue import RULES, make_controller, policy_file
from results.estimates import best_rival, difference, estimate
from results.measure import LEARNED, read


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
    """The score of the learned controller in what `run.py mixed` wrote, and the difference to the best rule."""
    facts = read(path) or {}
    if facts.get("part") != "mixed" or facts.get("learned_sha256") != sha256:
        raise ValueError(f"{path} is not what `run.py mixed` measured of the policy that ships as {name}")
    numbers = [draw["number"] for draw in facts["draws"]]
    own, rule = estimate(facts, LEARNED, "score"), best_rival(facts)
    versus = difference(facts, rule)
    return {
        "on": f"held-out draws {min(numbers)} to {max(numbers)} of mixed",
        "value": own.value,
        "low": own.low,
        "high": own.high,
        "rule": facts["controllers"][rule],
        "vs_rule": versus.value,
        "vs_rule_low": versus.low,
        "vs_rule_high": versus.high,
    }


def ship(source: str, name: str, stated: dict[str, Any], judged: Path | None, folder: Path = FOLDER) -> Provenance:
    """Write the policy and its provenance. The same source gives the same file, byte for byte."""
    _check(name, stated)
    if name in shipped_names() and provenance(name).asks is not None:
        raise ValueError(f"{name!r} is a pair: remove {name}.json first, if it shall be a policy of its own")
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


def ship_pair(asks: Pair, name: str, stated: dict[str, Any], judged: Path | None, folder: Path = FOLDER) -> Provenance:
    """Write the provenance of a controller that asks two policies which ship already."""
    _check(name, stated)
    for one in (asks.dense, asks.others):
        shipped_path(one)
    if (folder / f"{name}.safetensors").exists():
        raise ValueError(f"{folder / name}.safetensors is there, and a pair has no policy of its own: remove it first")
    dense, others = provenance(asks.dense), provenance(asks.others)
    if dense.blueprints != others.blueprints:
        raise ValueError(f"{asks.dense} and {asks.others} know other kinds of seed")
    facts = {"sha256": asks.sha256(), "blueprints": dense.blueprints, "layout": dense.layout, "asks": asdict(asks)}
    return _state(folder, name, stated, judged, facts)


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
    data = {"asks": None, **{key: stated[key] for key in STATED}, "score": measured, **facts}
    made = settings_from(data, Provenance, f"the provenance of {name}", complete=True)
    write_whole(folder / f"{name}.json", json.dumps(asdict(made), indent=1) + "\n")
    return made


def check() -> bool:
    """Whether every shipped controller is whole and can be loaded; says what each is."""
    whole = True
    for name in shipped_names():
        try:
            make_controller(name)
            weights = FOLDER / f"{name}.safetensors"
            size = f"{weights.stat().st_size / 1e3:.0f} kB, " if weights.exists() else ""
            print(f"{name}: {size}{provenance(name)}")
        except ValueError as error:  # a pair, when one of its policies was replaced: ship it again, and judge it
            whole = False
            print(f"{name}: {error}")
    return whole


def pair_of(source: str) -> Pair | None:
    """`DENSE+OTHERS`, or the name of a pair that ships."""
    dense, _, others = source.partition("+")
    if {dense, others} <= set(shipped_names()):
        return Pair(dense, others)
    return provenance(source).asks if source in shipped_names() else None


def main(
    source: tyro.conf.Positional[str] = "",
    name: tyro.conf.Positional[str] = "",
    provenance: Path | None = None,
    judged: Path | None = None,
) -> int:
    """`source` is a checkpoint, a run or a shipped name, which will be called `name`."""
    torch.set_num_threads(1)
    if source:
        stated = json.loads((provenance or FOLDER / f"{name}.json").read_text("utf-8"))
        asks = pair_of(source)
        made = ship(source, name, stated, judged) if asks is None else ship_pair(asks, name, stated, judged)
        print(f"{FOLDER / name}.json, sha256 {made.sha256[:12]}…")
    return 0 if check() else 1


if __name__ == "__main__":
    try:
        raise SystemExit(tyro.cli(main, description=__doc__))
    except (ValueError, TypeError, OSError) as error:
        raise SystemExit(f"ship: {error}") from error

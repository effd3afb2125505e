"""What is kept of the episodes: a few columns per controller, small enough for the repository, and how it was made."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from esper.agent.shipped import provenance as shipped_facts
from esper.agent.shipped import shipped_names
from esper.env.rent import RENT_RATE
from esper.training.catalogue import policy_file
from esper.training.controls import capacity_regret
from esper.training.evaluation import PASSES, EpisodeResult

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "results"
FORMAT = 1

LEARNED, TUNED, SCHEDULE = "learned", "tuned heuristic", "schedule"
FACTS = ("kind", "answer", "widths", "kernels", "draw", "repeat", "place")
"""Facts of a draw that a reader of the results may ask for."""


def columns(results: Mapping[int, EpisodeResult], widths: Mapping[int, Sequence[EpisodeResult]]) -> dict[str, Any]:
    """One label's episodes in the order of their draws. `widths`: static hosts of each draw, for capacity regret."""
    rows = [results[number] for number in sorted(results)]
    regrets = [capacity_regret(row, widths.get(row.number, ())) for row in rows]
    kept: dict[str, Any] = {
        "number": [row.number for row in rows],
        "accuracy": [_short(row.test_accuracy) for row in rows],
        "validation": [_short(row.val_accuracy) for row in rows],
        "score": [_short(row.score) for row in rows],
        "size": [_short(row.parameters / row.host_parameters) for row in rows],
        "flops": [_short(row.flops / row.host_flops) for row in rows],
        "training": [_short(row.training_flops / _host_training(row)) for row in rows],
        "kept": [_seeds(row) for row in rows],
        "planted": [row.planted for row in rows],
        "governed": sum(row.governor is not None for row in rows),
        "seconds": round(sum(row.seconds for row in rows), 1),
    }
    if any(regret is not None for regret in regrets):
        kept["regret"] = [None if regret is None else _short(regret) for regret in regrets]
    return kept


def draws(results: Mapping[int, EpisodeResult]) -> list[dict[str, Any]]:
    """What is known about each problem, in the order of the numbers."""
    return [
        {"number": number, "horizon": result.horizon, "host_parameters": result.host_parameters}
        | {name: result.facts[name] for name in FACTS if name in result.facts}
        for number, result in sorted(results.items())
    ]


def provenance(started: float, controllers: Mapping[str, str], workers: int) -> dict[str, Any]:
    """How the numbers came about, as far as the machine can tell."""
    return {
        "format": FORMAT,
        "command": command(),
        "controllers": dict(controllers),
        **({"learned_sha256": sha256_of(controllers[LEARNED])} if LEARNED in controllers else {}),
        "rent_rate": RENT_RATE,
        "wall_seconds": round(time.perf_counter() - started, 1),
        "workers": workers,
        "cores": os.cpu_count(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def sha256_of(controller: str) -> str:
    """Of a learned controller's file, or a pair's sum: which policy the numbers are of."""
    if controller in shipped_names():
        return shipped_facts(controller).sha256
    return hashlib.sha256(policy_file(controller).read_bytes()).hexdigest()


def command() -> str:
    """The command that a person would repeat, from the repository's folder."""
    script = Path(sys.argv[0]).resolve()
    name = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name
    return shlex.join(["python", str(name), *sys.argv[1:]])


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Whole or not at all: a run that is killed while it writes must not lose what was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".part")
    draft.write_text(compact(content), "utf-8")
    draft.replace(path)


def compact(content: Mapping[str, Any]) -> str:
    """JSON with each column and each draw on one line, so that files are small and differences are readable."""
    return _lines(content, "") + "\n"


def _lines(value: Any, indent: str) -> str:
    nested = isinstance(value, Mapping) and any(isinstance(v, Mapping | list) for v in value.values())
    if nested:
        inner = indent + " "
        parts = [f"{inner}{json.dumps(key, ensure_ascii=False)}: {_lines(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        inner = indent + " "
        return "[\n" + ",\n".join(f"{inner}{json.dumps(item, ensure_ascii=False)}" for item in value) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False)


def read(path: Path) -> dict[str, Any] | None:
    """None if this part was not run yet."""
    if not path.exists():
        return None
    content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    if content.get("format") != FORMAT:
        raise ValueError(f"{path} has format {content.get('format')!r}, not {FORMAT}: run that part again")
    return content


def _seeds(result: EpisodeResult) -> str:
    return "+".join(f"{seed.blueprint}@{seed.path.rpartition('.')[2]}" for seed in result.kept) or "none"


def _host_training(result: EpisodeResult) -> float:
    """FLOPs of training the host alone to the draw's horizon."""
    return PASSES * result.host_flops * result.examples / result.epochs * result.horizon


def _short(value: float) -> float:
    """JSON has no NaN; a network that broke has no accuracy."""
    return round(value, 3) if value == value else 0.0

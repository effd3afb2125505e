"""The parts of the evidence, measured and stored: a few columns per controller, and how they were made."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from esper.agent.shipped import provenance as shipped_facts
from esper.agent.shipped import shipped_names
from esper.cli.terminal import Progress, wide_console
from esper.env.rent import RENT_RATE
from esper.files import write_whole
from esper.growth.blueprints import LAYOUTS
from esper.policy.controller import Controller
from esper.policy.schedule import FixedSchedule, Planting
from esper.tasks.draws import comparison_draws
from esper.tasks.family import Family
from esper.training.catalogue import policy_file
from esper.training.comparison import Comparison, compare, host_training_flops, static_hosts
from esper.training.controls import capacity_regret, control_jobs, from_scratch, gather_controls
from esper.training.evaluation import jobs_for, run_jobs
from esper.training.results import EpisodeResult, Results
from results.families import Photographs, Reseeded, transfer_families

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "results"
FORMAT = 1

Controllers = Mapping[str, Controller | str]
"""By label: a controller, its name or its path."""
LEARNED, SCHEDULE = "learned", "schedule"
SCRATCH = f"{LEARNED}: from scratch"
DEPTHWISE = "dw@*"
"""The rule to beat on images: a depthwise seed in every slot, as early as it may."""
FACTS = ("kind", "answer", "widths", "kernels", "draw", "repeat", "place")
"""Facts of a draw that are stored."""
HARM_SEEDS = 3
KERNELS = (1, 3)


# -- the parts ---------------------------------------------------------------------------------------------------------


def measure_mixed(controllers: Controllers, episodes: int, workers: int, out: Path) -> None:
    """The main comparison, with static networks beside the learned controller's: from scratch, and wider hosts."""
    started = time.perf_counter()
    found = evaluate("mixed", controllers, comparison_draws(episodes), workers, controls=True)
    widths = {number: static_hosts(found, number) for number in found.common}
    content = stored(found.controllers, started, controllers, workers, widths) | {"part": "mixed"}
    write(out, content | {"controls": {label: columns(results, widths) for label, results in found.controls.items()}})


def measure_harm(controllers: Controllers, episodes: int, workers: int, out: Path) -> None:
    started = time.perf_counter()
    found = evaluate(Reseeded("mixed", HARM_SEEDS), controllers, range(episodes * HARM_SEEDS), workers)
    write(out, stored(found.controllers, started, controllers, workers) | {"part": "harm", "seeds": HARM_SEEDS})


def measure_transfer(controllers: Controllers, episodes: int, workers: int, out: Path, only: Sequence[str]) -> None:
    """Family by family; families that an earlier run did are kept, so that two machines can share the work."""
    families = transfer_families()
    if unknown := [name for name in only if name not in families]:
        raise SystemExit(f"no family {unknown[0]!r} here: there are {', '.join(families)} (digits needs scikit-learn)")
    for name in only or families:
        started = time.perf_counter()
        found = evaluate(families[name], controllers, comparison_draws(episodes), workers)
        content = read(out) or {"part": "transfer", "families": {}, "format": FORMAT}
        content["families"][name] = stored(found.controllers, started, controllers, workers)
        write(out, content)


def measure_cifar(controllers: Controllers, data_dir: Path, setting: Mapping[str, Any], out: Path) -> None:
    """CIFAR-10 with its whole training set, for a GPU. Each result is written when it is there.

    A repeated command adds what is missing, and what another learned controller made is replaced.
    """
    setting = {**setting, "data_dir": data_dir.name}
    content = read(out) or {"format": FORMAT, "part": "cifar", "setting": setting, "hosts": {}}
    if content["setting"] != setting:
        raise SystemExit(f"{out} was begun with other settings ({content['setting']}): name another --out")
    rule = FixedSchedule(DEPTHWISE, [Planting(2, "*", dict.fromkeys(LAYOUTS, "depthwise"))])
    seeds, device = range(setting["seeds"]), setting["device"]
    for kernel in KERNELS:
        family = Photographs(data_dir, setting, kernel)
        host = content["hosts"].setdefault(family.name, {"draws": [], "episodes": {}, "made": {}})
        for label, who in {**controllers, DEPTHWISE: rule}.items():
            started = time.perf_counter()
            made = provenance(started, {label: who}, 1)
            if label in host["made"] and host["made"][label].get("learned_sha256") == made.get("learned_sha256"):
                print(f"{family.name}, {label}: there already", file=sys.stderr)
                continue
            found = run_jobs(jobs_for(family, {label: who}, seeds, batch=len(seeds)), device=device)
            host["draws"] = host["draws"] or draws(found[label])
            if label == LEARNED:
                plans = {SCRATCH: from_scratch(found[LEARNED], "epochs")}
                ran = run_jobs(control_jobs(family, plans, {}), device=device)
                found |= gather_controls(plans, ran, {}, found[LEARNED])
            made |= {"wall_seconds": round(time.perf_counter() - started, 1)}
            for name, results in found.items():
                host["episodes"][name], host["made"][name] = columns(results), made
            write(out, content)


def evaluate(
    family: Family | str, controllers: Controllers, numbers: Sequence[int], workers: int, *, controls: bool = False
) -> Comparison:
    """All controllers on the same held-out draws, with progress on the error stream."""
    with Progress(wide_console(stderr=True)) as watch:
        options: dict[str, Any] = {"controls": controls, "scratch_of": LEARNED, "progress": watch.note}
        return compare(family, controllers, numbers, workers=workers, **options)


# -- what is stored ----------------------------------------------------------------------------------------------------


def stored(
    found: Results,
    started: float,
    controllers: Controllers,
    workers: int,
    widths: Mapping[int, Sequence[EpisodeResult]] | None = None,
) -> dict[str, Any]:
    episodes = {label: columns(results, widths or {}) for label, results in found.items()}
    return {**provenance(started, controllers, workers), "draws": draws(found["none"]), "episodes": episodes}


def columns(
    results: Mapping[int, EpisodeResult], widths: Mapping[int, Sequence[EpisodeResult]] | None = None
) -> dict[str, Any]:
    """One label's episodes in the order of their draws. `widths`: static hosts of each draw, for capacity regret."""
    rows = [results[number] for number in sorted(results)]
    values: dict[str, Any] = {
        "number": [row.number for row in rows],
        "accuracy": [_short(row.test_accuracy) for row in rows],
        "validation": [_short(row.val_accuracy) for row in rows],
        "score": [_short(row.score) for row in rows],
        "size": [_short(row.parameters / row.host_parameters) for row in rows],
        "flops": [_short(row.flops / row.host_flops) for row in rows],
        "training": [_short(row.training_flops / host_training_flops(row)) for row in rows],
        "kept": ["+".join(f"{s.blueprint}@{s.path.rpartition('.')[2]}" for s in row.kept) or "none" for row in rows],
        "planted": [row.planted for row in rows],
        "governed": sum(row.governor is not None for row in rows),
        "seconds": round(sum(row.seconds for row in rows), 1),
    }
    regrets = [capacity_regret(row, (widths or {}).get(row.number, ())) for row in rows]
    if any(regret is not None for regret in regrets):
        values["regret"] = [None if regret is None else _short(regret) for regret in regrets]
    return values


def _short(value: float) -> float:
    """JSON has no NaN; a network that broke has no accuracy."""
    return round(value, 3) if value == value else 0.0


def draws(results: Mapping[int, EpisodeResult]) -> list[dict[str, Any]]:
    """What is known about each problem, in the order of the draw ids."""
    return [
        {"number": number, "horizon": result.horizon, "host_parameters": result.host_parameters}
        | {name: result.facts[name] for name in FACTS if name in result.facts}
        for number, result in sorted(results.items())
    ]


def provenance(started: float, controllers: Controllers, workers: int) -> dict[str, Any]:
    """How the numbers came about."""
    learned = controllers.get(LEARNED)
    return {
        "format": FORMAT,
        "command": command(),
        "controllers": {label: who if isinstance(who, str) else who.name for label, who in controllers.items()},
        **({"learned_sha256": sha256_of(learned)} if isinstance(learned, str) else {}),
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
    """JSON with each column and each draw on one line, so that files are small and differences are readable."""
    text = json.dumps(content, ensure_ascii=False, indent=1)
    innermost = re.compile(r"[\[{]\n[^\[\]{}]*[\]}]")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, innermost.sub(lambda found: json.dumps(json.loads(found[0]), ensure_ascii=False), text) + "\n")


def read(path: Path) -> dict[str, Any] | None:
    """None if this part was not run yet."""
    if not path.exists():
        return None
    content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    if content.get("format") != FORMAT:
        raise ValueError(f"{path} has format {content.get('format')!r}, not {FORMAT}: run that part again")
    return content

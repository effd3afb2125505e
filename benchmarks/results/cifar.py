"""CIFAR-10 with its whole training set, for a GPU: every controller on the same seeds, all seeds side by side.

Each controller's result is written when it is there, and a repeated command goes on with what is missing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from esper.actions import Action
from esper.env.rent import score
from esper.env.situation import Situation
from esper.growth.blueprints import LAYOUTS, SlotShape
from esper.policy.controller import Controller
from esper.policy.schedule import FixedSchedule, Planting
from esper.training.catalogue import make_controller
from esper.training.controls import Static, StaticFamily
from esper.training.evaluation import EpisodeResult, Job, KeptSeed, run_job
from results.families import Photographs
from results.kept import FORMAT, LEARNED, columns, draws, provenance, read, sha256_of, write

EVERYWHERE = "dw@*"
"""The rule to beat on images: a depthwise seed in every slot, as early as it may."""
SCRATCH = f"{LEARNED}: from scratch"
KERNELS = (1, 3)


@dataclass(frozen=True, slots=True)
class Setting:
    """What all controllers share."""

    data_dir: Path
    device: str
    seeds: int
    horizon: int
    updates: int
    room: float
    """Budget for seeds, in host sizes; 0 is no limit."""
    max_seeds: int | None


def depthwise_everywhere() -> FixedSchedule:
    return FixedSchedule(EVERYWHERE, [Planting(2, "*", dict.fromkeys(LAYOUTS, "depthwise"))])


class Aloud:
    """A controller that says how far it is while it decides."""

    def __init__(self, inner: Controller, title: str, every: int = 5) -> None:
        self.name, self.inner, self.title, self.every = inner.name, inner, title, every
        self.started = time.perf_counter()

    def reset(self, seeds: Sequence[int]) -> None:
        self.inner.reset(seeds)
        self.started = time.perf_counter()

    def decide(self, situations: Sequence[Situation]) -> list[Action]:
        epoch = max(situation.epoch for situation in situations)
        if epoch % self.every == 0:
            accuracies = [s.history[-1].measured.accuracy for s in situations if s.history]
            level = f", validation {sum(accuracies) / len(accuracies):.1f} %" if accuracies else ""
            elapsed = time.perf_counter() - self.started
            print(f"{elapsed:7.0f} s  {self.title}: epoch {epoch}{level}", file=sys.stderr, flush=True)
        return self.inner.decide(situations)


def run_cifar(players: Mapping[str, str], setting: Setting, out: Path) -> None:
    for kernel in KERNELS:
        family = Photographs(
            setting.data_dir,
            kernel,
            horizon=setting.horizon,
            updates=setting.updates,
            room=setting.room,
            max_seeds=setting.max_seeds,
            device=setting.device,
        )
        for label in (*players, EVERYWHERE, *([SCRATCH] if LEARNED in players else [])):
            content = _begun(setting, out)
            host = content["hosts"].setdefault(family.name, {"draws": [], "episodes": {}, "made": {}})
            if label in host["episodes"] and not _of_another(host["made"][label], label, players):
                print(f"{family.name}, {label}: there already", file=sys.stderr)
                continue
            started = time.perf_counter()
            found = _from_scratch(host["grown"], family, setting) if label == SCRATCH else None
            found = found or _played(label, players, family, setting)
            if label == LEARNED:
                host["grown"] = [_architecture(found[number]) for number in sorted(found)]
            host["draws"] = host["draws"] or draws(found)
            host["episodes"][label] = columns(found, {})
            host["made"][label] = provenance(started, players, 1)
            write(out, content)
            seconds, accuracies = time.perf_counter() - started, host["episodes"][label]["accuracy"]
            print(f"{seconds:7.0f} s  {family.name}, {label}: {accuracies} % on the test set", file=sys.stderr)


def _of_another(made: Mapping[str, Any], label: str, players: Mapping[str, str]) -> bool:
    """Whether what is there was grown by another learned controller than the one that plays now."""
    if not label.startswith(LEARNED):
        return False
    return bool(made.get("learned_sha256") != sha256_of(players[LEARNED]))


def _begun(setting: Setting, out: Path) -> dict[str, Any]:
    """What an earlier run of the same settings has done."""
    plain = {**asdict(setting), "data_dir": setting.data_dir.name}
    content = read(out) or {"format": FORMAT, "part": "cifar", "setting": plain, "hosts": {}}
    if content["setting"] != plain:
        raise SystemExit(f"{out} was begun with other settings ({content['setting']}): name another --out")
    return content


def _played(label: str, players: Mapping[str, str], family: Photographs, setting: Setting) -> dict[int, EpisodeResult]:
    who = depthwise_everywhere() if label == EVERYWHERE else make_controller(players[label])
    job = Job(label, family, Aloud(who, f"{family.name}, {label}"), tuple(range(setting.seeds)))
    return {result.number: result for result in run_job(job, setting.device)}


def _architecture(result: EpisodeResult) -> dict[str, Any]:
    """Enough of a grown network to train it from scratch later, perhaps after a restart."""
    sizes = {"host_parameters": result.host_parameters, "host_flops": result.host_flops}
    return sizes | {"kept": [asdict(seed) for seed in result.kept]}


def _from_scratch(
    grown: Sequence[Mapping[str, Any]], family: Photographs, setting: Setting
) -> dict[int, EpisodeResult]:
    """The learned controller's final networks, fresh, for as many epochs."""
    plan = {
        number: Static(grafts=tuple(KeptSeed(**{**seed, "shape": SlotShape(**seed["shape"])}) for seed in one["kept"]))
        for number, one in enumerate(grown)
    }
    who = Aloud(make_controller("none"), f"{family.name}, {SCRATCH}")
    results = run_job(Job(SCRATCH, StaticFamily(family, plan), who, tuple(range(setting.seeds))), setting.device)
    return {
        result.number: replace(
            result,
            host_parameters=host["host_parameters"],
            host_flops=host["host_flops"],
            score=score(result.test_accuracy, result.parameters, host["host_parameters"]),
            kept=plan[result.number].grafts,
        )
        for result, host in zip(results, grown, strict=True)
    }

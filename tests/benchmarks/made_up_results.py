"""Made-up results in the format of docs/results, for tests of the page."""

from __future__ import annotations

from typing import Any

import numpy as np

KINDS = ("series motif @0", "token distant @1", "vector nothing", "series scale @1")
ANSWERS = ("depthwise@0", "attention@1", "none", "norm@1")
LEVELS = {"none": 55.0, "random": 60.0, "schedule": 75.0, "heuristic": 80.0, "learned": 90.0}


def rows(accuracies: np.ndarray, size: float = 1.2, kept: str = "norm@0", **more: Any) -> dict[str, Any]:
    """One label's columns."""
    count = len(accuracies)
    return {
        "number": list(range(count)),
        "accuracy": [float(a) for a in accuracies],
        "validation": [float(a) for a in accuracies],
        "score": [float(a) - 5.0 * (size - 1.0) for a in accuracies],
        "size": [size] * count,
        "flops": [size] * count,
        "training": [size] * count,
        "kept": [kept] * count,
        "planted": [1] * count,
        "governed": 0,
        "seconds": 1.0,
        **more,
    }


def _draws(count: int, **more: Any) -> list[dict[str, Any]]:
    facts = [{"kind": KINDS[i % 4], "answer": ANSWERS[i % 4]} for i in range(count)]
    return [{"number": i, "horizon": 20, "host_parameters": 500, **facts[i], **more} for i in range(count)]


def _made(part: str, workers: int = 2) -> dict[str, Any]:
    return {"format": 1, "command": f"python benchmarks/results/run.py {part}", "rent_rate": 5.0} | {
        "wall_seconds": 600.0,
        "workers": workers,
    }


def mixed(count: int = 16, better_by: float = 0.0) -> dict[str, Any]:
    """Every controller at its level, the learned one moved by `better_by`; problems differ by tens of points."""
    hardness = np.random.default_rng(0).normal(0.0, 4.0, count)
    wobble = np.random.default_rng(1).normal(0.0, 1.0, (len(LEVELS), count))
    regret = [-3.0 + 0.1 * i for i in range(count)]
    episodes = {
        label: rows(level + hardness + wobble[i] + better_by * (label == "learned"), regret=regret)
        for i, (label, level) in enumerate(LEVELS.items())
    }
    controls = {
        "learned: from scratch, equal epochs": rows(86.0 + hardness, regret=regret),
        "learned: from scratch, equal FLOPs": rows(87.0 + hardness, regret=regret),
        "static ×1.5": rows(60.0 + hardness, 1.5, "none", regret=regret),
    }
    return {**_made("mixed"), "part": "mixed", "draws": _draws(count), "episodes": episodes, "controls": controls}


def harm() -> dict[str, Any]:
    """Four draws of three seeds: differences of +10, 0, −0.4 and −2 on average."""
    none = np.full(12, 50.0)
    learned = none + np.array([9.0, 10.0, 11.0, 0.0, 0.0, 0.0, -1.2, 0.0, 0.0, -6.0, 0.0, 0.0])
    draws = _draws(12)
    for number, draw in enumerate(draws):
        draw["draw"], draw["repeat"] = divmod(number, 3)
    return {**_made("harm"), "part": "harm", "seeds": 3, "draws": draws} | {
        "episodes": {"none": rows(none, 1.0, "none"), "learned": rows(learned, 1.0)}
    }


def transfer() -> dict[str, Any]:
    families = {}
    for name, gain in (("natural", 2.0), ("deep series", 10.0)):
        hardness = np.random.default_rng(len(name)).normal(0.0, 5.0, 8)
        levels = {"none": 60.0, "schedule": 70.0, "heuristic": 71.0, "learned": 70.0 + gain}
        wobble = np.random.default_rng(2).normal(0.0, 0.5, (4, 8))
        episodes = {label: rows(level + hardness + wobble[i]) for i, (label, level) in enumerate(levels.items())}
        families[name] = {**_made("transfer"), "draws": _draws(8), "episodes": episodes}
    return {"format": 1, "part": "transfer", "families": families}


def cifar() -> dict[str, Any]:
    seeds = np.array([0.1, -0.2, 0.3, 0.0, -0.1])
    levels = {"none": 36.0, "schedule": 49.0, "learned": 52.0, "dw@*": 49.5, "learned: from scratch": 52.0}
    wobble = np.random.default_rng(3).normal(0.0, 0.3, (5, 5))
    host = {
        "draws": _draws(5),
        "episodes": {label: rows(level + seeds + wobble[i]) for i, (label, level) in enumerate(levels.items())},
        "made": {label: _made("cifar") for label in levels},
    }
    setting = {"device": "cuda:0", "seeds": 5, "horizon": 30, "updates": 196, "room": 4.0, "max_seeds": 3}
    return {"format": 1, "part": "cifar", "setting": setting, "hosts": {"cifar10, 1×1 kernels": host}}


def need_and_place() -> dict[str, Any]:
    """One layout, two draws, one random seed: on each, another of two schedules is the good one."""
    plans = {"none": "none", "a@0": "a@0", "b@0": "b@0"}
    first = {"none": [50.0], "a@0": [90.0], "b@0": [60.0]}
    second = {"none": [50.0], "a@0": [60.0], "b@0": [88.0]}
    return {
        "mixed": [
            {"layout": "dense", "horizon": 20, "planted": plans, "val": scores, "test": scores}
            for scores in (first, second)
        ]
    }

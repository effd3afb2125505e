"""Real problems: growing against what a person would do instead, kept in one JSON, written as one page.

    python benchmarks/real_problems.py measure --data-dir cifar --text-file tinyshakespeare.txt   # all: an hour
    python benchmarks/real_problems.py measure digits wine                                        # these alone
    python benchmarks/real_problems.py render                                                     # the page

The protocol is what stands in capitals here, in `real_data.py` (problems and hosts) and in `real_arms.py`. Every
training is kept when it is done: the same command goes on after a stop. Optuna comes with `pip install -e ".[peers]"`.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import tyro

from esper.files import write_whole
from real_arms import GROWERS, Job, run_job
from real_data import PROBLEMS, AbsentError, Problem, Sources
from real_page import render
from results import read, write

ROOT = Path(__file__).resolve().parents[1]
STORE, PAGE = ROOT / "docs/real_problems.json", ROOT / "docs/real_problems.md"

MEASUREMENT = 3
"""Which protocol the figures are by (`real_page.py`)."""
RATES = (0.001, 0.003, 0.01)
SEEDS, TUNING_SEEDS = (0, 1, 2, 3, 4), (100, 101)
WIDENED = {"wide 2": 2.0, "wide 4": 4.0}
FIRST = ("none", *GROWERS, *WIDENED)
"""Arms that need nothing of another arm."""
SEARCHES = {"optuna 1": 1.0, "optuna 10": 10.0}
"""With this many times the FLOPs of the run of `small` with the same seed."""
LATE = "late"
"""Added when the table was there, to see where its differences come from."""
SECOND = ("scratch", "scratch flops", *SEARCHES)
RATE_OF = {LATE: "scratch", "scratch flops": "scratch", "optuna 1": "scratch", "optuna 10": "scratch"}
"""Arms whose rate is that of another one, which trains the same kind of network."""

Kept = dict[str, Any]
"""Of one problem: `tuning` by arm, rate and seed, and `runs` by arm and seed."""


def protocol() -> dict[str, Any]:
    """What decides about the figures and may not change between runs that stand in one table."""
    return {"measurement": MEASUREMENT, "rates": list(RATES), "seeds": list(SEEDS), "tuning_seeds": list(TUNING_SEEDS)}


def best_rate(kept: Kept, arm: str) -> float:
    """By the mean validation accuracy over the tuning seeds; of equal ones the lowest."""
    tried = kept["tuning"][RATE_OF.get(arm, arm)]
    means = {rate: float(np.mean([tried[f"{rate:g}"][str(seed)]["val"] for seed in TUNING_SEEDS])) for rate in RATES}
    return max(RATES, key=lambda rate: (means[rate], -rate))


Planned = tuple[tuple[str, ...], Job]
"""Where the result is kept, and what gives it."""


def plan(name: str, kept: Kept, sources: Sources) -> Iterator[list[Planned]]:
    """Steps of a problem, each of which needs what the ones before have given; `kept` has grown in between."""
    yield [
        (
            ("tuning", arm, f"{rate:g}", str(seed)),
            Job(name, arm, seed, rate, sources, ratio=WIDENED.get(arm, 1.0), counted=False),
        )
        for arm in FIRST
        for rate in RATES
        for seed in TUNING_SEEDS
    ]
    small = kept["tuning"]["small"][f"{best_rate(kept, 'small'):g}"]
    networks = {seed: small[str(seed)]["network"] for seed in TUNING_SEEDS}
    yield [
        (("tuning", "scratch", f"{rate:g}", str(seed)), Job(name, "scratch", seed, rate, sources, networks[seed]))
        for rate in RATES
        for seed in TUNING_SEEDS
    ]
    yield [
        (("runs", arm, str(seed)), Job(name, arm, seed, best_rate(kept, arm), sources, ratio=WIDENED.get(arm, 1.0)))
        for arm in FIRST
        for seed in SEEDS
    ]
    yield [
        (("runs", arm, str(seed)), dependent(name, arm, seed, best_rate(kept, arm), sources, kept))
        for arm in SECOND
        for seed in SEEDS
    ]
    yield [(("runs", LATE, str(seed)), planted_late(name, seed, sources, kept)) for seed in SEEDS]


def planted_late(name: str, seed: int, sources: Sources, kept: Kept) -> Job:
    small = kept["runs"]["small"][str(seed)]
    born = {slot: epoch for slot, _, fate, epoch, _ in small["seeds"] if fate != "PRUNED"}
    births = [born[slot] for slot, _, _ in small["network"]]
    return Job(name, LATE, seed, best_rate(kept, LATE), sources, small["network"], births=births)


def dependent(name: str, arm: str, seed: int, rate: float, sources: Sources, kept: Kept) -> Job:
    """On the run of `small` with the same seed."""
    small = kept["runs"]["small"][str(seed)]
    if arm in SEARCHES:
        return Job(name, arm, seed, rate, sources, flops=SEARCHES[arm] * small["flops"])
    flops = small["flops"] if arm == "scratch flops" else None
    return Job(name, arm, seed, rate, sources, small["network"], flops=flops)


def at(kept: Kept, where: tuple[str, ...]) -> Any:
    for key in where:
        kept = kept.get(key, {})
    return kept


def keep(kept: Kept, where: tuple[str, ...], found: Any) -> None:
    for key in where[:-1]:
        kept = kept.setdefault(key, {})
    kept[where[-1]] = found


def measure(name: str, store: Path, sources: Sources) -> None:
    """All of a problem that is not kept yet."""
    kept: Kept = stored(store)["problems"].get(name, {})
    kept["torch"] = str(torch.__version__)
    for step in plan(name, kept, sources):
        for where, job in step:
            if at(kept, where):
                continue
            found = run_job(job)
            keep(kept, where, {**found, "rate": job.rate})
            save(store, name, kept)
            percent = found["test" if where[0] == "runs" else "val"]
            print(f"{name}, {' '.join(where)}: {percent:.1f} in {found['seconds']:.1f} s", flush=True)


def stored(path: Path) -> dict[str, Any]:
    return read(path) or {"protocol": protocol(), "problems": {}}


def save(path: Path, name: str, kept: Kept) -> None:
    """One problem; another process may measure another one meanwhile."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        store = stored(path)
        store["problems"][name] = kept
        write(store, path)
    finally:
        os.close(folder)  # and with it the lock


def check(names: tuple[str, ...], store: Mapping[str, Any]) -> None:
    """Refusals, each with one line."""
    if unknown := [name for name in names if name not in PROBLEMS]:
        raise SystemExit(f"real_problems: no problem is called {unknown[0]!r}; there are {', '.join(PROBLEMS)}")
    if find_spec("optuna") is None:
        raise SystemExit('real_problems: Optuna is not installed: pip install -e ".[peers]"')
    if store["protocol"] != protocol():
        raise SystemExit(
            f"real_problems: what is kept was measured by another protocol ({store['protocol']}): remove {STORE.name} "
            "to begin anew"
        )


def readable(name: str, problem: Problem, sources: Sources) -> bool:
    """Whether its data are there; if not, a line says what to do."""
    try:
        problem.read(TUNING_SEEDS[0], sources)
    except AbsentError as error:
        print(f"real_problems: {name} is left out: {error}")
        return False
    return True


def main(
    what: tyro.conf.Positional[Literal["measure", "render"]],
    problems: tyro.conf.Positional[tuple[str, ...]] = (),
    data_dir: str = "",
    text_file: str = "",
) -> int:
    """Measure what is not kept yet, or write the page. Two commands with different problems may run side by side.

    Args:
        problems: By name; without any, all but those that need a GPU.
        data_dir: Where the binary files of CIFAR-10 are.
        text_file: A text, such as tinyshakespeare.txt.
    """
    store = stored(STORE)
    if what == "render":
        write_whole(PAGE, render(store))
        print(f"Written: {PAGE}")
        return 0
    check(problems, store)
    sources = Sources(data_dir, text_file)
    for name in problems or [name for name, problem in PROBLEMS.items() if problem.by_default]:
        if readable(name, PROBLEMS[name], sources):
            measure(name, STORE, sources)
    return 0


if __name__ == "__main__":
    raise SystemExit(tyro.cli(main, description=__doc__))

"""The parts that a CPU runs: the main comparison on `mixed`, harmlessness, and transfer to other families."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from esper.tasks.family import Family
from esper.training.controls import Static, control_jobs, from_scratch, gather_controls, static_widths
from esper.training.evaluation import EpisodeResult, Job, Results, draw_numbers, jobs_for, run_jobs
from results.families import Reseeded, transfer_families
from results.kept import LEARNED, columns, draws, provenance, read, write

Players = Mapping[str, str]
"""By label: a controller's name or path."""
SCRATCH = {"epochs": f"{LEARNED}: from scratch, equal epochs", "flops": f"{LEARNED}: from scratch, equal FLOPs"}
HARM_DRAWS, HARM_SEEDS = 50, 3
TRANSFER_DRAWS = 16


class Meter:
    """Prints how far a run is, now and then."""

    def __init__(self, every: float = 15.0) -> None:
        self.started = self.last = time.perf_counter()
        self.every, self.done, self.total, self.title = every, 0, 0, ""

    def begin(self, title: str, jobs: Sequence[Job]) -> None:
        self.title, self.done, self.total = title, 0, sum(len(job.draws) for job in jobs)
        self.last = time.perf_counter()
        self._say()

    def note(self, job: Job, results: list[EpisodeResult]) -> None:
        self.done += len(results)
        now = time.perf_counter()
        if now - self.last >= self.every or self.done == self.total:
            self.last = now
            self._say()

    def _say(self) -> None:
        elapsed = time.perf_counter() - self.started
        print(f"{elapsed:7.0f} s  {self.title}: {self.done} of {self.total} episodes", file=sys.stderr, flush=True)


def play(family: Family | str, players: Players, numbers: Sequence[int], workers: int, meter: Meter) -> Results:
    """Everybody on the same held-out draws."""
    jobs = jobs_for(family, players, numbers, batch=_batch(len(numbers) * len(players), workers))
    meter.begin(family if isinstance(family, str) else family.name, jobs)
    return run_jobs(jobs, workers=workers, progress=meter.note)


def _batch(episodes: int, workers: int) -> int:
    """Results do not depend on it. Small enough that many workers end together, at most what `compare` takes."""
    return max(1, min(4, episodes // (4 * workers)))


# -- the main comparison ----------------------------------------------------------------------------------------------


def run_mixed(players: Players, episodes: int, workers: int, out: Path) -> None:
    started, meter = time.perf_counter(), Meter()
    numbers = draw_numbers(episodes)
    found = play("mixed", players, numbers, workers, meter)
    content = {
        **provenance(started, players, workers),
        "part": "mixed",
        "draws": draws(found["none"]),
        "episodes": {label: columns(results, {}) for label, results in found.items()},
        "controls": {},
    }
    write(out, content)  # the controls take as long again
    controls = run_controls("mixed", found, workers, meter)
    widths = _static_hosts(found, controls)
    content |= provenance(started, players, workers)
    content["episodes"] = {label: columns(results, widths) for label, results in found.items()}
    content["controls"] = {label: columns(results, widths) for label, results in controls.items()}
    write(out, content)


def run_controls(family: Family | str, found: Results, workers: int, meter: Meter) -> Results:
    """Static networks beside the learned controller's: its final networks from scratch, and wider hosts."""
    none, learned = found["none"], found[LEARNED]
    plans = {SCRATCH["epochs"]: from_scratch(learned, "epochs"), SCRATCH["flops"]: from_scratch(learned, "flops")}
    grown = [result for label, results in found.items() if label != "random" for result in results.values()]
    plans |= static_widths(none, max(result.parameters / result.host_parameters for result in grown))
    known = {(number, Static()): result for number, result in none.items()}
    jobs = control_jobs(family, plans, known)
    meter.begin("static controls", jobs)
    ran = run_jobs(jobs, workers=workers, progress=meter.note)
    return gather_controls(plans, ran, known, none)


def _static_hosts(found: Results, controls: Results) -> dict[int, list[EpisodeResult]]:
    static = [found["none"], *(results for label, results in controls.items() if label.startswith("static ×"))]
    return {number: [results[number] for results in static if number in results] for number in found["none"]}


# -- harmlessness -----------------------------------------------------------------------------------------------------


def run_harm(players: Players, episodes: int, workers: int, out: Path) -> None:
    started = time.perf_counter()
    family = Reseeded("mixed", HARM_SEEDS)
    found = play(family, players, range(episodes * HARM_SEEDS), workers, Meter())
    content = {
        **provenance(started, players, workers),
        "part": "harm",
        "seeds": HARM_SEEDS,
        "draws": draws(found["none"]),
        "episodes": {label: columns(results, {}) for label, results in found.items()},
    }
    write(out, content)


# -- transfer ---------------------------------------------------------------------------------------------------------


def run_transfer(
    players: Players, episodes: int, workers: int, out: Path, *, only: Sequence[str], text_file: Path | None
) -> None:
    """Family by family; families that an earlier run did are kept, so that two machines can share the work."""
    chosen = _chosen(transfer_families(text_file), only)
    meter = Meter()
    for name, family in chosen.items():
        started = time.perf_counter()
        found = play(family, players, draw_numbers(episodes), workers, meter)
        content = read(out) or {"part": "transfer", "families": {}}
        made = provenance(started, players, workers)
        content["format"] = made["format"]
        content["families"][name] = {
            **made,
            "draws": draws(found["none"]),
            "episodes": {label: columns(results, {}) for label, results in found.items()},
        }
        write(out, content)


def _chosen(families: Mapping[str, Family], only: Sequence[str]) -> dict[str, Family]:
    for name in only:
        if name not in families:
            raise SystemExit(f"no family {name!r} here: there are {', '.join(families)} (digits needs scikit-learn)")
    return {name: family for name, family in families.items() if not only or name in only}

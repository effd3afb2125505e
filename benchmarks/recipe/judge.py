"""Which policy is best, by training draws that no step of the recipe uses: to choose before anything is held out.

    python benchmarks/recipe/judge.py small-conv policies/0.safetensors --families mixed varied disguised --problems 48

Families of the transfer part (`'deep vectors'`) have training draws, too, which nothing is trained on.
Mean scores in points (accuracy minus rent), and what each player has more than the first, with 95 % intervals. Players
are names, files, or plans of `portfolio.py` (`plan:norm@*`). All data of these draws are for choosing, their test sets
too: in generated families nothing of them comes back in a held-out draw. In `natural/…` it does; do not choose by it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from portfolio import plan

from esper.policy.controller import Controller
from esper.tasks.draws import FIRST_JUDGED
from esper.tasks.family import Family, get_family
from esper.training.catalogue import make_controller
from esper.training.evaluation import EpisodeResult, Job, Results, jobs_for, run_jobs
from esper.training.statistics import Estimate, bootstrap, paired

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from results.families import transfer_families

PLAN = "plan:"


def player(text: str) -> Controller | str:
    return plan(text.removeprefix(PLAN)) if text.startswith(PLAN) else text


def family_of(name: str) -> Family | str:
    """One of the transfer part, which has no other way to be named, or what the name stands for everywhere."""
    return transfer_families(None).get(name, name)


def judged(family: Family | str, players: Sequence[str], problems: int, workers: int, seconds: float | None) -> Results:
    """Everybody on the same training draws; after so many seconds, those that all have played."""
    started, done = time.perf_counter(), 0
    numbers = range(FIRST_JUDGED, FIRST_JUDGED + problems)
    jobs = jobs_for(family, {text: player(text) for text in players}, numbers, held_out=False, batch=1)

    def late() -> bool:
        return seconds is not None and time.perf_counter() - started > seconds

    def tell(job: Job, results: list[EpisodeResult]) -> None:
        nonlocal done
        done += 1
        if done % 20 == 0 or done == len(jobs):
            name = job.family if isinstance(job.family, str) else job.family.name
            print(f"{name}: {done} of {len(jobs)}, {time.perf_counter() - started:.0f} s", file=sys.stderr)

    found = run_jobs(jobs, workers=workers, progress=tell, stop=late)
    common = set.intersection(*(set(results) for results in found.values()))
    return {text: {number: results[number] for number in sorted(common)} for text, results in found.items()}


def table(found: Results) -> list[str]:
    """A line for each player."""
    scores = {text: {number: result.score for number, result in own.items()} for text, own in found.items()}
    first = next(iter(scores.values()))
    lines = []
    for text, own in scores.items():
        line = f"  {text}: {sum(own.values()) / len(own):.1f}"
        lines.append(line if own is first else f"{line}, {_shown(bootstrap(paired(own, first)))}")
    return lines


def _shown(more: Estimate) -> str:
    return f"{more.value:+.1f}" + (f" ({more.low:+.1f} to {more.high:+.1f})" if more.low is not None else "")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("players", nargs="+", help="the first is what the others are compared with")
    parser.add_argument("--families", nargs="+", default=["mixed", "varied", "disguised"])
    parser.add_argument("--problems", type=int, default=48, help="of each family")
    parser.add_argument("--seconds", type=float, help="stop a family after so long, with what all have played by then")
    parser.add_argument("--workers", type=int, default=2)
    chosen = parser.parse_args(arguments)
    if min(chosen.problems, chosen.workers) < 1:
        parser.error("--problems and --workers must be at least 1")
    if len(set(chosen.players)) < len(chosen.players):
        parser.error("a player is named twice")
    try:  # told now, not after an hour
        for family in chosen.families:
            found = family_of(family)
            (get_family(found) if isinstance(found, str) else found).draw(FIRST_JUDGED)
        for text in chosen.players:
            who = player(text)
            if isinstance(who, str):
                make_controller(who)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    torch.set_num_threads(1)
    for family in chosen.families:
        results = judged(family_of(family), chosen.players, chosen.problems, chosen.workers, chosen.seconds)
        count = len(next(iter(results.values())))
        if not count:
            parser.error(f"no draw of {family} was played by all in time: allow more --seconds")
        print(f"{family}, {count} training draws", *table(results), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

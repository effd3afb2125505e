"""Does it matter what is grown, and where? Each kind of problem against each blueprint at each slot.

    python benchmarks/need_and_place.py --rounds 1 --seeds 2    # writes docs/need_and_place.md and .json: half an hour

Every run is a fixed schedule through the real lifecycle: germinate at epoch 2, fossilize when the gate lets it, settle
at the end. Score = accuracy − 5 points per extra host-size of parameters. Choices are made by validation scores on one
half of the random seeds, and judged by test scores on the other half; then the halves change places. Draws are training
draws: held-out ones are for judging controllers.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import tyro

from esper.cli.terminal import ProgressDisplay, wide_console
from esper.engine.eager import EagerEngine, EpochRecord
from esper.engine.measure import evaluate, gather
from esper.engine.prepare import task_learner
from esper.env.rent import score
from esper.env.situation import observe
from esper.growth.attach import attach
from esper.growth.blueprints import LAYOUTS, fitting
from esper.growth.model import GrowingModel
from esper.growth.seed import parameter_count
from esper.policy.schedule import FixedSchedule, Planting
from esper.tasks.family import Draw, get_family
from esper.tasks.feed import chunks
from esper.tasks.mixed import KINDS
from esper.training.own.run import settle
from esper.training.pools import run_each
from esper.training.workers import Processes
from page_text import table

ROOT = Path(__file__).resolve().parents[1]

GERMINATE = 2  # epoch
NONE = "none"

# Besides every blueprint at every slot, and at all slots that the limits allow: what a careful person might plant.
COMBINATIONS = {
    "conv1d": ("depthwise@0+depthwise@1", "depthwise@0+norm@1", "norm@0+depthwise@1", "depthwise@0+attention@1"),
    "conv2d": ("depthwise@0+depthwise@1", "depthwise@0+norm@1", "norm@0+depthwise@1", "depthwise@0+attention@1"),
    "dense": ("norm@0+mlp_small@1", "mlp_small@0+norm@1"),
    "sequence": ("attention@0+norm@1", "norm@0+attention@1", "attention@0+mlp_small@1"),
}


Job = tuple[str, int, str, int]
"""Family, draw id, plan (what of a schedule the draw's limits let germinate), random seed."""


class Run(NamedTuple):
    """One plan on one draw with one random seed."""

    val: float
    """Scores, on validation and test data."""
    test: float
    seconds: float


# -- running -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def draw_of(family: str, number: int) -> Draw:
    return get_family(family).draw(number)


def body(draw: Draw) -> GrowingModel:
    with torch.random.fork_rng(devices=[]):
        host = draw.task.make_host()
    task = draw.task
    return attach(
        host,
        task.slots,
        task.splits.train.x[:2],
        visibility=task.visibility,
        budget=draw.budget,
        max_seeds=draw.max_seeds,
    )


def schedules(model: GrowingModel) -> list[str]:
    names = [blueprint.name for blueprint in fitting(model.slots[0].shape)]
    singles = [f"{name}@{slot.index}" for name in names for slot in model.slots]
    return [NONE, *singles, *(f"{name}@*" for name in names), *COMBINATIONS[model.slots[0].shape.layout]]


def plan_of(schedule: str, model: GrowingModel) -> str:
    """What the limits leave of a schedule: schedules that come to the same are run once."""
    size, planted = model.host_parameters, []
    for blueprint, slot in plantings(schedule, len(model.slots)):
        shape = model.slots[slot].shape
        room = model.max_seeds is None or len(planted) < model.max_seeds
        if room and (model.budget is None or size + model.cost(model.slots[slot], blueprint) <= model.budget):
            planted.append(f"{blueprint}@{slot}")
            size += parameter_count(blueprint, shape)
    return "+".join(planted) or NONE


def plantings(schedule: str, slots: int) -> list[tuple[str, int]]:
    if schedule == NONE:
        return []
    parts = [part.split("@") for part in schedule.split("+")]
    return [(name, i) for name, at in parts for i in (range(slots) if at == "*" else [int(at)]) if i < slots]


def run(job: Job) -> Run:
    family, number, plan, seed = job
    draw, started = draw_of(family, number), time.process_time()
    # Seeds of a draw are two apart, so that they stay training seeds.
    learner = task_learner(draw.task, draw.seed + 2 * seed, draw.horizon, budget=draw.budget, max_seeds=draw.max_seeds)
    planting = [Planting(GERMINATE, i, dict.fromkeys(LAYOUTS, name)) for name, i in plantings(plan, 99)]
    controller = FixedSchedule(plan, planting)
    controller.reset([draw.seed])
    engine, history = EagerEngine([learner]), list[EpochRecord]()
    for _ in range(draw.horizon):
        history += engine.step(controller.decide([observe(learner, draw.horizon, history)]))
    settle(learner)
    model = learner.model
    splits = (draw.task.splits.val, draw.task.splits.test)
    found = gather([evaluate(model, chunks(split), learner.loss, learner.score) for split in splits])
    val, test = (score(one.accuracy, model.parameter_count, model.host_parameters) for one in found)
    return Run(val, test, time.process_time() - started)


# -- judging -----------------------------------------------------------------------------------------------------------


class Problem(NamedTuple):
    """The scores of all schedules on one draw."""

    draw: Draw
    layout: str
    names: tuple[str, ...]
    val: np.ndarray  # [schedules, seeds]
    test: np.ndarray
    planted: dict[str, str]
    """What of each schedule the limits let germinate."""

    def mean_score(self, name: str, split: str, seeds: np.ndarray) -> float:
        return float(getattr(self, split)[self.names.index(name), seeds].mean())


def problem_of(family: str, number: int, seeds: int, done: dict[Job, Run]) -> Problem:
    draw = draw_of(family, number)
    model = body(draw)
    planted = {name: plan_of(name, model) for name in schedules(model)}
    runs = [[done[family, number, plan, seed] for seed in range(seeds)] for plan in planted.values()]
    val, test = (np.array([[getattr(one, split) for one in row] for row in runs]) for split in ("val", "test"))
    return Problem(draw, model.slots[0].shape.layout, tuple(planted), val, test, planted)


def headroom(problems: list[Problem]) -> dict[str, Any]:
    """Per-draw best against the best single schedule (one per layout, as a schedule file can say), both chosen on one
    half of the seeds and scored on the other; mean over both ways round, interval by bootstrap over draws."""
    seeds = problems[0].val.shape[1]
    halves = (np.arange(seeds) < seeds // 2, np.arange(seeds) >= seeds // 2)
    gains, single = np.zeros(len(problems)), dict[str, list[str]]()
    for choose, judge in (halves, halves[::-1]):
        for layout in dict.fromkeys(problem.layout for problem in problems):
            of = [i for i, problem in enumerate(problems) if problem.layout == layout]
            names = [n for n in problems[of[0]].names if all(n in problems[i].names for i in of)]
            means = {n: np.mean([problems[i].mean_score(n, "val", choose) for i in of]) for n in names}
            fixed = max(means, key=means.__getitem__)
            single.setdefault(layout, []).append(fixed)
            for i in of:
                validation = {name: problems[i].mean_score(name, "val", choose) for name in problems[i].names}
                best = max(validation, key=validation.__getitem__)
                gains[i] += 0.5 * (
                    problems[i].mean_score(best, "test", judge) - problems[i].mean_score(fixed, "test", judge)
                )
    rng = np.random.default_rng(0)
    low, high = np.percentile(gains[rng.integers(0, len(gains), (10_000, len(gains)))].mean(1), (2.5, 97.5))
    return {
        "points": float(gains.mean()),
        "low": float(low),
        "high": float(high),
        "draws": len(problems),
        "single": {layout: " / ".join(dict.fromkeys(names)) for layout, names in single.items()},
        "gains": gains.tolist(),
    }


# -- writing -----------------------------------------------------------------------------------------------------------


def headline(title: str, found: dict[str, Any]) -> str:
    single = ", ".join(f"{layout}: {name}" for layout, name in found["single"].items())
    return (
        f"{title}: the per-draw best schedule is {found['points']:.1f} points of score better than the best single one "
        f"(95 % interval {found['low']:.1f} to {found['high']:.1f}; {found['draws']} draws). Best single: {single}."
    )


def by_kind(problems: list[Problem]) -> dict[str, tuple[list[Problem], dict[str, float]]]:
    """The draws of each kind of problem, with the mean score of each schedule on them."""
    kinds: dict[str, list[Problem]] = {}
    order = {kind: i for i, kind in enumerate(KINDS)}
    for problem in sorted(problems, key=lambda one: order.get(str(one.draw.facts["kind"]), 99)):
        kinds.setdefault(str(problem.draw.facts["kind"]), []).append(problem)
    every = slice(None)
    return {
        kind: (of, {name: float(np.mean([one.mean_score(name, "test", every) for one in of])) for name in of[0].names})
        for kind, of in kinds.items()
    }


def summary(problems: list[Problem]) -> list[str]:
    rows = []
    for kind, (of, scores) in by_kind(problems).items():
        best = max(scores, key=scores.__getitem__)
        single = [n for n in scores if "+" not in n and "*" not in n and n != best]
        same = [n for n in single if n.split("@")[0] == best.split("@")[0]]
        others = [n for n in single if n not in same]
        shown = [f"{name} {scores[name]:.1f}" if name else "" for name in (_best(scores, others), _best(scores, same))]
        meant = str(of[0].draw.facts.get("answer", ""))
        rows.append([kind, meant, f"{scores[NONE]:.1f}", best, f"{scores[best]:.1f}", *shown])
    head = ["problem", "meant", "none", "best", "score", "best other blueprint", "best one's blueprint elsewhere"]
    return table(head, rows)


def _best(scores: dict[str, float], names: list[str]) -> str:
    return max(names, key=scores.__getitem__, default="")


def details(problems: list[Problem]) -> list[str]:
    lines = []
    for kind, (of, scores) in by_kind(problems).items():
        best = max(scores.values())
        cells = {n: f"**{value:.1f}**" if value >= best - 0.05 else f"{value:.1f}" for n, value in scores.items()}
        slots = 1 + max(int(n[-1]) for n in scores if n[-1].isdigit())
        hosts = ", ".join(str(problem.draw.facts.get("widths", "")) for problem in of)
        lines += ["", f"### {kind}", "", f"Hosts: {hosts or kind}. Without growth: {cells[NONE]}.", ""]
        lines += [f"| | {' | '.join(f'slot {i}' for i in range(slots))} |", "|---|" + "---|" * slots]
        for blueprint in dict.fromkeys(n.split("@")[0] for n in scores if "+" not in n and n != NONE):
            shown = [cells.get(f"{blueprint}@{i}", "") for i in range(slots)]
            lines.append(f"| {blueprint} | {' | '.join(shown)} |")
        lines += ["", f"Combinations: {', '.join(f'{n} {cells[n]}' for n in scores if '+' in n or '*' in n)}."]
    return lines


def page(mixed: list[Problem], natural: list[Problem], command: str, runs: dict[Job, Run]) -> str:
    lines = [
        "# Need and place: does it matter what is grown, and where?",
        "",
        "For everyone who doubts that growing the right thing at the right place matters.",
        "",
        f"Written by `{command}`; do not edit. Every figure is a score in points: test accuracy − 5 × "
        "(parameters / host's parameters − 1), the mean over draws and random seeds, of a fixed schedule through the "
        f"real lifecycle (germinate at epoch {GERMINATE}, fossilize when the gate passes). A schedule that a draw's "
        "budget forbids scores as no growth.",
        "",
        headline("Generated problems (`mixed`)", headroom(mixed)),
        "",
        headline("Natural problems (`natural`)", headroom(natural)),
        "",
        "Both sides are chosen by validation scores on one half of the random seeds and judged by test scores on the "
        "other half, both ways round. The best single schedule may name another seed for each layout.",
        "",
        "## Generated problems",
        "",
        *summary(mixed),
        "",
        "## Natural problems",
        "",
        *summary(natural),
        "",
        "## Every blueprint at every slot",
        *details(mixed),
        *details(natural),
        "",
        f"{len(runs)} runs, {sum(r.seconds for r in runs.values()) / 60:.0f} minutes of one core. Milliseconds per "
        f"epoch of an ungrown host, training and validation, median (and most): {epoch_cost(mixed, runs)}.",
        "",
    ]
    return "\n".join(lines)


def epoch_cost(problems: list[Problem], runs: dict[Job, Run]) -> str:
    known = {int(problem.draw.facts["number"]): problem for problem in problems}
    costs: dict[str, list[float]] = {}
    for (family, number, plan, _), one in runs.items():
        if plan == NONE and family == "mixed":
            costs.setdefault(known[number].layout, []).append(1e3 * one.seconds / known[number].draw.horizon)
    return ", ".join(f"{layout} {np.median(each):.0f} ({max(each):.0f})" for layout, each in costs.items())


def as_json(problems: list[Problem]) -> list[dict[str, Any]]:
    return [
        {"facts": t.draw.facts, "seed": t.draw.seed, "horizon": t.draw.horizon, "budget": t.draw.budget}
        | {"max_seeds": t.draw.max_seeds, "layout": t.layout, "planted": t.planted}
        | {"val": dict(zip(t.names, t.val.round(2).tolist(), strict=True))}
        | {"test": dict(zip(t.names, t.test.round(2).tolist(), strict=True))}
        for t in problems
    ]


def main(workers: int = os.cpu_count() or 1, rounds: int = 2, seeds: int = 4, out: Path = ROOT / "docs") -> None:
    """`rounds` are draws of each kind, `seeds` (an even number) those of a draw; the page and its JSON go to `out`."""
    wanted = {"mixed": range(len(KINDS) * rounds), "natural": range(8)}
    found = measure(wanted, seeds, workers)
    mixed, natural = ([problem_of(name, n, seeds, found) for n in wanted[name]] for name in wanted)
    command = f"python benchmarks/need_and_place.py --rounds {rounds} --seeds {seeds}"
    text = page(mixed, natural, command, found)
    out.mkdir(parents=True, exist_ok=True)
    (out / "need_and_place.md").write_text(text)
    content = {"headroom": {"mixed": headroom(mixed), "natural": headroom(natural)}}
    content |= {"mixed": as_json(mixed), "natural": as_json(natural)}
    (out / "need_and_place.json").write_text(json.dumps(content, indent=1))
    print("\n".join(text.split("\n")[4:8] + summary(mixed) + summary(natural)))


def measure(wanted: dict[str, Sequence[int]], seeds: int, workers: int) -> dict[Job, Run]:
    """Every schedule on every draw; those that a draw's limits make the same are run once."""
    jobs = dict.fromkeys(
        (family, number, plan_of(name, model), seed)
        for family, numbers in wanted.items()
        for number in numbers
        for model in [body(draw_of(family, number))]
        for name in schedules(model)
        for seed in range(seeds)
    )
    done: dict[Job, Run] = {}
    with ProgressDisplay(wide_console(stderr=True), "runs") as watch:
        for job, one in run_each(run, list(jobs), Processes(workers)):
            done[job] = one
            watch.note(len(done), len(jobs), job[2])
    return done


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)

"""Does it matter what is grown, and where? Each kind of problem against each blueprint at each slot.

    python benchmarks/need_and_place.py --quick                 # about 3 minutes on one core; prints, writes nothing
    python benchmarks/need_and_place.py --processes 16          # writes docs/need_and_place.md and .json

Every run is a fixed schedule through the real lifecycle: germinate at epoch 2, fossilize when the gate lets it, settle
at the end. Score = accuracy − 5 points per extra host-size of parameters. Choices are made by validation scores on one
half of the random seeds, and judged by test scores on the other half; then the halves change places. Draws are training
draws: held-out ones are for judging controllers. `--cache FILE` keeps finished runs, so that a killed one continues.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from esper.engine.eager import EagerEngine, EpochRecord
from esper.engine.measure import evaluate, gather
from esper.engine.prepare import task_learner
from esper.env.situation import observe
from esper.growth.attach import attach
from esper.growth.blueprints import LAYOUTS, fitting
from esper.growth.model import GrowingModel
from esper.growth.seed import parameter_count
from esper.policy.schedule import FixedSchedule, Planting
from esper.tasks.family import Draw, Family, get_family
from esper.tasks.feed import chunks
from esper.tasks.mixed import KINDS
from esper.training.own.run import settle

RENT = 5.0
GERMINATE = 2  # epoch
NONE = "none"
DOCS = Path(__file__).resolve().parents[1] / "docs"

# Besides every blueprint at every slot, and at all slots that the limits allow: what a careful person might plant.
COMBINATIONS = {
    "conv1d": ("depthwise@0+depthwise@1", "depthwise@0+norm@1", "norm@0+depthwise@1", "depthwise@0+attention@1"),
    "conv2d": ("depthwise@0+depthwise@1", "depthwise@0+norm@1", "norm@0+depthwise@1", "depthwise@0+attention@1"),
    "dense": ("norm@0+mlp_small@1", "mlp_small@0+norm@1"),
    "sequence": ("attention@0+norm@1", "norm@0+attention@1", "attention@0+mlp_small@1"),
}
QUICK_KINDS = (
    "series motif @0",
    "series distant @1",
    "series composition @0",
    "vector channel @1",
    "vector nothing",
    "token distant @0",
    "token scale @0",
)
QUICK = {
    "conv1d": ("norm", "depthwise", "pointwise", "attention"),
    "conv2d": ("norm", "depthwise", "pointwise"),
    "dense": ("norm", "mlp_small"),
    "sequence": ("norm", "mlp_small", "attention"),
}


@dataclass(frozen=True, slots=True)
class Run:
    """One schedule on one draw with one random seed."""

    family: str
    number: int
    plan: str
    """What of the schedule the draw's limits let germinate."""
    seed: int
    val: float
    test: float
    ratio: float
    """Parameters over the host's, at the end."""
    kept: str
    seconds: float

    @property
    def key(self) -> tuple[str, int, str, int]:
        return self.family, self.number, self.plan, self.seed

    def score(self, accuracy: float) -> float:
        return accuracy - RENT * (self.ratio - 1.0)


# -- running -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def draw_of(family: str, number: int) -> Draw:
    return families()[family].draw(number)


@lru_cache(maxsize=1)
def families() -> dict[str, Family]:
    return {"mixed": get_family("mixed"), "natural": get_family("natural")}


def loads(number: int) -> bool:
    """Whether a natural draw's data are there: `digits` needs scikit-learn."""
    try:
        draw_of("natural", number)
    except ImportError as error:
        print(f"natural draw {number} is left out: {error}")
        return False
    return True


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


def schedules(model: GrowingModel, quick: bool) -> list[str]:
    layout = model.slots[0].shape.layout
    names = [b.name for b in fitting(model.slots[0].shape) if not quick or b.name in QUICK[layout]]
    singles = [f"{name}@{slot.index}" for name in names for slot in model.slots]
    combinations = COMBINATIONS[layout][:1] if quick else COMBINATIONS[layout]
    return [NONE, *singles, *(f"{name}@*" for name in names), *combinations]


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


def run(job: tuple[str, int, str, int]) -> Run:
    family, number, plan, seed = job
    draw = draw_of(family, number)
    started = time.process_time()
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
    val, test = gather([evaluate(model, chunks(split), learner.loss, learner.score) for split in splits])
    kept = "+".join(f"{slot.life.blueprint}@{slot.index}" for slot in model.slots if slot.seed is not None)
    ratio = model.parameter_count / model.host_parameters
    seconds = time.process_time() - started
    return Run(family, number, plan, seed, val.accuracy, test.accuracy, ratio, kept or NONE, seconds)


def start_worker() -> None:
    torch.set_num_threads(1)


def run_all(jobs: Iterable[tuple[str, int, str, int]], processes: int, cache: Path | None) -> dict[tuple, Run]:
    done: dict[tuple, Run] = {}
    if cache is not None and cache.exists():
        done = {r.key: r for r in (Run(**json.loads(line)) for line in cache.read_text().splitlines())}
    jobs = [job for job in jobs if job not in done]
    started = time.time()
    with multiprocessing.get_context("spawn").Pool(processes, start_worker) as pool:
        for count, result in enumerate(pool.imap_unordered(run, jobs, chunksize=2), 1):
            done[result.key] = result
            if cache is not None:
                with cache.open("a") as file:
                    file.write(json.dumps(asdict(result)) + "\n")
            if count % 100 == 0 or count == len(jobs):
                print(f"  {count} of {len(jobs)} runs, {time.time() - started:.0f} s", flush=True)
    return done


# -- judging -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Table:
    """The scores of all schedules on one draw."""

    draw: Draw
    layout: str
    names: tuple[str, ...]
    val: np.ndarray  # [schedules, seeds], scores
    test: np.ndarray
    planted: dict[str, str]
    """What of each schedule the limits let germinate."""

    def mean(self, name: str) -> float:
        return float(self.test[self.names.index(name)].mean())


def tabulate(family: str, numbers: Iterable[int], seeds: int, quick: bool, done: dict[tuple, Run]) -> list[Table]:
    tables = []
    for number in numbers:
        draw = draw_of(family, number)
        model = body(draw)
        names = schedules(model, quick)
        runs = [[done[family, number, plan_of(name, model), seed] for seed in range(seeds)] for name in names]
        val, test = (np.array([[r.score(getattr(r, part)) for r in row] for row in runs]) for part in ("val", "test"))
        planted = {name: row[0].plan for name, row in zip(names, runs, strict=True)}
        tables.append(Table(draw, model.slots[0].shape.layout, tuple(names), val, test, planted))
    return tables


def headroom(tables: list[Table]) -> dict[str, object]:
    """Per-draw best against the best single schedule (one per layout, as a schedule file can say), both chosen on one
    half of the seeds and scored on the other; mean over both ways round, interval by bootstrap over draws."""
    seeds = tables[0].val.shape[1]
    halves = (np.arange(seeds) < seeds // 2, np.arange(seeds) >= seeds // 2)
    gains, single = np.zeros(len(tables)), {}
    for choose, judge in (halves, halves[::-1]):
        for layout in {table.layout for table in tables}:
            of = [i for i, table in enumerate(tables) if table.layout == layout]
            names = [n for n in tables[of[0]].names if all(n in tables[i].names for i in of)]
            means = {n: np.mean([_half(tables[i], n, "val", choose) for i in of]) for n in names}
            fixed = max(means, key=means.__getitem__)
            single.setdefault(layout, []).append(fixed)
            for i in of:
                table = tables[i]
                best = max(table.names, key=lambda n, table=table: _half(table, n, "val", choose))
                gains[i] += 0.5 * (_half(table, best, "test", judge) - _half(table, fixed, "test", judge))
    rng = np.random.default_rng(0)
    resampled = gains[rng.integers(0, len(gains), (10_000, len(gains)))].mean(1)
    low, high = np.percentile(resampled, (2.5, 97.5))
    return {
        "points": float(gains.mean()),
        "low": float(low),
        "high": float(high),
        "draws": len(tables),
        "single": {layout: " / ".join(dict.fromkeys(names)) for layout, names in single.items()},
        "gains": [float(gain) for gain in gains],
    }


def _half(table: Table, name: str, part: str, seeds: np.ndarray) -> float:
    return float(getattr(table, part)[table.names.index(name), seeds].mean())


# -- writing -----------------------------------------------------------------------------------------------------------


def headline(title: str, found: dict) -> str:
    single = ", ".join(f"{layout}: {name}" for layout, name in found["single"].items())
    return (
        f"{title}: the per-draw best schedule is {found['points']:.1f} points of score better than the best single one "
        f"(95 % interval {found['low']:.1f} to {found['high']:.1f}; {found['draws']} draws). Best single: {single}."
    )


def by_kind(tables: list[Table]) -> dict[str, list[Table]]:
    kinds: dict[str, list[Table]] = {}
    for table in tables:
        kinds.setdefault(str(table.draw.facts["kind"]), []).append(table)
    order = {kind: i for i, kind in enumerate(KINDS)}
    return dict(sorted(kinds.items(), key=lambda item: order.get(item[0], 99)))


def mean_scores(tables: list[Table]) -> dict[str, float]:
    return {name: float(np.mean([table.mean(name) for table in tables])) for name in tables[0].names}


def summary(tables: list[Table]) -> list[str]:
    lines = [
        "| problem | meant | none | best | score | best other blueprint | best one's blueprint elsewhere |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, of in by_kind(tables).items():
        scores = mean_scores(of)
        best = max(scores, key=scores.__getitem__)
        blueprint = best.split("@")[0]
        single = [n for n in scores if "+" not in n and "*" not in n]
        others = [n for n in single if n.split("@")[0] != blueprint]
        elsewhere = [n for n in single if n.split("@")[0] == blueprint and n != best]
        shown = [_best(scores, names) for names in (others, elsewhere)]
        meant = of[0].draw.facts.get("answer", "")
        lines.append(f"| {kind} | {meant} | {scores[NONE]:.1f} | {best} | {scores[best]:.1f} | {' | '.join(shown)} |")
    return lines


def _best(scores: dict[str, float], names: list[str]) -> str:
    if not names:
        return ""
    name = max(names, key=scores.__getitem__)
    return f"{name} {scores[name]:.1f}"


def details(tables: list[Table]) -> list[str]:
    lines = []
    for kind, of in by_kind(tables).items():
        scores = mean_scores(of)
        slots = 1 + max(int(n[-1]) for n in scores if n[-1].isdigit())
        best = max(scores.values())
        hosts = ", ".join(str(table.draw.facts.get("widths", "")) for table in of)
        lines += ["", f"### {kind}", "", f"Hosts: {hosts or kind}. Without growth: {_cell(scores, NONE, best)}.", ""]
        lines += [f"| | {' | '.join(f'slot {i}' for i in range(slots))} |", "|---|" + "---|" * slots]
        for blueprint in dict.fromkeys(n.split("@")[0] for n in scores if "+" not in n and n != NONE):
            cells = [_cell(scores, f"{blueprint}@{i}", best) for i in range(slots)]
            lines.append(f"| {blueprint} | {' | '.join(cells)} |")
        more = [f"{n} {_cell(scores, n, best)}" for n in scores if "+" in n or "*" in n]
        lines += ["", f"Combinations: {', '.join(more)}."]
    return lines


def _cell(scores: dict[str, float], name: str, best: float) -> str:
    if name not in scores:
        return ""
    return f"**{scores[name]:.1f}**" if scores[name] >= best - 0.05 else f"{scores[name]:.1f}"


def page(mixed: list[Table], natural: list[Table], command: str, runs: dict[tuple, Run]) -> str:
    lines = [
        "# Need and place: does it matter what is grown, and where?",
        "",
        f"Written by `{command}`; do not edit. Every figure is a score in points: test accuracy − {RENT:g} × "
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


def epoch_cost(tables: list[Table], runs: dict[tuple, Run]) -> str:
    horizons = {("mixed", int(table.draw.facts["number"])): (table.layout, table.draw.horizon) for table in tables}
    costs: dict[str, list[float]] = {}
    for r in runs.values():
        if r.plan == NONE and (r.family, r.number) in horizons:
            layout, horizon = horizons[r.family, r.number]
            costs.setdefault(layout, []).append(1e3 * r.seconds / horizon)
    return ", ".join(f"{layout} {np.median(each):.0f} ({max(each):.0f})" for layout, each in costs.items())


def as_json(tables: list[Table]) -> list[dict]:
    return [
        {"facts": t.draw.facts, "seed": t.draw.seed, "horizon": t.draw.horizon, "budget": t.draw.budget}
        | {"max_seeds": t.draw.max_seeds, "layout": t.layout, "planted": t.planted}
        | {"val": dict(zip(t.names, t.val.round(2).tolist(), strict=True))}
        | {"test": dict(zip(t.names, t.test.round(2).tolist(), strict=True))}
        for t in tables
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few kinds, blueprints and seeds; prints only")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=2, help="draws of each kind")
    parser.add_argument("--seeds", type=int, default=4, help="random seeds per draw, an even number")
    parser.add_argument("--cache", type=Path, help="file of finished runs, continued if it exists")
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of need_and_place.md and .json")
    options = parser.parse_args()
    seeds = 2 if options.quick else options.seeds
    mixed_numbers = range(len(KINDS) * (1 if options.quick else options.rounds))
    if options.quick:
        mixed_numbers = [n for n in mixed_numbers if draw_of("mixed", n).facts["kind"] in QUICK_KINDS]
    wanted = {"mixed": mixed_numbers, "natural": [n for n in (range(1, 2) if options.quick else range(8)) if loads(n)]}
    jobs = dict.fromkeys(
        (family, number, plan_of(name, model), seed)
        for family, numbers in wanted.items()
        for number in numbers
        for model in [body(draw_of(family, number))]
        for name in schedules(model, options.quick)
        for seed in range(seeds)
    )
    print(f"{len(jobs)} runs on {options.processes} processes", flush=True)
    done = run_all(jobs, options.processes, options.cache)
    mixed, natural = (tabulate(family, numbers, seeds, options.quick, done) for family, numbers in wanted.items())
    command = f"python benchmarks/need_and_place.py --rounds {options.rounds} --seeds {seeds}"
    text = page(mixed, natural, command, done)
    if options.quick:
        print(text)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "need_and_place.md").write_text(text)
    found = {"mixed": headroom(mixed), "natural": headroom(natural)}
    content = {"headroom": found, "mixed": as_json(mixed), "natural": as_json(natural)}
    (options.out / "need_and_place.json").write_text(json.dumps(content, indent=1))
    print("\n".join(text.split("\n")[4:8] + summary(mixed) + summary(natural)))


if __name__ == "__main__":
    main()

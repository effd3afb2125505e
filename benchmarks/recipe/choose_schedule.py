"""The best fixed schedule, chosen on training draws: the strongest plan that never looks at the run.

    python benchmarks/recipe/choose_schedule.py --workers 2 --out docs/results/schedule.toml

A schedule may name another seed for each layout, so the layouts are searched one by one, by successive halving: every
blueprint at every slot (and at all of them), then pairs of the better ones, then the best few at other epochs, each
round on draws that are new to all. Ranked by mean score on validation data; held-out draws and test data play no part.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from esper.env.reward.objective import score
from esper.growth.blueprints import SlotShape, fitting
from esper.growth.blueprints.registry import Layout
from esper.policy.controller import Controller, NoGrowth
from esper.policy.schedule import FixedSchedule, Planting
from esper.tasks.draws import COMPARISON_DRAWS_PER_SEED
from esper.tasks.family import get_family
from esper.training.evaluation import jobs_for, run_jobs

FAMILIES: dict[Layout, str] = {
    "conv1d": "mixed/series",
    "conv2d": "mixed/image",
    "sequence": "mixed/token",
    "dense": "mixed/vector",
}
SLOTS: tuple[int | str, ...] = (0, 1, 2, "*")
FIRST_EPOCH, OTHER_EPOCHS = 2, (1, 4)
BETTER, BEST = 5, 3
"""Plans that go on to be paired, and to be tried at other epochs."""
SEED = 7
"""Decides the draws: other ones than those that controllers train and are tuned on."""

Plan = tuple[Planting, ...]


def singles(layout: Layout) -> list[Plan]:
    names = [blueprint.name for blueprint in fitting(SlotShape(layout, 8))]
    return [(Planting(FIRST_EPOCH, slot, {layout: name}),) for name in names for slot in SLOTS]


def pairs(plans: Sequence[Plan]) -> list[Plan]:
    """The better plans one after the other, where they want different slots."""
    return [first + second for first in plans for second in plans if first[0].slot != second[0].slot]


def at_other_epochs(plans: Sequence[Plan]) -> list[Plan]:
    return [tuple(replace(one, epoch=epoch) for one in plan) for plan in plans for epoch in OTHER_EPOCHS]


def told(plan: Plan) -> str:
    if not plan:
        return "none"
    return " + ".join(f"{next(iter(p.blueprints.values()))}@{p.slot} from epoch {p.epoch}" for p in plan)


def judge(family: str, plans: Sequence[Plan], first: int, rounds: int, workers: int) -> tuple[list[Plan], int]:
    """The plans, best first, and the env-steps that it took to find out."""
    kinds = get_family(family).round
    start = SEED * COMPARISON_DRAWS_PER_SEED
    numbers = range(start + first * kinds, start + (first + rounds) * kinds)
    makers: dict[str, Controller | str] = {
        told(plan): FixedSchedule(told(plan), plan) if plan else NoGrowth() for plan in plans
    }
    results = run_jobs(jobs_for(family, makers, numbers, held_out=False, batch=2), workers=workers)
    means = {
        name: float(np.mean([score(r.val_accuracy, r.parameters, r.host_parameters) for r in found.values()]))
        for name, found in results.items()
    }
    ranked = sorted(plans, key=lambda plan: -means[told(plan)])
    for plan in ranked[:5]:
        print(f"    {means[told(plan)]:6.2f}  {told(plan)}", flush=True)
    return ranked, sum(r.epochs for found in results.values() for r in found.values())


def search(layout: Layout, workers: int) -> tuple[Plan, int]:
    family, steps = FAMILIES[layout], 0
    print(f"{layout}: every blueprint at every slot", flush=True)
    ranked, cost = judge(family, [(), *singles(layout)], 0, 1, workers)
    steps += cost
    print("  the better ones, and pairs of them", flush=True)
    better = [plan for plan in ranked[:BETTER] if plan]
    ranked, cost = judge(family, [*ranked[:BETTER], *pairs(better)], 1, 2, workers)
    steps += cost
    print("  the best ones at other epochs", flush=True)
    best = ranked[:BEST]
    ranked, cost = judge(family, [*best, *at_other_epochs([plan for plan in best if plan])], 3, 4, workers)
    return ranked[0], steps + cost


def as_toml(plans: dict[Layout, Plan], steps: int, seconds: float) -> str:
    lines = [
        "# Chosen by benchmarks/recipe/choose_schedule.py on training draws of `mixed`:",
        f"# {steps:,} env-steps, {seconds:.0f} s",
        'name = "best schedule"',
    ]
    for layout, plan in plans.items():
        for one in plan:
            slot = one.slot if isinstance(one.slot, int) else f'"{one.slot}"'
            blueprint = f'{{ {layout} = "{one.blueprints[layout]}" }}'
            lines += ["", "[[grow]]", f"epoch = {one.epoch}", f"slot = {slot}", f"blueprint = {blueprint}"]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--layouts", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--out", type=Path, default=Path("docs/results/schedule.toml"))
    chosen = parser.parse_args(arguments)
    started, steps = time.perf_counter(), 0
    plans: dict[Layout, Plan] = {}
    for layout in chosen.layouts:
        plans[layout], cost = search(layout, chosen.workers)
        steps += cost
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(as_toml(plans, steps, time.perf_counter() - started), "utf-8")
    print(f"{chosen.out}: {', '.join(told(plan) for plan in plans.values())}; {steps:,} env-steps")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

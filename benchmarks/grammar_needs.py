"""Does it matter in `grammar` what is grown, and where? No growth, the meant answer, that seed elsewhere, a schedule.

    python benchmarks/grammar_needs.py --draws 80 --everything      # one core: 8 minutes

Every run is a schedule through the real lifecycle (`need_and_place.run`), scored on test data: accuracy − 5 points per
extra host-size of parameters. "elsewhere" is the first seed of the answer at the last slot that is not its own, "best"
the best of all these, with --everything also of each blueprint at the answer's slot, chosen by validation score. Draws
are training draws: held-out ones are for judging controllers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import tyro

from esper.growth.blueprints import fitting
from need_and_place import NONE, body, draw_of, plan_of, run
from page_text import table

SCHEDULE = {
    "dense": "mlp_small@0",
    "sequence": "attention@0+mlp_small@1",
    "conv1d": "depthwise@0",
    "conv2d": "depthwise@0",
}
FIGURES = ("none", "answer", "elsewhere", "schedule", "best", "ceiling")
FIRST = 500_000
"""Training draws that the first 500,000 episodes of a run with seed 0 do not use."""


class Found(NamedTuple):
    """Scores on one draw."""

    layout: str
    lacks: str
    none: float
    answer: float
    elsewhere: float
    schedule: float
    best: float
    chosen: str
    ceiling: float
    seconds: float


def measure(family: str, number: int, everything: bool) -> Found:
    draw = draw_of(family, number)
    model, layout, answer = body(draw), str(draw.facts["layout"]), str(draw.facts["answer"])
    slot = int(answer.split("+")[0].split("@")[1]) if answer != NONE else 0
    others = [other for other in range(len(model.slots)) if other != slot]
    elsewhere = answer if answer == NONE else f"{answer.split('@')[0]}@{others[-1]}"
    single = [f"{blueprint.name}@{slot}" for blueprint in fitting(model.slots[slot].shape)] if everything else []
    plans = {name: plan_of(name, model) for name in (NONE, answer, elsewhere, SCHEDULE[layout], *single)}
    runs = {plan: run((family, number, plan, 0)) for plan in dict.fromkeys(plans.values())}
    best = max(runs, key=lambda plan: runs[plan].val)
    scores = [runs[plans[name]].test for name in (NONE, answer, elsewhere, SCHEDULE[layout])]
    seconds = sum(one.seconds for one in runs.values())
    lacks, ceiling = str(draw.facts["lacks"]), float(draw.facts["ceiling"])
    return Found(layout, lacks, *scores, runs[best].test, best, ceiling, seconds)


def rows(found: list[Found], by: str) -> list[list[str]]:
    made = []
    for value in sorted({getattr(one, by) for one in found}):
        of = [one for one in found if getattr(one, by) == value]
        means = [np.mean([getattr(one, name) for one in of]) for name in FIGURES]
        made.append([value, str(len(of)), *(f"{mean:.1f}" for mean in means)])
    return made


def main(
    family: str = "grammar", draws: int = 96, first: int = FIRST, everything: bool = False, each: bool = False
) -> None:
    """Measure draws of a family and print the tables.

    Args:
        everything: Also each blueprint at the answer's slot.
        each: Print every draw.
    """
    found = []
    for number in range(first, first + draws):
        one = measure(family, number, everything)
        found.append(one)
        if each:
            facts = draw_of(family, number).facts
            figures = " ".join(f"{getattr(one, name):.0f}" for name in FIGURES)
            print(f"{figures:24} {facts['kind']} | {one.lacks} | {facts['answer']} | {one.chosen}", flush=True)
    for by in ("layout", "lacks"):
        print("\n".join(table([by, "draws", *FIGURES], rows(found, by))), "\n")
    gains = np.array([one.best - one.none for one in found])
    pays, much = (f"{100 * np.mean(gains > points):.0f} %" for points in (2, 10))
    print(f"growing pays more than 2 points in {pays} of the draws, more than 10 in {much}")
    print(f"the meant answer beats the schedule by {np.mean([one.answer - one.schedule for one in found]):.1f} points")
    print(f"{sum(one.seconds for one in found) / 60:.1f} minutes of a core")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)

"""The first model that a person tries: classes by the sign of x0 · x1, a host of linear layers, one slot.

    python benchmarks/signs.py                      # the shipped controller: widths 8 to 64, three seeds, rents 0 and 5
    python benchmarks/signs.py --controller heuristic --rents 5
    python benchmarks/signs.py --free-removals      # a learned policy may remove what clearly pays (agent/removals.py)

No linear network separates the classes, and on hosts this small one seed is many times the host: at a rent of 0 it must
be kept, and at a rent of 5 most are worth less than they cost. Minutes on one core; nothing is kept.
"""

from __future__ import annotations

import os
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import tyro
from torch import nn

import esper
from esper.agent import policies
from esper.agent.shipped import DEFAULT_CONTROLLER
from page_text import table

WIDTHS = (8, 16, 32, 48, 64)
SEPARATED = 90.0
"""Percent of validation accuracy that counts as having learnt it; without growth it is about 50."""


def run(controller: str, rent: float, width: int, seed: int) -> tuple[float, str]:
    """Validation accuracy, and what became of the seeds."""
    torch.manual_seed(seed)
    x = torch.randn(3000, 2)
    y = (x[:, 0] * x[:, 1] > 0).long()
    host = nn.Sequential(nn.Linear(2, width), nn.Linear(width, 2))
    grown = esper.grow(
        host,
        (x[:2000], y[:2000]),
        (x[2000:], y[2000:]),
        slots=["0"],
        controller=controller,
        epochs=20,
        rent=rent,
        seed=seed,
        device="cpu",
    )
    fates = [f"{story.blueprint} {story.fate.name.lower()}" for story in grown.history.seeds()]
    return grown.validation.accuracy, ", ".join(fates) or "nothing planted"


def main(
    controller: str = DEFAULT_CONTROLLER,
    rents: tuple[float, ...] = (0.0, 5.0),
    seeds: int = 3,
    free_removals: bool = False,
) -> int:
    torch.set_num_threads(1)
    if free_removals:
        policies.without_costly_removals = lambda masks, world: masks  # type: ignore[assignment]
    warnings.simplefilter("ignore", esper.GrowthWarning)
    for rent in rents:
        rows, learnt = [], 0
        for width in WIDTHS:
            for seed in range(seeds):
                accuracy, fates = run(controller, rent, width, seed)
                learnt += accuracy > SEPARATED
                rows.append([str(width), str(seed), f"{accuracy:.1f}", fates])
                print(f"rent {rent:g}, width {width}, seed {seed}: {accuracy:.1f} %, {fates}", flush=True)
        print("\n".join(table(["width", "seed", "accuracy", "seeds"], rows)))
        print(f"{controller}, rent {rent:g}: above {SEPARATED:g} % in {learnt} of {len(rows)} runs\n", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(tyro.cli(main, description=__doc__))

"""Do the stacked and the per-network engine judge controllers alike? Both play the same held-out draws.

Prints, for each controller, the mean score by each engine and their paired difference with a 95 % interval. Engines
that differ by rounding alone have differences around 0.

    python benchmarks/stacked.py --task mixed --controllers none,heuristic,small --episodes 48
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from esper.config import EngineName
from esper.tasks.draws import comparison_draws
from esper.tasks.family import Family
from esper.training.comparison import compare
from esper.training.engines import per_network
from esper.training.statistics import Estimate, bootstrap, mean, paired


@dataclass(frozen=True, slots=True)
class Agreement:
    """One controller under both engines."""

    controller: str
    stacked: float
    """Mean score."""
    plain: float
    difference: Estimate
    """Stacked minus per-network, paired by draw, of the score."""
    accuracy: Estimate
    """The same of the test accuracy."""
    seconds: tuple[float, float]
    """Of all episodes of the comparison: stacked, per-network."""

    @property
    def within_noise(self) -> bool:
        low, high = self.difference.low, self.difference.high
        return low is not None and high is not None and low <= 0.0 <= high

    def __str__(self) -> str:
        score, accuracy = _said(self.difference), _said(self.accuracy)
        return f"{self.controller:14s}{self.stacked:9.2f}{self.plain:13.2f}   {score:26s}{accuracy}"


def _said(found: Estimate) -> str:
    between = "" if found.low is None else f" ({found.low:+.2f} to {found.high:+.2f})"
    return f"{found.value:+.2f}{between}"


def agreement(
    task: Family | str,
    controllers: Mapping[str, str],
    numbers: Sequence[int],
    *,
    device: torch.device | str = "cpu",
    workers: int = 1,
) -> list[Agreement]:
    """What both engines make of the same held-out draws."""
    engines: tuple[EngineName, EngineName] = ("stacked", per_network(device))
    found = [
        compare(task, controllers, numbers, controls=False, workers=workers, device=device, engine=engine)
        for engine in engines
    ]
    rows = []
    for name in controllers:
        ours, theirs = (one.controllers[name] for one in found)
        scores = [{n: r.score for n, r in side.items()} for side in (ours, theirs)]
        tests = [{n: r.test_accuracy for n, r in side.items()} for side in (ours, theirs)]
        rows.append(
            Agreement(
                name,
                *(float(np.mean(list(side.values()))) for side in scores),
                bootstrap(paired(*scores), mean),
                bootstrap(paired(*tests), mean),
                (found[0].seconds, found[1].seconds),
            )
        )
    return rows


def show(rows: Sequence[Agreement]) -> None:
    print(f"{'controller':14s}{'stacked':>9s}{'per network':>13s}   {'difference of score':26s}of test accuracy")
    for row in rows:
        print(row)
    stacked, plain = rows[0].seconds
    print(f"seconds: stacked {stacked:.0f}, per network {plain:.0f} (×{plain / stacked:.1f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="mixed")
    parser.add_argument("--controllers", default="none,heuristic,small")
    parser.add_argument("--episodes", type=int, default=48)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    names = {name: name for name in given.controllers.split(",")}
    draws = comparison_draws(given.episodes)
    show(agreement(given.task, names, draws, device=given.device, workers=given.workers))


if __name__ == "__main__":
    main()

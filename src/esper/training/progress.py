"""Did it learn? The returns of the last fifth of a run against those of the first, on the same problems."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from esper.telemetry.records import TRAIN
from esper.telemetry.store import open_readonly
from esper.training.statistics import PairedTest, paired, paired_t_test

PARTS_OF_A_RUN = 5
"""A run is cut into this many parts, of which the first and the last are compared."""


@dataclass(frozen=True, slots=True)
class Progress:
    """First part of a run against its last."""

    first: float
    """Mean return of the episodes of the first part."""
    last: float
    updates: int
    """Of each part."""
    test: PairedTest | None
    """Paired on draws; None when fewer than two problems came in both parts."""

    def __str__(self) -> str:
        part = f"the last {self.updates} update{'s' * (self.updates != 1)}"
        said = f"Return in {part}: {self.last:.1f}; in the first: {self.first:.1f}."
        if self.test is None:
            return f"{said} The problems were not the same ones, so there is no paired test."
        p = "p < 0.0001" if self.test.p < 1e-4 else f"p = {self.test.p:.2g}"
        return (
            f"{said} Paired on the {self.test.count} problems of both: {self.test.mean:+.1f} "
            f"(t = {self.test.t:.1f}, {p})."
        )


def progress(episodes: Iterable[tuple[int, int, float]]) -> Progress | None:
    """From the (update, draw, return) of every training episode. None for a run of one update.

    A draw that came several times in one part counts once, with its mean: the unit of the test is the problem.
    """
    by_update: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)
    for update, draw, episode_return in episodes:
        by_update[update].append((draw, episode_return))
    updates = sorted(by_update)
    if len(updates) < 2:
        return None
    share = max(1, len(updates) // PARTS_OF_A_RUN)
    first, last = (
        [pair for update in part for pair in by_update[update]] for part in (updates[:share], updates[-share:])
    )
    differences = paired(_by_draw(last), _by_draw(first))
    return Progress(
        fmean(value for _, value in first), fmean(value for _, value in last), share, paired_t_test(differences)
    )


def _by_draw(episodes: Iterable[tuple[int, float]]) -> dict[int, float]:
    returns: defaultdict[int, list[float]] = defaultdict(list)
    for draw, value in episodes:
        returns[draw].append(value)
    return {draw: fmean(values) for draw, values in returns.items()}


def progress_of(store: Path) -> Progress | None:
    """Of a recorded run, all its sessions together."""
    with open_readonly(store) as connection:
        rows = connection.execute("SELECT update_number, draw, episode_return FROM episodes WHERE arm = ?", (TRAIN,))
        return progress(rows.fetchall())

"""Numbers over updates, for charts: at most some hundred points, however long the run was."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from esper.actions import HEAD_NAMES
from esper.dashboard.overview import last_update, series
from esper.dashboard.source import Source

POINTS = 400
"""A chart has no more pixels to show."""
BANDS = 200
"""Updates whose episodes are read for the spread of scores."""

PLAIN = (
    "episode/score",
    "episode/return",
    "episode/accuracy",
    "episode/growth",
    "episode/germinated",
    "episode/fossilized",
    "episode/pruned",
    "episode/governed",
    "entropy",
    "kl",
    "kl_max",
    "clip_fraction",
    "explained_variance",
    "gradient_norm",
    "value_gradient_norm",
    "trunk_gradient_norm",
    "steps_per_second",
    "policy_loss",
    "value_loss",
    *(f"{head}/{what}" for head in HEAD_NAMES for what in ("entropy", "kl", "gradient_norm")),
)
BY_PREFIX = ("reward/", "score/", "actions/")


def curves(source: Source) -> dict[str, Any]:
    """Series over the same updates; where there are too many, each point is the mean of `every` updates."""
    with source.reading() as connection:
        last = last_update(connection)
        every = max(1, -(-last // POINTS))
        names = [*PLAIN, *_named(connection)]
        found = {name: series(connection, name) for name in names}
        if last and not any(name.startswith("reward/") for name in found):
            found |= _terms_of_episodes(connection, last)
        first = min((min(one) for one in found.values() if one), default=1)
        buckets = range(first, last + 1, every)
        columns = {name: _thinned(one, buckets, every) for name, one in found.items()}
        return {
            "updates": [min(start + every - 1, last) for start in buckets],
            "every": every,
            "series": {name: column for name, column in columns.items() if any(v is not None for v in column)},
            "evaluation": _evaluation(connection),
            "band": _band(connection, last),
            "levels": levels(source.folder),
        }


def _named(connection: sqlite3.Connection) -> list[str]:
    """Metrics whose names depend on the task; each beginning is one walk of the primary key."""
    found: list[str] = []
    for prefix in BY_PREFIX:
        rows = connection.execute(
            "SELECT DISTINCT name FROM metrics WHERE name >= ? AND name < ?", (prefix, prefix[:-1] + "0")
        )
        found += [row["name"] for row in rows]
    return found


def _thinned(values: Mapping[int, float | None], buckets: range, every: int) -> list[float | None]:
    """The mean of each bucket; None where nothing was measured."""
    if every == 1:
        return [_short(values.get(update)) for update in buckets]
    found: list[float | None] = []
    for start in buckets:
        inside = [v for u in range(start, start + every) if (v := values.get(u)) is not None]
        found.append(_short(fmean(inside)) if inside else None)
    return found


def _short(value: float | None) -> float | None:
    """Five digits: what a chart can show, in a third of the bytes."""
    return None if value is None else float(f"{value:.5g}")


def _terms_of_episodes(connection: sqlite3.Connection, last: int) -> dict[str, dict[int, float | None]]:
    """Of stores that have no metric for each term: the mean over the episodes of some updates."""
    found: dict[str, dict[int, float | None]] = {}
    for update in range(1, last + 1, max(1, last // BANDS)):
        rows = connection.execute(
            "SELECT term, avg(value) AS mean FROM episode_rewards WHERE update_number = ? AND arm = 'train' "
            "GROUP BY term",
            (update,),
        )
        for row in rows:
            found.setdefault(f"reward/{row['term']}", {})[update] = row["mean"]
    return found


def _band(connection: sqlite3.Connection, last: int) -> dict[str, list[float]]:
    """How scores of the training episodes are spread: deciles 1, 5 and 9 of some updates."""
    found: dict[str, list[float]] = {"updates": [], "low": [], "middle": [], "high": []}
    for update in range(1, last + 1, max(1, -(-last // BANDS))):
        rows = connection.execute(
            "SELECT score FROM episodes WHERE update_number = ? AND arm = 'train' AND score IS NOT NULL", (update,)
        )
        scores = sorted(row["score"] for row in rows)
        if scores:
            found["updates"].append(update)
            for name, share in (("low", 0.1), ("middle", 0.5), ("high", 0.9)):
                found[name].append(float(f"{_quantile(scores, share):.5g}"))
    return found


def _quantile(values: Sequence[float], share: float) -> float:
    """Of sorted values, by straight lines between them."""
    at = share * (len(values) - 1)
    low = int(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (at - low) * (values[high] - values[low])


def _evaluation(connection: sqlite3.Connection) -> dict[str, list[float]]:
    found = {u: v for u, v in series(connection, "evaluation/score").items() if v is not None}
    return {"updates": list(found), "scores": list(found.values())}


# -- levels of the baselines -------------------------------------------------------------------------------------------


def levels(folder: Path) -> list[dict[str, Any]]:
    """Scores of controllers on held-out problems, from the newest comparison in the folder; empty without one."""
    written = sorted(folder.glob("comparison*/comparison.json"), key=_age, reverse=True)
    for path in written:
        try:
            rows = json.loads(path.read_text("utf-8"))["rows"]
            return [{"name": str(row["name"]), **estimate(row["score"])} for row in rows if not row["is_control"]]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # being written, or damaged: the one before it is better than none
    return []


def estimate(score: Mapping[str, Any]) -> dict[str, Any]:
    return {"score": score["value"], "low": score["low"], "high": score["high"]}


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0

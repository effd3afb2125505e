"""The report of a comparison of controllers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from esper.dashboard.curves import estimate
from esper.dashboard.drawings import intervals, known
from esper.dashboard.markup import Child, Html, joined, number, table, tag
from esper.dashboard.report_parts import interval, page, section
from esper.telemetry.store import StoreError


def of_comparison(file: Path) -> Html:
    try:
        comparison = json.loads(file.read_text("utf-8"))
        rows = [{**row, **estimate(row["score"])} for row in comparison["rows"]]
        return _comparison(file, comparison, rows)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{file} is not a comparison that `esper compare` wrote ({error!r:.100})") from error


def _comparison(file: Path, comparison: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Html:
    players = [row for row in rows if not row["is_control"] and known(row["score"])]
    count = len(comparison["common_draws"])
    best = max(players, key=lambda row: row["score"], default=None)
    lead = "No problem was completed by every controller." if best is None else _comparison_story(best, players, count)
    cells = [
        (
            row["name"] + (" *" if row["on_front"] else ""),
            number(row["test_accuracy"]["value"]),
            f"×{row['parameters_ratio']:.2f}",
            number(row["score"]),
            interval(row["low"], row["high"]),
            _against(row["vs_none"]),
            _against(row["vs_best_rule"]),
            f"{row['seeds_kept']:.1f}",
            row["governed"],
        )
        for row in rows
    ]
    headings = [
        "",
        "test accuracy",
        "size",
        "score",
        "95 % interval",
        "vs none",
        "vs the best rule",
        "seeds kept",
        "governed",
    ]
    notes = (
        "Intervals: bootstrap over problems, 95 %. vs: difference of score, paired by problem. *: no other row is both "
        f"smaller and more accurate. The best rule is {comparison['best_rule'] or 'not known'}."
    )
    return page(
        f"Comparison on {comparison['task']}",
        f"{count} held-out problems, the same for all; {file}",
        tag("p", {"class": "lead"}, lead),
        section("Scores", intervals(rows, "Scores with 95 % intervals")),
        section("Table", table(headings, cells, range(1, 9)), tag("p", {"class": "sub"}, notes)),
        section("Every problem", _problems(comparison)),
    )


def _comparison_story(best: Mapping[str, Any], players: Sequence[Mapping[str, Any]], count: int) -> str:
    said = f"On {count} problems that nobody trained on, {best['name']} has the best mean score, {best['score']:.1f}"
    others = [row for row in players if row["name"] != best["name"]]
    if not others:
        return f"{said}."
    second = max(others, key=lambda row: row["score"])
    clear = best["low"] is not None and second["high"] is not None and best["low"] > second["high"]
    word = "clearly ahead of" if clear else "ahead of (with overlapping intervals)"
    size = f"its networks have ×{best['parameters_ratio']:.2f} the parameters of the host"
    return f"{said}, {word} {second['name']} with {second['score']:.1f}; {size}."


def _against(estimate: Mapping[str, Any] | None) -> Child:
    if estimate is None:
        return "–"
    return joined((number(estimate["value"], "+.1f"), " (", interval(estimate["low"], estimate["high"]), ")"))


def _problems(comparison: Mapping[str, Any]) -> Html:
    names = list(comparison["episodes"])
    by_draw: dict[int, dict[str, Any]] = {}
    for name in names:
        for one in comparison["episodes"][name]:
            by_draw.setdefault(one["number"], {})[name] = one
    rows = []
    for draw, own in sorted(by_draw.items()):
        kind = next(iter(own.values()))["facts"].get("kind", "")
        rows.append((draw, kind, *(number(own[name]["score"]) if name in own else "–" for name in names)))
    return table(["problem", "kind", *names], rows, (0, *range(2, 2 + len(names))))

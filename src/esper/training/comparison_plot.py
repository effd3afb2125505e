"""The picture of a comparison: accuracy against size with the Pareto front, and the scores. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esper.env.reward.config import RENT_RATE
from esper.training.comparison import Comparison, Row
from esper.training.plot import _pyplot as pyplot
from esper.training.statistics import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#2b4c5b", "#c0504d", "#3d8c95", "#e09f3e", "#7b5ea7", "#5a8f3c", "#b5487a", "#4a6fa5")
_STATIC, _FRONT, _LINES = "#8a8a8a", "#222222", "#cccccc"


def plot_comparison(path: Path, found: Comparison, rows: Sequence[Row]) -> None:
    """Left: what accuracy costs in parameters. Right: the score that all are judged by, with its interval."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(12.5, 1.9 + max(3.2, 0.42 * len(rows))), width_ratios=[1.25, 1.0], layout="constrained"
    )
    colours = _colours(rows)
    _draw_trade(left, rows, colours)
    _draw_scores(right, rows, colours)
    count = len(found.common)
    figure.suptitle(
        f"{found.family}: {count} held-out draw{'s' * (count != 1)}, means with 95 % intervals", x=0.01, ha="left"
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _colours(rows: Sequence[Row]) -> dict[str, str]:
    controllers = [row.name for row in rows if not row.is_control]
    chosen = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(controllers)}
    for row in rows:
        if row.is_control:
            chosen[row.name] = chosen.get(row.name.partition(":")[0], _STATIC)
    return chosen


def _draw_trade(axes: Axes, rows: Sequence[Row], colours: dict[str, str]) -> None:
    for row in rows:
        axes.errorbar(
            row.parameters_ratio,
            row.test_accuracy.value,
            yerr=_arms(row.test_accuracy),
            fmt=_marker(row),
            color=colours[row.name],
            markerfacecolor="white" if row.is_control else colours[row.name],
            markersize=8,
            elinewidth=1.0,
            alpha=0.9,
            label=row.name,
        )
    front = sorted((row for row in rows if row.on_front), key=lambda row: row.parameters_ratio)
    axes.plot(
        [row.parameters_ratio for row in front],
        [row.test_accuracy.value for row in front],
        color=_FRONT,
        linewidth=1.2,
        linestyle="--",
        zorder=0,
        label="Pareto front",
    )
    _draw_equal_scores(axes)
    axes.set_xlabel("parameters kept (× host)")
    axes.set_ylabel("test accuracy (%)")
    axes.set_title("accuracy against size; grey: equal score", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="best")


def _draw_equal_scores(axes: Axes) -> None:
    """Lines along which an extra parameter earns exactly its rent: the higher the line, the better the score."""
    (x0, x1), (y0, y1) = axes.get_xlim(), axes.get_ylim()
    step = max(1, round((y1 - y0) / 6))
    for points in range(int(y0) - int(RENT_RATE * x1), int(y1) + step, step):
        ends = [points + RENT_RATE * (x - 1.0) for x in (x0, x1)]
        axes.plot((x0, x1), ends, color=_LINES, linewidth=0.6, zorder=-1)
    axes.set_xlim(x0, x1)
    axes.set_ylim(y0, y1)


def _draw_scores(axes: Axes, rows: Sequence[Row], colours: dict[str, str]) -> None:
    for place, row in enumerate(rows):
        axes.errorbar(
            row.score.value,
            place,
            xerr=_arms(row.score),
            fmt=_marker(row),
            color=colours[row.name],
            markerfacecolor="white" if row.is_control else colours[row.name],
            markersize=8,
            capsize=3,
        )
        axes.plot(row.score_iqm.value, place, marker="|", markersize=14, color=colours[row.name])
    baseline = next((row for row in rows if row.name in ("none", "static ×1")), None)
    if baseline is not None:
        axes.axvline(baseline.score.value, color=_LINES, linewidth=1.0, zorder=0)
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(f"score: test accuracy − {RENT_RATE:g} points per extra host-size of parameters")
    axes.set_title("score; ∣ is the inter-quartile mean", loc="left", fontsize=10)
    axes.grid(axis="x", alpha=0.25)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _marker(row: Row) -> str:
    return "o" if not row.is_control else "s" if row.name.startswith("static") else "D"


def _arms(estimate: Estimate) -> Any:
    """Error bars; none where there is no interval."""
    if estimate.low is None or estimate.high is None:
        return None
    return [[max(0.0, estimate.value - estimate.low)], [max(0.0, estimate.high - estimate.value)]]

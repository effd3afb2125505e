"""The picture of a comparison: accuracy against size with the Pareto front, and the scores. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esper.env.rent import RENT_RATE
from esper.training.comparison import Comparison, Row
from esper.training.plot import pyplot
from esper.training.statistics import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#2b4c5b", "#c0504d", "#3d8c95", "#e09f3e", "#7b5ea7", "#5a8f3c", "#b5487a", "#4a6fa5")
_STATIC, _FRONT, _LINES = "#8a8a8a", "#222222", "#dddddd"
_MARKERS = {"static": "s", "equal epochs": "D", "equal FLOPs": "^"}


def plot_comparison(path: Path, found: Comparison, rows: Sequence[Row]) -> None:
    """Left: what accuracy costs in parameters. Right: the score that all are judged by, with its interval."""
    plt = pyplot()
    height = 1.9 + max(3.2, 0.36 * len(rows))
    figure, (left, right) = plt.subplots(1, 2, figsize=(12.5, height), width_ratios=[1.2, 1.0], layout="constrained")
    colours = _colours(rows)
    _draw_trade(left, rows, colours)
    _draw_scores(right, rows, colours)
    count = len(found.common)
    title = f"{found.family}: {count} held-out draw{'s' * (count != 1)}, means with 95 % intervals"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _colours(rows: Sequence[Row]) -> dict[str, str]:
    """A colour per controller; networks from scratch have their controller's, other static ones are grey."""
    controllers = [row.name for row in rows if not row.is_control]
    chosen = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(controllers)}
    for row in rows:
        if row.is_control:
            chosen[row.name] = chosen.get(row.name.partition(":")[0], _STATIC)
    return chosen


def _draw_trade(axes: Axes, rows: Sequence[Row], colours: dict[str, str]) -> None:
    axes.margins(x=0.2)  # room for the name of the rightmost point
    for row in rows:
        point = (row.parameters_ratio, row.test_accuracy.value)
        axes.errorbar(*point, yerr=_arms(row.test_accuracy), **_style(row, colours))
        if not row.is_control:
            axes.annotate(
                row.name, point, xytext=(8, 5), textcoords="offset points", color=colours[row.name], weight="bold"
            )
    static = [row for row in rows if row.name == "none" or row.name.startswith("static")]
    _join(axes, static, color=_STATIC, linewidth=1.0, linestyle=":", label="static widths")
    front = [row for row in rows if row.on_front]
    _join(axes, front, color=_FRONT, linewidth=1.2, linestyle="--", label="Pareto front")
    for kind, marker in _MARKERS.items():
        if kind != "static" and any(kind in row.name for row in rows):
            axes.plot(
                [], [], marker, color=_STATIC, markerfacecolor="white", label=f"final network from scratch, {kind}"
            )
    _draw_equal_scores(axes)
    axes.set_xlabel("parameters (× host)")
    axes.set_ylabel("test accuracy (%)")
    axes.set_title("Accuracy against size", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.11))  # hides no bar


def _join(axes: Axes, rows: Sequence[Row], **style: Any) -> None:
    ordered = sorted(rows, key=lambda row: row.parameters_ratio)
    if len(ordered) > 1:
        points = [row.parameters_ratio for row in ordered], [row.test_accuracy.value for row in ordered]
        axes.plot(*points, zorder=0, **style)


def _draw_equal_scores(axes: Axes) -> None:
    """Lines along which an extra parameter earns exactly its rent: the higher the line, the better the score."""
    (x0, x1), (y0, y1) = axes.get_xlim(), axes.get_ylim()
    highest, lowest = y1 - RENT_RATE * (x0 - 1.0), y0 - RENT_RATE * (x1 - 1.0)
    step = max(1.0, (highest - lowest) / 10)
    for i in range(11):
        ends = [lowest + i * step + RENT_RATE * (x - 1.0) for x in (x0, x1)]
        axes.plot((x0, x1), ends, color=_LINES, linewidth=0.7, zorder=-1, label="equal score" if i == 0 else None)
    axes.set_xlim(x0, x1)
    axes.set_ylim(y0, y1)


def _draw_scores(axes: Axes, rows: Sequence[Row], colours: dict[str, str]) -> None:
    for place, row in enumerate(rows):
        axes.errorbar(row.score.value, place, xerr=_arms(row.score), capsize=3, **_style(row, colours))
        axes.plot(row.score_iqm.value, place, marker="|", markersize=15, color=colours[row.name])
    baseline = next((row for row in rows if row.name in ("none", "static ×1")), None)
    if baseline is not None:
        axes.axvline(baseline.score.value, color=_STATIC, linewidth=0.8, linestyle=":", zorder=0)
    axes.set_yticks(
        range(len(rows)), [row.name.replace(": from scratch,", " from scratch,") for row in rows], fontsize=9
    )
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(f"accuracy − {RENT_RATE:g} points per extra host-size of parameters")
    axes.set_title("Score; the tick | is the inter-quartile mean", loc="left", fontsize=10)
    axes.grid(axis="x", alpha=0.25)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _style(row: Row, colours: dict[str, str]) -> dict[str, Any]:
    marker = next((marker for kind, marker in _MARKERS.items() if row.is_control and kind in row.name), "o")
    colour = colours[row.name]
    return {
        "fmt": marker,
        "color": colour,
        "markerfacecolor": "white" if row.is_control else colour,
        "markersize": 6 if row.is_control else 8,
        "elinewidth": 1.0,
    }


def _arms(estimate: Estimate) -> Any:
    """Error bars; none where there is no interval."""
    if estimate.low is None or estimate.high is None:
        return None
    return [[max(0.0, estimate.value - estimate.low)], [max(0.0, estimate.high - estimate.value)]]

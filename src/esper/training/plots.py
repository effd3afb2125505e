"""The plots that commands draw: one run (`esper grow`), and a comparison of controllers (`esper compare`).

Needs matplotlib (`pip install esper[plot]`), which is imported when something is drawn.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esper.lifecycle import Stage

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from esper.training.comparison import Comparison, ComparisonRow
    from esper.training.own.history import History
    from esper.training.statistics import Estimate

STAGE_COLOURS = {
    Stage.TRAINING: "#f2c14e",
    Stage.BLENDING: "#7fb7be",
    Stage.HOLDING: "#3d8c95",
    Stage.FOSSILIZED: "#2b4c5b",
    Stage.EMBARGOED: "#dddddd",
}
COLOURS = ("#2b4c5b", "#c0504d", "#3d8c95", "#e09f3e", "#7b5ea7", "#5a8f3c", "#b5487a", "#4a6fa5")
"""Of controllers; a grown network has the first, the host that is not grown the second."""
_STATIC, _FRONT, _EQUAL_SCORE = "#8a8a8a", "#222222", "#dddddd"
_MARKERS = {"static": "s", "equal epochs": "D", "equal FLOPs": "^"}


class PlotUnavailableError(ImportError):
    """matplotlib is not installed."""


# -- for every plot, those of benchmarks/ included ---------------------------------------------------------------------


@contextmanager
def drawing(path: Path | None, rows: int = 1, columns: int = 1, **options: Any) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes, which are written to the file at the end, if there is one."""
    os.environ.setdefault("MPLBACKEND", "Agg")  # no screen needed to write a file
    try:
        import matplotlib.pyplot as plt  # noqa: PLC0415  (optional dependency)
    except ImportError as error:
        raise PlotUnavailableError("the plot needs matplotlib: pip install 'esper[plot]'") from error
    figure, axes = plt.subplots(rows, columns, layout="constrained", **options)
    try:
        yield figure, axes
        if path is not None:
            figure.savefig(path, dpi=130)
    finally:
        plt.close(figure)


def drawn(plot: Callable[..., Any], *arguments: Any) -> str:
    """Draw it if that can be done; else why not."""
    try:
        plot(*arguments)
    except PlotUnavailableError as error:
        return str(error)
    return ""


def hide_spines(axes: Axes, *sides: str) -> None:
    for side in sides or ("top", "right"):
        axes.spines[side].set_visible(False)


def error_bar(estimate: Estimate) -> Any:
    """The lengths below and above the value; None where there is no interval."""
    if estimate.low is None or estimate.high is None:
        return None
    return [[max(0.0, estimate.value - estimate.low)], [max(0.0, estimate.high - estimate.value)]]


# -- one run -----------------------------------------------------------------------------------------------------------


def plot_history(path: Path | None, history: History, title: str = "") -> Any:
    """Accuracy over epochs, above one band per slot that shows its seeds' stages; gives the figure."""
    control = history.control
    count = len(history.slots)
    size: dict[str, Any] = {"figsize": (9, 3.6 + 0.42 * count), "height_ratios": [3.4, 0.42 * count + 0.3]}
    with drawing(path, 2, sharex=True, **size) as (figure, (top, bottom)):
        accuracies = [record.measured.accuracy for record in history.records]
        if control:
            label = f"same host, not grown ({control[-1]:.1f} %)"
            top.plot(range(1, len(control) + 1), control, color=COLOURS[1], label=label)
        label = f"grown ({history.kept_records[-1].measured.accuracy:.1f} %)"
        top.plot(range(1, len(accuracies) + 1), accuracies, color=COLOURS[0], linewidth=2.2, label=label)
        for story in history.seeds():
            top.axvline(story.born + 1, color="#999999", linewidth=0.8, linestyle=":")
        if history.kept is not None:
            for axes in (top, bottom):
                axes.axvspan(history.kept + 0.5, len(accuracies) + 0.5, color="#000000", alpha=0.06, linewidth=0)
            top.plot([], [], color="#000000", alpha=0.12, linewidth=8, label=f"after the best epoch, {history.kept}")
        top.set_ylabel(f"validation {history.metric} (%)")
        top.set_title(title, loc="left")
        top.legend(loc="best", framealpha=0.8, edgecolor="none")
        top.grid(alpha=0.25)
        _draw_stages(bottom, history)
        bottom.xaxis.get_major_locator().set_params(integer=True)
        bottom.set(xlabel="epoch", xlim=(0.5, len(accuracies) + 0.5))
    return figure


def _draw_stages(axes: Axes, history: History) -> None:
    from matplotlib.patches import Patch  # noqa: PLC0415  (optional dependency)

    for row in range(len(history.slots)):
        start = 0.5
        for stage, same in groupby(record.stages[row] for record in history.records):
            length = len(list(same))
            if stage in STAGE_COLOURS:
                axes.broken_barh([(start, length)], (row - 0.36, 0.72), color=STAGE_COLOURS[stage])
            start += length
    for story in history.seeds():
        row = history.slots.index(story.slot)
        axes.text(story.born + 0.7, row, story.blueprint, va="center", fontsize=8, color="black", clip_on=True)
    axes.set_yticks(range(len(history.slots)), history.slots)
    axes.set_ylim(len(history.slots) - 0.5, -0.5)
    hide_spines(axes)
    handles = [Patch(color=colour, label=stage.name.lower()) for stage, colour in STAGE_COLOURS.items()]
    axes.legend(handles=handles, ncols=len(handles), loc="upper center", bbox_to_anchor=(0.5, -0.55), frameon=False)


# -- a comparison ------------------------------------------------------------------------------------------------------


def plot_comparison(path: Path, found: Comparison, rows: Sequence[ComparisonRow]) -> None:
    """Left: what accuracy costs in parameters. Right: the score that all are judged by, with its interval."""
    height = 1.9 + max(3.2, 0.36 * len(rows))
    with drawing(path, 1, 2, figsize=(12.5, height), width_ratios=[1.2, 1.0]) as (figure, (left, right)):
        styles = _styles(rows)
        _draw_sizes(left, rows, styles, found.rent)
        _draw_scores(right, rows, styles, found.rent)
        count = len(found.common)
        title = f"{found.family}: {count} held-out draw{'s' * (count != 1)}, means with 95 % intervals"
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)


def _styles(rows: Sequence[ComparisonRow]) -> dict[str, dict[str, Any]]:
    """A colour per controller; networks from scratch have their controller's, other static ones are grey."""
    controllers = [row.name for row in rows if not row.is_control]
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(controllers)}
    styles = {}
    for row in rows:
        colour = colours.get(row.name.partition(":")[0] if row.is_control else row.name, _STATIC)
        marker = next((marker for kind, marker in _MARKERS.items() if row.is_control and kind in row.name), "o")
        face, size = ("white", 6) if row.is_control else (colour, 8)
        styles[row.name] = {"fmt": marker, "color": colour, "markerfacecolor": face, "markersize": size}
    return styles


def _draw_sizes(axes: Axes, rows: Sequence[ComparisonRow], styles: dict[str, dict[str, Any]], rent: float) -> None:
    axes.margins(x=0.2)  # room for the name of the rightmost point
    for row in rows:
        point, style = (row.parameters_ratio, row.test_accuracy.value), styles[row.name]
        axes.errorbar(*point, yerr=error_bar(row.test_accuracy), elinewidth=1.0, **style)
        if not row.is_control:
            offset: dict[str, Any] = {"xytext": (8, 5), "textcoords": "offset points"}
            axes.annotate(row.name, point, color=style["color"], weight="bold", **offset)
    static = [row for row in rows if row.name == "none" or row.name.startswith("static")]
    _join(axes, static, color=_STATIC, linewidth=1.0, linestyle=":", label="static widths")
    front = [row for row in rows if row.on_front]
    _join(axes, front, color=_FRONT, linewidth=1.2, linestyle="--", label="Pareto front")
    for kind, marker in _MARKERS.items():
        if kind != "static" and any(kind in row.name for row in rows):
            label = f"final network from scratch, {kind}"
            axes.plot([], [], marker, color=_STATIC, markerfacecolor="white", label=label)
    _draw_equal_scores(axes, rent)
    axes.set(xlabel="parameters (× host)", ylabel="test accuracy (%)")
    axes.set_title("Accuracy against size", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.11))  # hides no bar


def _join(axes: Axes, rows: Sequence[ComparisonRow], **style: Any) -> None:
    ordered = sorted(rows, key=lambda row: row.parameters_ratio)
    if len(ordered) > 1:
        points = [row.parameters_ratio for row in ordered], [row.test_accuracy.value for row in ordered]
        axes.plot(*points, zorder=0, **style)


def _draw_equal_scores(axes: Axes, rent: float) -> None:
    """Lines along which an extra parameter earns exactly its rent: the higher the line, the better the score."""
    (x0, x1), (y0, y1) = axes.get_xlim(), axes.get_ylim()
    highest, lowest = y1 - rent * (x0 - 1.0), y0 - rent * (x1 - 1.0)
    step = max(1.0, (highest - lowest) / 10)
    for i in range(11):
        ends = [lowest + i * step + rent * (x - 1.0) for x in (x0, x1)]
        label = "equal score" if i == 0 else None
        axes.plot((x0, x1), ends, color=_EQUAL_SCORE, linewidth=0.7, zorder=-1, label=label)
    axes.set(xlim=(x0, x1), ylim=(y0, y1))


def _draw_scores(axes: Axes, rows: Sequence[ComparisonRow], styles: dict[str, dict[str, Any]], rent: float) -> None:
    for place, row in enumerate(rows):
        style = styles[row.name]
        axes.errorbar(row.score.value, place, xerr=error_bar(row.score), capsize=3, elinewidth=1.0, **style)
        axes.plot(row.score_iqm.value, place, marker="|", markersize=15, color=style["color"])
    baseline = next((row for row in rows if row.name in ("none", "static ×1")), None)
    if baseline is not None:
        axes.axvline(baseline.score.value, color=_STATIC, linewidth=0.8, linestyle=":", zorder=0)
    names = [row.name.replace(": from scratch,", " from scratch,") for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=9)
    axes.tick_params(axis="y", length=0)
    what = f"accuracy − {rent:g} points per extra host-size of parameters"
    axes.set(xlabel=what, ylim=(len(rows) - 0.5, -0.5))
    axes.set_title("Score; the tick | is the inter-quartile mean", loc="left", fontsize=10)
    axes.grid(axis="x", alpha=0.25)
    hide_spines(axes, "top", "right", "left")

"""The pictures of docs/results.md. Colours differ in lightness too, and no meaning rests on colour alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from esper.training.plot import pyplot
from esper.training.statistics import Estimate
from results.figures import Content, Harm, Line, answers, kind_difference, kinds
from results.kept import LEARNED
from results.wording import plain, signed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, STRONG, QUIET, WARM = "#2b4c5b", "#0072b2", "#8a8a8a", "#d55e00"
"""From the colours that Okabe and Ito chose for colour-blind readers."""


def draw_scores(path: Path, rows: Sequence[Line], draws: int, rent: float) -> None:
    """Mean scores with their intervals: the learned controller, its rivals, static networks."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8.6, 0.9 + 0.42 * len(rows)), layout="constrained")
    for place, row in enumerate(rows):
        colour = STRONG if row.label == LEARNED else QUIET if _is_static(row.label) else INK
        style = {"color": colour, "markerfacecolor": "white" if _is_static(row.label) else colour}
        axes.errorbar(row.score.value, place, xerr=_arms(row.score), fmt="o", markersize=8, capsize=3, **style)
        axes.annotate(
            f"{row.score.value:.1f}",
            (row.score.high if row.score.high is not None else row.score.value, place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            weight="bold" if row.label == LEARNED else "normal",
        )
    learned = next(row for row in rows if row.label == LEARNED)
    axes.axvline(learned.score.value, color=STRONG, linewidth=0.8, linestyle=":", zorder=0)
    axes.set_yticks(range(len(rows)), [row.label.replace(f"{LEARNED}: from", "its networks from") for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.margins(x=0.08)
    axes.set_xlabel(f"score (points): test accuracy − {rent:g} per extra host-size of parameters")
    axes.set_title(
        f"{draws} held-out problems of mixed, means with 95 % intervals (open: static networks)",
        loc="left",
        fontsize=10,
    )
    _bare(axes)
    axes.grid(axis="x", alpha=0.25)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_kinds(path: Path, content: Content, against: Sequence[str]) -> None:
    """Learned minus each rival, in points of score, by kind of problem: orange where the rival is better."""
    plt = pyplot()
    of, meant = kinds(content), answers(content)
    cells = np.array([[kind_difference(content, rival, numbers) for rival in against] for numbers in of.values()])
    figure, axes = plt.subplots(figsize=(3.9 + 1.15 * len(against), 1.4 + 0.34 * len(of)), layout="constrained")
    limit = max(5.0, float(np.quantile(np.abs(cells), 0.9)))
    image = axes.imshow(cells, cmap="PuOr", vmin=-limit, vmax=limit, aspect="auto")
    for row, values in enumerate(cells):
        for place, value in enumerate(values):
            dark = abs(value) > 0.62 * limit
            axes.text(
                place, row, signed(value), ha="center", va="center", fontsize=8.5, color="white" if dark else "black"
            )
    axes.set_xticks(range(len(against)), [f"minus\n{rival}" for rival in against], fontsize=9)
    axes.xaxis.tick_top()
    axes.set_yticks(range(len(of)), [f"{kind}   (meant: {meant[kind]})" for kind in of], fontsize=8.5)
    axes.tick_params(length=0)
    bar = figure.colorbar(image, ax=axes, shrink=0.5, extend="both")
    bar.set_label("points of score by which learned is better")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_harm(path: Path, found: Harm, seeds: int) -> None:
    """Every draw's difference, in order: how often, and how much, growing cost accuracy."""
    plt = pyplot()
    values = np.sort(list(found.differences.values()))
    figure, axes = plt.subplots(figsize=(8.6, 3.4), layout="constrained")
    low = values < found.limit
    places = np.arange(1, len(values) + 1)
    axes.plot(places[~low], values[~low], "o", color=INK, markersize=5, label="not harmed")
    axes.plot(places[low], values[low], "v", color=WARM, markersize=7, label=f"below {plain(found.limit)} points")
    axes.axhline(0.0, color=QUIET, linewidth=0.8)
    axes.axhline(found.limit, color=WARM, linewidth=0.9, linestyle="--")
    axes.set_yscale("symlog", linthresh=1.0)  # most draws lie near 0 or far above
    ticks = [
        tick for tick in (-50, -10, -5, -1, -0.5, 0, 1, 5, 10, 50) if values.min() - 1 <= tick <= values.max() + 25
    ]
    axes.set_yticks(ticks, [f"{tick:g}".replace("-", "−") for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(min(-1.5, 1.4 * values[0]), max(1.5, 1.5 * values[-1]))
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("held-out problem, in order of the difference")
    axes.set_ylabel("test accuracy: learned − none\n(points, beyond ±1 logarithmic)")
    axes.set_title(f"{len(values)} problems, mean of {seeds} random seeds each", loc="left", fontsize=10)
    axes.legend(frameon=False, loc="upper left")
    axes.grid(axis="y", alpha=0.25)
    _bare(axes)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _is_static(label: str) -> bool:
    return label.startswith(("static ×", f"{LEARNED}:"))


def _bare(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _arms(estimate: Estimate) -> Any:
    """Error bars; none where there is no interval."""
    if estimate.low is None or estimate.high is None:
        return None
    return [[max(0.0, estimate.value - estimate.low)], [max(0.0, estimate.high - estimate.value)]]

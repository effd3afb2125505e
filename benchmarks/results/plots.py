"""The pictures of docs/results.md and docs/behaviour.md. No meaning rests on colour alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.patches import Rectangle

from esper.actions import Op
from esper.lifecycle import Stage
from esper.training.plots import drawing, error_bar, hide_spines
from results.estimates import HARM_LIMIT, Content, answers, difference_over, estimate, kinds
from results.markdown import plain, signed
from results.measure import LEARNED, SCRATCH

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from behaviour import Episode, SeedLife

DARK, BLUE, GREY, ORANGE = "#2b4c5b", "#0072b2", "#8a8a8a", "#d55e00"
"""From the colours that Okabe and Ito chose for colour-blind readers."""


# -- results -----------------------------------------------------------------------------------------------------------


def draw_scores(path: Path, content: Content, labels: Sequence[str]) -> None:
    """Mean scores with their intervals: the learned controller, its rivals, static networks."""
    scores = {label: estimate(content, label, "score") for label in labels}
    with drawing(path, figsize=(8.6, 0.9 + 0.42 * len(labels))) as (_, axes):
        for place, (label, score) in enumerate(scores.items()):
            static = label.startswith(("static ×", SCRATCH))
            colour = BLUE if label == LEARNED else GREY if static else DARK
            style = {"color": colour, "markerfacecolor": "white" if static else colour}
            axes.errorbar(score.value, place, xerr=error_bar(score), fmt="o", markersize=8, capsize=3, **style)
            point = (score.value if score.high is None else score.high, place)
            offset = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "fontsize": 9}
            axes.annotate(f"{score.value:.1f}", point, weight="bold" if label == LEARNED else "normal", **offset)
        axes.axvline(scores[LEARNED].value, color=BLUE, linewidth=0.8, linestyle=":", zorder=0)
        names = [label.replace(f"{LEARNED}: from", "its networks from") for label in labels]
        axes.set_yticks(range(len(labels)), names)
        axes.margins(x=0.08)
        what = f"score (points): test accuracy − {content['rent_rate']:g} per extra host-size of parameters"
        axes.set(xlabel=what, ylim=(len(labels) - 0.5, -0.5))
        title = "held-out problems of mixed, means with 95 % intervals (open: static networks)"
        axes.set_title(f"{len(content['draws'])} {title}", loc="left", fontsize=10)
        hide_spines(axes)
        axes.grid(axis="x", alpha=0.25)


def draw_kinds(path: Path, content: Content, against: Sequence[str]) -> None:
    """Learned minus each rival, in points of score, by kind of problem: orange where the rival is better."""
    of, meant = kinds(content), answers(content)
    cells = np.array([[difference_over(content, rival, numbers) for rival in against] for numbers in of.values()])
    with drawing(path, figsize=(3.9 + 1.15 * len(against), 1.4 + 0.34 * len(of))) as (figure, axes):
        limit = max(5.0, float(np.quantile(np.abs(cells), 0.9)))
        image = axes.imshow(cells, cmap="PuOr", vmin=-limit, vmax=limit, aspect="auto")
        for (row, place), value in np.ndenumerate(cells):
            colour = "white" if abs(value) > 0.62 * limit else "black"
            axes.text(place, row, signed(value), ha="center", va="center", fontsize=8.5, color=colour)
        axes.set_xticks(range(len(against)), [f"minus\n{rival}" for rival in against], fontsize=9)
        axes.xaxis.tick_top()
        axes.set_yticks(range(len(of)), [f"{kind}   (meant: {meant[kind]})" for kind in of], fontsize=8.5)
        axes.tick_params(length=0)
        what = "points of score by which learned is better"
        figure.colorbar(image, ax=axes, shrink=0.5, extend="both", label=what)


def draw_harm(path: Path, differences: Sequence[float], seeds: int) -> None:
    """Every draw's difference, in order: how often, and how much, growing cost accuracy."""
    values = np.sort(differences)
    places, low = np.arange(1, len(values) + 1), values < HARM_LIMIT
    with drawing(path, figsize=(8.6, 3.4)) as (_, axes):
        axes.plot(places[~low], values[~low], "o", color=DARK, markersize=5, label="not harmed")
        axes.plot(places[low], values[low], "v", color=ORANGE, markersize=7, label=f"below {plain(HARM_LIMIT)} points")
        axes.axhline(0.0, color=GREY, linewidth=0.8)
        axes.axhline(HARM_LIMIT, color=ORANGE, linewidth=0.9, linestyle="--")
        axes.set_yscale("symlog", linthresh=1.0)  # most draws lie near 0 or far above
        marks = (-50, -10, -5, -1, -0.5, 0, 1, 5, 10, 50)
        ticks = [tick for tick in marks if values.min() - 1 <= tick <= values.max() + 25]
        axes.set_yticks(ticks, [f"{tick:g}".replace("-", "−") for tick in ticks])
        axes.minorticks_off()
        axes.locator_params(axis="x", integer=True)
        axes.set(
            xlabel="held-out problem, in order of the difference",
            ylabel="test accuracy: learned − none\n(points, beyond ±1 logarithmic)",
            ylim=(min(-1.5, 1.4 * values[0]), max(1.5, 1.5 * values[-1])),
        )
        axes.set_title(f"{len(values)} problems, mean of {seeds} random seeds each", loc="left", fontsize=10)
        axes.legend(frameon=False, loc="upper left")
        axes.grid(axis="y", alpha=0.25)
        hide_spines(axes)


# -- behaviour ---------------------------------------------------------------------------------------------------------


def draw_choices(path: Path, episodes: Sequence[Episode]) -> None:
    """Which seeds act in the final networks, by kind of problem; a frame marks what was meant."""
    kinds_shown = sorted({episode.kind for episode in episodes})
    places = {place for episode in episodes for place in (*episode.kept, *episode.meant)}
    columns = ["nothing", *sorted(places, key=lambda place: place.split("@"))]
    meant = {episode.kind: episode.meant or columns[:1] for episode in episodes}
    counts = Counter(episode.kind for episode in episodes)
    cells = np.zeros((len(kinds_shown), len(columns)))
    for episode in episodes:
        for place in set(episode.kept) or columns[:1]:
            cells[kinds_shown.index(episode.kind), columns.index(place)] += 100.0 / counts[episode.kind]
    size = (2.9 + 0.38 * len(columns), 2.0 + 0.27 * len(kinds_shown))
    with drawing(path, figsize=size) as (figure, axes):
        image = axes.imshow(cells, cmap="Blues", vmin=0, vmax=100, aspect="auto")
        for row, kind in enumerate(kinds_shown):
            for place in meant[kind]:
                corner = (columns.index(place) - 0.5, row - 0.5)
                axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=ORANGE, linewidth=2.2))
            for at in np.flatnonzero(cells[row]):
                colour = "white" if cells[row, at] > 55 else "black"
                axes.text(at, row, f"{cells[row, at]:.0f}", ha="center", va="center", fontsize=7, color=colour)
        axes.set_xticks(range(len(columns)), columns, rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
        axes.set_yticks(range(len(kinds_shown)), kinds_shown, fontsize=8)
        axes.set_xticks(np.arange(len(columns)) - 0.5, minor=True)
        axes.set_yticks(np.arange(len(kinds_shown)) - 0.5, minor=True)
        axes.set_axisbelow(True)  # the grid under the frames
        axes.grid(which="minor", color="#e6e6e6", linewidth=0.6)
        axes.tick_params(which="both", length=0)
        axes.set_xlabel("seed in the final network (blueprint@slot)")
        figure.colorbar(image, ax=axes, shrink=0.6, pad=0.01, label="draws of this kind (%)")
        axes.set_title(f"{len(episodes)} held-out problems; orange frame: what was meant", loc="left", fontsize=10)


def draw_timing(path: Path, episodes: Sequence[Episode]) -> None:
    """When seeds are planted, how long they take, and what the shadow had promised of those that were pruned."""
    seeds = [seed for episode in episodes for seed in episode.seeds]
    with drawing(path, 1, 3, figsize=(12.5, 3.5), width_ratios=[1, 1, 1.15]) as (_, axes):
        _draw_births(axes[0], seeds, max(episode.draw.horizon for episode in episodes))
        _draw_lengths(axes[1], seeds)
        _draw_promises(axes[2], seeds)
        for one in axes:
            hide_spines(one)
            one.grid(axis="y", alpha=0.25)


def _draw_births(axes: Axes, seeds: Sequence[SeedLife], horizon: int) -> None:
    stayed, gone = ([seed.born for seed in seeds if (seed.fate is Op.PRUNE) is pruned] for pruned in (False, True))
    heights = [np.bincount(births, minlength=horizon)[:horizon] for births in (stayed, gone)]
    axes.bar(range(horizon), heights[0], color=BLUE, label=f"not pruned ({len(stayed)})")
    style: dict[str, Any] = {"color": "#f0c27a", "hatch": "///", "label": f"pruned later ({len(gone)})"}
    axes.bar(range(horizon), heights[1], bottom=heights[0], **style)
    axes.locator_params(axis="both", integer=True)
    axes.set(xlabel="epoch of planting", ylabel="seeds")
    axes.set_title("When it plants", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8)


def _draw_lengths(axes: Axes, seeds: Sequence[SeedLife]) -> None:
    stages = {"incubating": Stage.TRAINING, "blending": Stage.BLENDING, "holding": Stage.HOLDING}
    kept, pruned = ([seed.epochs for seed in seeds if seed.fate is op] for op in (Op.FOSSILIZE, Op.PRUNE))
    columns = {name: [epochs[stage] for epochs in kept] for name, stage in stages.items()}
    columns["pruned after"] = [sum(epochs[stage] for stage in stages.values()) for epochs in pruned]
    for place, values in enumerate(columns.values()):
        for length, count in Counter(values).items():
            axes.scatter(place, length, s=14 + 320 * count / max(1, len(values)), color=DARK, alpha=0.75, linewidths=0)
        if values:
            axes.plot([place - 0.3, place + 0.3], [np.mean(values)] * 2, color=ORANGE, linewidth=2)
        axes.text(place, 1.0, f"n = {len(values)}", ha="center", fontsize=8, transform=axes.get_xaxis_transform())
    axes.set_xticks(range(len(columns)), list(columns), fontsize=8.5)
    axes.set(ylabel="epochs (area: seeds; line: mean)", xlim=(-0.6, len(columns) - 0.4))
    axes.set_title("How long kept and pruned seeds take\n", loc="left", fontsize=10)


def _draw_promises(axes: Axes, seeds: Sequence[SeedLife]) -> None:
    limit = 30.0
    measured = [(seed, seed.shadow.accuracy) for seed in seeds if seed.shadow is not None]
    blended = [points for seed, points in measured if seed.epochs[Stage.BLENDING]]
    pruned = [points for seed, points in measured if seed.fate is Op.PRUNE and seed.ended_in is Stage.TRAINING]
    bins = np.linspace(-limit, limit, 31)
    for values, colour, line, name in (
        (blended, BLUE, "-", "went on to blend"),
        (pruned, ORANGE, "--", "pruned while incubating"),
    ):
        style: dict[str, Any] = {"color": colour, "linestyle": line, "linewidth": 1.8}
        axes.hist(np.clip(values, -limit, limit), bins=bins.tolist(), histtype="step", **style)
        axes.plot([], [], label=f"{name} ({len(values)})", **style)
    axes.axvline(0.0, color=GREY, linewidth=0.8)
    axes.set(xlabel="last shadow benefit (points; beyond ±30 at the edge)", ylabel="seeds")
    axes.set_title("What the shadow promised", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="upper left")

"""The pictures of docs/behaviour.md. No meaning rests on colour alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.patches import Rectangle

from esper.actions import Op
from esper.lifecycle import Stage
from esper.training.plots import drawing, hide_spines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from behaviour import Episode, SeedLife

DARK, BLUE, GREY, ORANGE = "#2b4c5b", "#0072b2", "#8a8a8a", "#d55e00"
"""From the colours that Okabe and Ito chose for colour-blind readers."""


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

"""The pictures of docs/behaviour.md. Needs matplotlib."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from esper.lifecycle import Stage
from esper.training.plot import STAGE_COLOURS, pyplot
from results.lives import KEPT, PRUNED, Episode, Life
from results.pictures import INK, QUIET, STRONG, WARM

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOTHING = "nothing"
_MARKS = {
    "germinate": ("^", STRONG, "planted"),
    "prune": ("X", WARM, "pruned"),
    "fossilize": ("s", INK, "made permanent"),
}
"""By operation: marker, colour, word."""


def draw_choices(path: Path, episodes: Sequence[Episode]) -> None:
    """Which seeds act in the final networks, by kind of problem; a frame marks what was meant."""
    plt = pyplot()
    kinds = sorted({episode.kind for episode in episodes})
    places = sorted({p for episode in episodes for p in (*episode.kept, *episode.meant)}, key=_place_order)
    columns = [NOTHING, *places]
    cells = np.zeros((len(kinds), len(columns)))
    counts = Counter(episode.kind for episode in episodes)
    for episode in episodes:
        for place in set(episode.kept) or {NOTHING}:
            cells[kinds.index(episode.kind), columns.index(place)] += 100.0 / counts[episode.kind]
    figure, axes = plt.subplots(figsize=(2.9 + 0.38 * len(columns), 2.0 + 0.27 * len(kinds)), layout="constrained")
    image = axes.imshow(cells, cmap="Blues", vmin=0, vmax=100, aspect="auto")
    for row, kind in enumerate(kinds):
        meant = next(episode.meant for episode in episodes if episode.kind == kind)
        for place in meant or [NOTHING]:
            box = plt.Rectangle(
                (columns.index(place) - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=WARM, linewidth=2.2
            )
            axes.add_patch(box)
        for at in np.flatnonzero(cells[row]):
            colour = "white" if cells[row, at] > 55 else "black"
            axes.text(at, row, f"{cells[row, at]:.0f}", ha="center", va="center", fontsize=7, color=colour)
    axes.set_xticks(range(len(columns)), columns, rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
    axes.set_yticks(range(len(kinds)), kinds, fontsize=8)
    axes.set_xticks(np.arange(len(columns)) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(kinds)) - 0.5, minor=True)
    axes.set_axisbelow(True)  # the grid under the frames
    axes.grid(which="minor", color="#e6e6e6", linewidth=0.6)
    axes.tick_params(which="both", length=0)
    axes.set_xlabel("seed in the final network (blueprint@slot)")
    bar = figure.colorbar(image, ax=axes, shrink=0.6, pad=0.01)
    bar.set_label("draws of this kind (%)")
    axes.set_title(f"{len(episodes)} held-out problems; orange frame: what was meant", loc="left", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _place_order(place: str) -> tuple[str, str]:
    blueprint, _, slot = place.partition("@")
    return blueprint, slot


def draw_timing(path: Path, episodes: Sequence[Episode]) -> None:
    """When seeds are planted, how long they take, and what the shadow had promised of those that were pruned."""
    plt = pyplot()
    lives = [life for episode in episodes for life in episode.lives]
    figure, axes = plt.subplots(1, 3, figsize=(12.5, 3.5), layout="constrained", width_ratios=[1, 1, 1.15])
    _draw_births(axes[0], lives, max(episode.horizon for episode in episodes))
    _draw_lengths(axes[1], lives)
    _draw_promises(axes[2], lives)
    for one in axes:
        for side in ("top", "right"):
            one.spines[side].set_visible(False)
        one.grid(axis="y", alpha=0.25)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_births(axes: Axes, lives: Sequence[Life], horizon: int) -> None:
    stayed, gone = ([life.born for life in lives if (life.fate == PRUNED) is pruned] for pruned in (False, True))
    heights = [np.bincount(births, minlength=horizon) for births in (stayed, gone)]
    axes.bar(range(horizon), heights[0][:horizon], color=STRONG, label=f"not pruned ({len(stayed)})")
    style: dict[str, Any] = {"color": "#f0c27a", "hatch": "///", "label": f"pruned later ({len(gone)})"}
    axes.bar(range(horizon), heights[1][:horizon], bottom=heights[0][:horizon], **style)
    axes.locator_params(axis="both", integer=True)
    axes.set_xlabel("epoch of planting")
    axes.set_ylabel("seeds")
    axes.set_title("When it plants", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8)


def _draw_lengths(axes: Axes, lives: Sequence[Life]) -> None:
    kept = [life for life in lives if life.fate == KEPT]
    columns = {"incubating": [x.incubated for x in kept], "blending": [x.blended for x in kept]}
    columns["holding"] = [x.held for x in kept]
    columns["pruned after"] = [x.incubated + x.blended + x.held for x in lives if x.fate == PRUNED]
    for place, values in enumerate(columns.values()):
        for length, count in Counter(values).items():
            axes.scatter(place, length, s=14 + 320 * count / max(1, len(values)), color=INK, alpha=0.75, linewidths=0)
        if values:
            axes.plot([place - 0.3, place + 0.3], [np.mean(values)] * 2, color=WARM, linewidth=2)
        axes.text(place, 1.0, f"n = {len(values)}", ha="center", fontsize=8, transform=axes.get_xaxis_transform())
    axes.set_xticks(range(len(columns)), list(columns), fontsize=8.5)
    axes.set_xlim(-0.6, len(columns) - 0.4)
    axes.set_ylabel("epochs (area: seeds; line: mean)")
    axes.set_title("How long kept and pruned seeds take\n", loc="left", fontsize=10)


def _draw_promises(axes: Axes, lives: Sequence[Life]) -> None:
    limit = 30.0
    measured = [(life, life.shadow) for life in lives if life.shadow is not None]
    blended = [shadow for life, shadow in measured if life.blended]
    pruned = [shadow for life, shadow in measured if life.fate == PRUNED and life.ended_in is Stage.TRAINING]
    bins = np.linspace(-limit, limit, 31)
    for values, colour, style, name in (
        (blended, STRONG, "-", "went on to blend"),
        (pruned, WARM, "--", "pruned while incubating"),
    ):
        clipped = np.clip(values, -limit, limit)
        axes.hist(clipped, bins=bins.tolist(), histtype="step", linewidth=1.8, color=colour, linestyle=style)
        axes.plot([], [], color=colour, linestyle=style, linewidth=1.8, label=f"{name} ({len(values)})")
    axes.axvline(0.0, color=QUIET, linewidth=0.8)
    axes.set_xlabel("last shadow benefit (points; beyond ±30 at the edge)")
    axes.set_ylabel("seeds")
    axes.set_title("What the shadow promised", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def draw_episode(path: Path, episode: Episode, none: Episode) -> None:
    """One training: accuracy with what was decided, and the stages of the slots below."""
    plt = pyplot()
    figure, (top, bottom) = plt.subplots(
        2,
        1,
        sharex=True,
        figsize=(8.6, 3.4 + 0.4 * episode.slots),
        height_ratios=[3.2, 0.4 * episode.slots + 0.2],
        layout="constrained",
    )
    epochs = range(1, len(episode.curve) + 1)
    label = f"grown (test {episode.test_accuracy:.1f} %, ×{episode.size:.2f} parameters)"
    top.plot(
        range(1, len(none.curve) + 1), none.curve, color=QUIET, label=f"not grown (test {none.test_accuracy:.1f} %)"
    )
    top.plot(epochs, episode.curve, color=INK, linewidth=2.2, label=label)
    _mark_decisions(top, episode)
    top.set_ylabel("validation accuracy (%)")
    top.set_title(f"{episode.kind}, draw {episode.number} (meant: {episode.answer})", loc="left", fontsize=10)
    top.legend(frameon=False, fontsize=8, loc="best")
    top.grid(alpha=0.25)
    _draw_bands(bottom, episode)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _mark_decisions(axes: Axes, episode: Episode) -> None:
    for decision in episode.decisions:
        marker, colour, _ = _MARKS[decision.op]
        level = float(np.mean(episode.curve[max(0, decision.epoch - 1) : decision.epoch + 1]))  # between two epochs
        axes.plot(decision.epoch + 0.5, level, marker, color=colour, markersize=9, markeredgecolor="white", zorder=5)
        axes.axvline(decision.epoch + 0.5, color=colour, linewidth=0.7, linestyle=":", zorder=0)
    for op in dict.fromkeys(decision.op for decision in episode.decisions):
        marker, colour, name = _MARKS[op]
        axes.plot([], [], marker, color=colour, markersize=8, label=name)


def _draw_bands(axes: Axes, episode: Episode) -> None:
    for epoch, stages in enumerate(episode.stages):
        for row, stage in enumerate(stages):
            if stage in STAGE_COLOURS:
                axes.broken_barh([(epoch + 0.5, 1.0)], (row - 0.36, 0.72), color=STAGE_COLOURS[stage])
    for life in episode.lives:
        dark = {"color": "white", "alpha": 0.75, "pad": 1.0, "linewidth": 0}
        axes.text(life.born + 0.7, life.slot, life.blueprint, va="center", fontsize=8, bbox=dark, clip_on=True)
    axes.set_yticks(range(episode.slots), [f"slot {slot}" for slot in range(episode.slots)])
    axes.set_ylim(episode.slots - 0.5, -0.5)
    axes.set_xlim(0.5, episode.horizon + 0.5)
    axes.set_xlabel("epoch")
    axes.locator_params(axis="x", integer=True)
    handles: list[Any] = [pyplot().Rectangle((0, 0), 1, 1, color=colour) for colour in STAGE_COLOURS.values()]
    names = [stage.name.lower() for stage in STAGE_COLOURS]
    axes.legend(
        handles, names, ncols=len(names), loc="upper center", bbox_to_anchor=(0.5, -0.42), frameon=False, fontsize=8
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)

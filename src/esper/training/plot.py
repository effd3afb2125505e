"""Pictures of a run. Needs matplotlib (`pip install esper[plot]`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esper.lifecycle import Stage
from esper.training.own.history import History

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STAGE_COLOURS = {
    Stage.TRAINING: "#f2c14e",
    Stage.BLENDING: "#7fb7be",
    Stage.HOLDING: "#3d8c95",
    Stage.FOSSILIZED: "#2b4c5b",
    Stage.EMBARGOED: "#dddddd",
}
_GROWN, _CONTROL = "#2b4c5b", "#c0504d"


class PlotUnavailableError(ImportError):
    """matplotlib is not installed."""


def plot_history(path: Path, history: History, control: Sequence[float] = (), title: str = "") -> None:
    """Accuracy over epochs, above one band per slot that shows its seeds' stages."""
    plt = pyplot()
    count = len(history.slots)
    figure, (top, bottom) = plt.subplots(
        2,
        1,
        sharex=True,
        figsize=(9, 3.6 + 0.42 * count),
        height_ratios=[3.4, 0.42 * count + 0.3],
        layout="constrained",
    )
    accuracies = [record.measured.accuracy for record in history.records]
    epochs = range(1, len(accuracies) + 1)
    if control:
        top.plot(epochs, control, color=_CONTROL, label=f"same host, not grown ({control[-1]:.1f} %)")
    top.plot(epochs, accuracies, color=_GROWN, linewidth=2.2, label=f"grown ({accuracies[-1]:.1f} %)")
    _mark_births(top, history)
    top.set_ylabel("validation accuracy (%)")
    top.set_title(title, loc="left")
    top.legend(loc="best", framealpha=0.8, edgecolor="none")
    top.grid(alpha=0.25)
    _draw_bands(bottom, history)
    bottom.set_xlabel("epoch")
    bottom.xaxis.get_major_locator().set_params(integer=True)
    bottom.set_xlim(0.5, len(accuracies) + 0.5)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _mark_births(axes: Axes, history: History) -> None:
    for story in history.seeds():
        axes.axvline(story.born + 1, color="#999999", linewidth=0.8, linestyle=":")


def _draw_bands(axes: Axes, history: History) -> None:
    for row in range(len(history.slots)):
        for start, length, stage in _stretches([record.stages[row] for record in history.records]):
            if stage in STAGE_COLOURS:
                axes.broken_barh([(start + 0.5, length)], (row - 0.36, 0.72), color=STAGE_COLOURS[stage])
    for story in history.seeds():
        row = history.slots.index(story.slot)
        axes.text(story.born + 0.7, row, story.blueprint, va="center", fontsize=8, color="black", clip_on=True)
    axes.set_yticks(range(len(history.slots)), history.slots)
    axes.set_ylim(len(history.slots) - 0.5, -0.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    handles = [_patch(colour, stage.name.lower()) for stage, colour in STAGE_COLOURS.items()]
    axes.legend(handles=handles, ncols=len(handles), loc="upper center", bbox_to_anchor=(0.5, -0.55), frameon=False)


def _stretches(stages: Sequence[Stage]) -> list[tuple[int, int, Stage]]:
    """Runs of equal stages: (first epoch, length, stage)."""
    found: list[tuple[int, int, Stage]] = []
    for epoch, stage in enumerate(stages):
        if found and found[-1][2] is stage:
            start, length, _ = found[-1]
            found[-1] = (start, length + 1, stage)
        else:
            found.append((epoch, 1, stage))
    return found


def _patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch  # noqa: PLC0415  (optional dependency)

    return Patch(color=colour, label=label)


def pyplot() -> Any:
    os.environ.setdefault("MPLBACKEND", "Agg")  # no screen needed to write a file
    try:
        import matplotlib.pyplot as plt  # noqa: PLC0415  (optional dependency)
    except ImportError as error:
        raise PlotUnavailableError("the plot needs matplotlib: pip install 'esper[plot]'") from error
    return plt

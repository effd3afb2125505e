"""What a person sees of a run of `esper train` while it goes on: a compact live view, or plain lines in a file."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from esper.cli.terminal import clock
from esper.lifecycle import Stage
from esper.tables import Watch

if TYPE_CHECKING:
    from esper.training.loop import Trainer, UpdateReport

HELD_OUT = "held-out score"
HEADINGS = {
    "explained": "critic\nexplains",
    "grown/kept/pruned": "grown/kept\n/pruned",
    HELD_OUT: "held-out\nscore",
}
"""In two lines, so that a terminal of 80 columns has room for all."""
SPARK_BLOCKS = "▁▂▃▄▅▆▇█"
SPARK = 32
"""Updates that a sparkline shows."""
BAR = 24
"""Cells of the bar that shows where the seeds of a slot are."""
STAGE_COLOURS = {
    Stage.DORMANT: "grey37",
    Stage.GERMINATED: "yellow",
    Stage.TRAINING: "dark_orange",
    Stage.BLENDING: "sky_blue1",
    Stage.HOLDING: "dodger_blue2",
    Stage.FOSSILIZED: "green3",
    Stage.PRUNED: "red3",
    Stage.EMBARGOED: "grey50",
    Stage.RESETTING: "grey46",
}
STAGE_MARKS = {Stage.DORMANT: "·", Stage.TRAINING: "▒", Stage.BLENDING: "▓", Stage.HOLDING: "▆", Stage.FOSSILIZED: "█"}
"""Different shapes as well as colours; the other stages are a cross."""
WORDS = {Stage.DORMANT: "empty", Stage.FOSSILIZED: "kept", Stage.PRUNED: "removed", Stage.EMBARGOED: "resting"}


class TrainWatch(Watch):
    """A live view for a person, and at the end a table of the last updates; a line per update in a file."""

    ROWS = 8

    def __init__(self, console: Console, trainer: Trainer) -> None:
        super().__init__(console, f"update {trainer.update + 1} of {trainer.config.updates} …")
        self.trainer, self.started, self.first = trainer, time.perf_counter(), trainer.update
        self.reports: list[UpdateReport] = []

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self.live and self.reports:
            self.console.print(self._table())

    def __call__(self, report: UpdateReport) -> None:
        self.reports.append(report)
        for message in report.anomalies:
            self.console.print(f"update {report.update}: {message}", style="yellow", soft_wrap=True)
        if self.live:
            self.live.update(self.view())
        else:
            cells = ", ".join(f"{name} {value}" for name, value in _cells(report).items())
            self.console.print(f"{cells}, {_rate(report)}{self._left()} left{self._nodes()}", soft_wrap=True)

    def _nodes(self) -> str:
        """Who plays, on a cluster."""
        cluster = self.trainer.cluster
        return "" if cluster is None else f"; {cluster.members.progress()}"

    def _left(self) -> str:
        done = self.reports[-1].update - self.first
        remaining = self.trainer.config.updates - self.reports[-1].update
        return clock((time.perf_counter() - self.started) / done * remaining)

    # -- live ----------------------------------------------------------------------------------------------------------

    def view(self) -> RenderableType:
        """Progress, numbers with their last updates as sparklines, and where the seeds of each slot are."""
        last, config = self.reports[-1], self.trainer.config
        head = Table.grid(padding=(0, 2, 0, 0))
        bar = ProgressBar(total=config.updates, completed=last.update, width=20)
        said = Text(f"update {last.update} of {config.updates}", style="bold")
        head.add_row(said, bar, Text(f"{_rate(last)}{self._left()} left{self._nodes()}"))
        return Group(head, self._numbers(), *slot_bars(last.rollout.stages))

    def _numbers(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
        table.add_column(justify="left", style="dim")
        table.add_column(justify="right", style="bold", no_wrap=True, min_width=8)
        table.add_column(justify="left", no_wrap=True)
        for name, key, form in (
            ("score", "episode/score", ".1f"),
            ("held-out score", "evaluation/score", ".1f"),
            ("accuracy, %", "episode/accuracy", ".1f"),
            ("size, × host", "episode/growth", ".2f"),
            ("entropy", "entropy", ".2f"),
            ("KL", "kl", ".4f"),
            ("critic explains", "explained_variance", ".2f"),
        ):
            values = [self._value(report, key) for report in self.reports]
            there = [value for value in values if value is not None]
            if there:
                table.add_row(name, f"{there[-1]:{form}}", sparkline(values))
        table.add_row("planted/kept/removed", _fates(self.reports[-1]), "")
        return table

    @staticmethod
    def _value(report: UpdateReport, key: str) -> float | None:
        return report.evaluation if key == "evaluation/score" else report.metrics.get(key)

    # -- at the end ----------------------------------------------------------------------------------------------------

    def _table(self) -> Table:
        done, total = self.reports[-1].update, self.trainer.config.updates
        rows = [_cells(report) for report in self.reports[-self.ROWS :]]
        judged = any(report.evaluation is not None for report in self.reports)
        speed = _rate(self.reports[-1])
        table = Table(
            title=f"update {done} of {total}, {speed}{self._left()} left{self._nodes()}", box=None, padding=(0, 1, 0, 0)
        )
        for name in rows[0]:
            if name != HELD_OUT or judged:
                table.add_column(HEADINGS.get(name, name), justify="right", vertical="bottom", no_wrap=True)
        for row in rows:
            table.add_row(*list(row.values())[: len(table.columns)])
        return table


def _fates(report: UpdateReport) -> str:
    """How many seeds were planted, kept and removed."""
    return "/".join(f"{report.metrics[f'episode/{fate}']:.0f}" for fate in ("germinated", "fossilized", "pruned"))


def sparkline(values: Sequence[float | None], width: int = SPARK) -> str:
    """The last values as bars between the least and the most of them; a gap where nothing was measured."""
    shown = values[-width:]
    there = [value for value in shown if value is not None and value == value]
    if not there:
        return ""
    low, span = min(there), (max(there) - min(there)) or 1.0
    last = len(SPARK_BLOCKS) - 1
    return "".join(" " if v is None or v != v else SPARK_BLOCKS[round((v - low) / span * last)] for v in shown)


def slot_bars(slots: Sequence[Counter[Stage]]) -> list[Text]:
    """For each slot, where its seeds are when the episodes of the update end."""
    lines = []
    for number, counts in enumerate(slots):
        total = sum(counts.values())
        if total:
            line = Text(f"slot {number}  ", style="dim")
            for stage, cells in _cells_by_stage(counts, total):
                line.append(STAGE_MARKS.get(stage, "×") * cells, style=STAGE_COLOURS[stage])
            named = [f"{n} {WORDS.get(stage, stage.name.lower())}" for stage, n in counts.most_common(3) if n]
            more = ", …" if len(+counts) > 3 else ""
            lines.append(line.append(f"  {', '.join(named)}{more}", style="dim"))
    return lines


def _cells_by_stage(counts: Counter[Stage], total: int) -> list[tuple[Stage, int]]:
    """The bar's cells by shares, in the order of the lifecycle; rounding never makes it longer or shorter."""
    found, before = [], 0
    upto = 0
    for stage in Stage:
        upto += counts[stage]
        end = round(upto / total * BAR)
        found.append((stage, end - before))
        before = end
    return found


def _rate(report: UpdateReport) -> str:
    speed = report.metrics.get("steps_per_second")
    return "" if speed is None else f"{speed:,.0f} steps/s, "


def _cells(report: UpdateReport) -> dict[str, str]:
    m = report.metrics
    return {
        "update": str(report.update),
        "return": f"{m['episode/return']:.1f}",
        "score": f"{m['episode/score']:.1f}",
        "accuracy": f"{m['episode/accuracy']:.1f}",
        "size": f"×{m['episode/growth']:.2f}",
        "entropy": f"{m['entropy']:.2f}",
        "KL": f"{m['kl']:.4f}",
        "explained": f"{m['explained_variance']:.2f}",
        "grown/kept/pruned": _fates(report),
        HELD_OUT: "–" if report.evaluation is None else f"{report.evaluation:.1f}{' *' * report.best}",
    }

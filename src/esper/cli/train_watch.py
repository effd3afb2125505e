"""What a person sees of a training run while it goes on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from esper.cli.episodes import clock

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from esper.training.loop import Trainer, UpdateReport


HELD_OUT = "held-out score"
HEADINGS = {
    "explained": "critic\nexplains",
    "grown/kept/pruned": "grown/kept\n/pruned",
    HELD_OUT: "held-out\nscore",
}
"""In two lines, so that a terminal of 80 columns has room for all."""


class TrainWatch:
    """A live table of the last updates for a person; a line per update in a file."""

    ROWS = 8

    def __init__(self, console: Console, trainer: Trainer) -> None:
        self.console, self.trainer = console, trainer
        self.started, self.first = time.perf_counter(), trainer.update
        self.reports: list[UpdateReport] = []

    def __enter__(self) -> TrainWatch:
        from rich.live import Live

        begun = f"update {self.first + 1} of {self.trainer.config.updates} …"
        self.live = Live(begun, console=self.console, transient=True) if self.console.is_terminal else None
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live:
            self.live.stop()
        if self.console.is_terminal and self.reports:
            self.console.print(self._table())

    def __call__(self, report: UpdateReport) -> None:
        self.reports.append(report)
        for message in report.anomalies:
            self.console.print(f"update {report.update}: {message}", style="yellow", soft_wrap=True)
        if self.live:
            self.live.update(self._table())
        else:
            cells = ", ".join(f"{name} {value}" for name, value in _cells(report).items())
            self.console.print(f"{cells}, {self._left()} left", soft_wrap=True)

    def _left(self) -> str:
        done = self.reports[-1].update - self.first
        remaining = self.trainer.config.updates - self.reports[-1].update
        return clock((time.perf_counter() - self.started) / done * remaining)

    def _table(self) -> Table:
        from rich.table import Table

        done, total = self.reports[-1].update, self.trainer.config.updates
        rows = [_cells(report) for report in self.reports[-self.ROWS :]]
        judged = any(report.evaluation is not None for report in self.reports)
        table = Table(title=f"update {done} of {total}, {self._left()} left", box=None, padding=(0, 1, 0, 0))
        for name in rows[0]:
            if name != HELD_OUT or judged:
                table.add_column(HEADINGS.get(name, name), justify="right", vertical="bottom", no_wrap=True)
        for row in rows:
            table.add_row(*list(row.values())[: len(table.columns)])
        return table


def _cells(report: UpdateReport) -> dict[str, str]:
    m = report.metrics
    seeds = "/".join(f"{m[f'episode/{fate}']:.0f}" for fate in ("germinated", "fossilized", "pruned"))
    return {
        "update": str(report.update),
        "return": f"{m['episode/return']:.1f}",
        "score": f"{m['episode/score']:.1f}",
        "accuracy": f"{m['episode/accuracy']:.1f}",
        "size": f"×{m['episode/growth']:.2f}",
        "entropy": f"{m['entropy']:.2f}",
        "KL": f"{m['kl']:.4f}",
        "explained": f"{m['explained_variance']:.2f}",
        "grown/kept/pruned": seeds,
        HELD_OUT: "–" if report.evaluation is None else f"{report.evaluation:.1f}{' *' * report.best}",
    }

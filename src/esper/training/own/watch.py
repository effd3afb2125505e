"""A run while it goes on: a live table in a terminal, a bar in a notebook, a line every few epochs in a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any, Self

from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from esper.engine.eager import EpochRecord
from esper.growth.model import GrowingModel
from esper.lifecycle import Stage
from esper.tables import Watch, fits
from esper.training.own.run import OnEpoch

EPOCHS_BETWEEN_LINES = 10


@contextmanager
def watching(
    progress: bool | Console,
    model: GrowingModel,
    epochs: int,
    on_epoch: OnEpoch | None,
    name: str = "",
    metric: str = "accuracy",
) -> Iterator[OnEpoch | None]:
    """What is to be called after every epoch, so that a person sees it; `progress` may be where they look."""
    if progress is False:
        yield on_epoch
        return
    console = progress if isinstance(progress, Console) else Console(stderr=True, markup=False, emoji=False)
    kind: type[NotebookWatch | TerminalWatch] = NotebookWatch if console.is_jupyter else TerminalWatch
    watch = kind(console, name or type(model.host).__name__, epochs, [slot.path for slot in model.slots], metric)

    def both(record: EpochRecord, control: EpochRecord | None) -> None:
        watch(record, control)
        if on_epoch is not None:
            on_epoch(record, control)

    with watch:
        yield both


class TerminalWatch(Watch):
    """A live table while a person watches; a line every few epochs when the output goes to a file."""

    def __init__(self, console: Console, name: str, epochs: int, slots: Sequence[str], metric: str) -> None:
        what = TextColumn("growing {task.description}", markup=False)
        self.bar = Progress(what, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.job = self.bar.add_task(name, total=epochs)
        super().__init__(console, self.bar)
        self.epochs, self.slots, self.metric = epochs, slots, metric

    def __call__(self, record: EpochRecord, control: EpochRecord | None) -> None:
        self.bar.update(self.job, completed=record.epoch + 1)
        if record.verdict is not None:
            self.console.print(f"epoch {record.epoch + 1} broke and was undone: {record.verdict.message}")
        if self.live:
            table = self._table(record, control)
            self.live.update(Group(self.bar, table) if fits(self.console, table) else self.bar)
        elif (record.epoch + 1) % EPOCHS_BETWEEN_LINES == 0 or record.epoch + 1 == self.epochs:
            self.console.print(f"epoch {record.epoch + 1}/{self.epochs}: {_line(record, self.metric)}", highlight=False)

    def _table(self, record: EpochRecord, control: EpochRecord | None) -> Table:
        table = Table(box=None, pad_edge=False)
        for name in ("train loss", "val loss", f"val {self.metric}", "not grown", "parameters", *self.slots):
            table.add_column(name)
        table.add_row(
            f"{record.trained.loss:.3f}",
            f"{record.measured.loss:.3f}",
            f"{record.measured.accuracy:.1f} %",
            f"{control.measured.accuracy:.1f} %" if control else "–",
            f"{record.parameters:,}",
            *(f"{stage.name.lower()} {alpha:.2f}" for stage, alpha in zip(record.stages, record.alphas, strict=True)),
        )
        return table


class NotebookWatch:
    """One output of the cell, written anew after every epoch. (What rich shows there needs a package more.)"""

    def __init__(self, console: Console, name: str, epochs: int, slots: Sequence[str], metric: str) -> None:
        from IPython import display  # noqa: PLC0415  (only a notebook has it)

        self._ipython: Any = display
        self.name, self.epochs, self.slots, self.metric = name, epochs, slots, metric
        self._broken: list[str] = []
        self._shown: Any = None

    def __enter__(self) -> Self:
        page = self._ipython.HTML(self._page(0, "starting"))
        self._shown = self._ipython.display(page, display_id=True)
        return self

    def __exit__(self, *error: object) -> None:
        """The last epoch stays visible."""

    def __call__(self, record: EpochRecord, control: EpochRecord | None) -> None:
        if record.verdict is not None:
            self._broken.append(f"epoch {record.epoch + 1} broke and was undone: {record.verdict.message}")
        line = _line(record, self.metric) + (f", not grown {control.measured.accuracy:.1f} %" if control else "")
        seeds = [
            f"{path} {stage.name.lower()} {alpha:.2f}"
            for path, stage, alpha in zip(self.slots, record.stages, record.alphas, strict=True)
            if stage is not Stage.DORMANT
        ]
        self._shown.update(self._ipython.HTML(self._page(record.epoch + 1, line, *seeds, *self._broken)))

    def _page(self, done: int, *lines: str) -> str:
        bar = f"<progress value='{done}' max='{self.epochs}'></progress>"
        text = "<br>".join(map(escape, lines))
        return f"<div>growing {escape(self.name)} {bar} {done}/{self.epochs}<br>{text}</div>"


def _line(record: EpochRecord, metric: str) -> str:
    return (
        f"loss {record.trained.loss:.3f}, val {metric} {record.measured.accuracy:.1f} %, "
        f"{record.parameters:,} parameters"
    )

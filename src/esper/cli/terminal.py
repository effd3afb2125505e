"""What commands print: consoles, tables, progress, numbers with their intervals."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.text import Text

from esper.tables import WIDTH

if TYPE_CHECKING:
    from esper.training.statistics import Estimate

SECONDS_BETWEEN_LINES = 15.0
"""Where the output goes to no terminal, progress is a line now and then."""


def wide_console(*, stderr: bool = False, file_width: int = WIDTH) -> Console:
    """A person's terminal has its own width; a file has room for a whole table.

    Text is printed as it is: names, paths and messages may have brackets and colons, which rich would take for styles
    and emoji. What is to have a style is a `Text`, or has it by `style=`.
    """
    console = Console(stderr=stderr, markup=False, emoji=False)
    if console.is_terminal:
        return console
    return Console(stderr=stderr, markup=False, emoji=False, width=max(console.width, file_width))


def print_dim(console: Console, *lines: str) -> None:
    """What is said beside the matter."""
    for line in lines:
        console.print(line, style="dim", highlight=False, soft_wrap=True)


def styled(markup: str) -> Text:
    """Of markup whose names are escaped."""
    return Text.from_markup(markup, emoji=False)


class ProgressDisplay:
    """Work done and the time that is left: a live bar for a person, a line now and then in a file."""

    def __init__(self, console: Console, unit: str = "episodes") -> None:
        self.console, self.unit = console, unit
        self.started, self.done, self.said = time.perf_counter(), 0, -math.inf

    def __enter__(self) -> ProgressDisplay:
        last = TextColumn(f"{self.unit}, {{task.description}}", markup=False)
        columns = (BarColumn(), MofNCompleteColumn(), last, TimeElapsedColumn())
        self.bar = Bars(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        self.job = self.bar.add_task("starting", total=None)
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def note(self, done: int, total: int, label: str) -> None:
        if done <= self.done:  # another part of the work begins
            self.started, self.said = time.perf_counter(), -math.inf
        self.done, spent = done, time.perf_counter() - self.started
        left = f"{clock(spent * (total - done) / done)} left"
        self.bar.update(self.job, completed=done, total=total, description=f"{left}; last: {label}")
        if not self.console.is_terminal and (spent - self.said > SECONDS_BETWEEN_LINES or done == total):
            self.said = spent
            self.console.print(f"{done}/{total} {self.unit} in {clock(spent)}, {left}; last: {label}", soft_wrap=True)


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def with_interval(estimate: Estimate | None, form: str = ".1f", note: str = "") -> str:
    """The number, its interval below it, and a note below that: markup, for `styled`."""
    if estimate is None:
        return "–"
    lines = [format(estimate.value, form)]
    if estimate.low is not None and estimate.high is not None:
        lines.append(f"[dim]{estimate.low:{form}}…{estimate.high:{form}}[/dim]")
    return "\n".join([*lines, f"[dim]{note}[/dim]"] if note else lines)

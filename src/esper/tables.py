"""A table as data, for whoever shows it: lines for a terminal or a file, HTML for a notebook; and a live display.

Names of modules, reasons and messages may hold anything: nothing in a cell is markup.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Self

from rich import box
from rich.console import Console, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

WIDTH = 110
"""Columns of text where no terminal says its own."""


_CELL = "text-align:left;padding:2px 14px 2px 2px"


@dataclass(frozen=True, slots=True)
class Rows:
    """Headings and rows, and a sentence below that says what the headings mean."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    wrapping: tuple[str, ...] = ()
    """Headings of the columns that may break their lines."""
    note: str = ""

    def show(self, console: Console) -> None:
        """As a table; where that is too wide for the console, a few lines per row."""
        show_rows(console, self.title, self.headings, self.rows, wrapping=self.wrapping)
        if self.note:
            console.print(self.note, style="dim", highlight=False)

    def html(self) -> str:
        rows = ["".join(f"<td style='{_CELL}'>{escape(cell)}</td>" for cell in row) for row in self.rows]
        head = "".join(f"<th style='{_CELL}'>{escape(heading)}</th>" for heading in self.headings)
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        title = f"<caption style='text-align:left;font-weight:bold;white-space:nowrap'>{escape(self.title)}</caption>"
        note = f"<p style='opacity:0.7;margin:0 0 1em 0'><small>{escape(self.note)}</small></p>"
        return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}"


@dataclass(frozen=True, slots=True)
class Report:
    """Tables and sentences, in the order in which they are read. `print` it, or leave it as a notebook cell's value."""

    parts: tuple[Rows | str, ...]

    def show(self, console: Console) -> None:
        for part in self.parts:
            if isinstance(part, Rows):
                part.show(console)
                console.print()
            else:
                console.print(part, highlight=False)

    def __str__(self) -> str:
        file = io.StringIO()
        width = shutil.get_terminal_size((WIDTH, 24)).columns
        self.show(Console(file=file, width=width, color_system=None, markup=False, emoji=False, force_jupyter=False))
        lines = [line.rstrip() for line in file.getvalue().splitlines()]
        return "\n".join(lines).strip("\n")

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return "".join(part.html() if isinstance(part, Rows) else f"<p>{escape(part)}</p>" for part in self.parts)


class Watch:
    """A live display for a person, of work that goes on; nothing where the output goes to a file."""

    def __init__(self, console: Console, first: RenderableType) -> None:
        self.console = console
        self.live = Live(first, console=console, transient=True) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live:
            self.live.stop()


def fits(console: Console, table: Table) -> bool:
    """Whether every word of a table can be read; a terminal that is too narrow gets its words cut short."""
    return _least_width(console, table) <= console.width


def _least_width(console: Console, table: Table) -> int:
    anywhere = console.options.update(max_width=10_000)  # measured in a narrow place, everything claims to be narrow
    return Measurement.get(console, anywhere, table).minimum


def show_rows(
    console: Console, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], *, wrapping: Sequence[str]
) -> None:
    """A table in which the columns of the headings `wrapping` may break their lines; where that is still too wide for
    the terminal, a few lines per row."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading, *cells in zip(headings, *rows, strict=True):
        parts = [part for cell in (heading, *cells) for part in (cell.split() if heading in wrapping else [cell])]
        table.add_column(heading, no_wrap=heading not in wrapping, min_width=max(map(len, parts)))
    for row in rows:
        table.add_row(*map(Text, row))  # Text: nothing in a name is markup
    console.print(Text(title, "italic"))  # not the table's own title, which would be as narrow as the table
    if fits(console, table):
        _share_width(console, table, [max(map(len, cells)) for cells in zip(headings, *rows, strict=True)])
        console.print(table)
        return
    named = 1 if headings[0] else 2  # a mark, in a column without a heading, stands before the name
    for row in rows:
        console.print(Text(" ".join(filter(None, row[:named])), "bold"))
        parts = [f"{heading}: {cell}" for heading, cell in zip(headings[named:], row[named:], strict=True)]
        is_short = all(len(part) <= console.width // 2 for part in parts)
        for part in ["; ".join(parts)] if is_short else parts:
            console.print(Padding(Text(part), (0, 0, 0, 2)))


def _share_width(console: Console, table: Table, whole: Sequence[int]) -> None:
    """Where not all cells fit in a line, give each column its longest word and a part of what is left. rich shrinks
    columns below their longest words, and then cuts the last ones."""
    least = [column.min_width or 0 for column in table.columns]
    room = console.width - _least_width(console, table)
    wanted = sum(whole) - sum(least)
    if wanted > room:
        for column, low, high in zip(table.columns, least, whole, strict=True):
            column.width = low + (high - low) * room // wanted


def quantity(number: float) -> str:
    """A large number in three digits, for tables of many: 37900 is 37.9k."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:
            return f"{number / size:.3g}{unit}" if number < 999.5 * size else f"{number / size:,.0f}{unit}"
    return f"{number:.0f}"

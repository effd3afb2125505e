"""`esper query`: SQL on a run, while it trains or afterwards."""

from __future__ import annotations

import csv
import sqlite3
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.table import Table
from rich.text import Text
from tyro.conf import Positional, arg

from esper.cli import unless_the_reader_leaves
from esper.cli.terminal import wide_console

Cells = Sequence[object]
STEPS_BETWEEN_TURNS = 100_000
"""Of SQLite's machine; about a millisecond."""


@dataclass(frozen=True)
class Query:
    """Ask the store of a run with SQL. Without SQL, list its tables and views. Nothing can be changed this way."""

    folder: Annotated[Positional[Path], arg(metavar="RUN")]
    """The run's folder, or its run.sqlite."""
    sql: Annotated[Positional[str | None], arg(metavar="SQL")] = None
    """One statement, such as "SELECT * FROM v_progress"."""
    json: bool = False
    """Print a JSON list with one object per row."""
    csv: bool = False
    """Print comma-separated values with a header."""

    def run(self) -> int:
        from esper.telemetry.store import open_readonly

        if self.json and self.csv:
            raise ValueError("--json and --csv exclude each other")
        with open_readonly(self.folder) as connection:
            connection.set_progress_handler(_python_has_a_turn, STEPS_BETWEEN_TURNS)
            try:
                columns, rows = _contents(connection) if self.sql is None else _ask(connection, self.sql, self.folder)
                unless_the_reader_leaves(lambda: self._print(columns, rows))
            except sqlite3.Error as error:  # also while rows are printed, because they are fetched then
                if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
                    raise KeyboardInterrupt from error
                raise ValueError(f"the query failed: {error}") from error
        return 0

    def _print(self, columns: list[str], rows: Iterable[Cells]) -> None:
        if self.json:
            if twice := [name for name in dict.fromkeys(columns) if columns.count(name) > 1]:
                raise ValueError(f"--json needs a name for every column, and several are called {twice[0]}: use AS")
            _print_json(columns, rows)
        elif self.csv:
            writer = csv.writer(sys.stdout, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows(rows)
        else:
            _print_table(columns, rows)


def _python_has_a_turn() -> None:
    """Called by SQLite now and then. A signal that has arrived raises its KeyboardInterrupt here, and SQLite, which
    cannot pass that on, gives up the statement as interrupted."""


def _ask(connection: sqlite3.Connection, sql: str, run: Path) -> tuple[list[str], Iterable[Cells]]:
    connection.set_authorizer(_no_other_files)
    try:
        cursor = connection.execute(sql)
    except sqlite3.Error as error:
        # Python's own complaints, such as two statements at once, have no code.
        code = getattr(error, "sqlite_errorcode", None)
        if code == sqlite3.SQLITE_INTERRUPT:
            raise
        if code in (sqlite3.SQLITE_AUTH, sqlite3.SQLITE_READONLY):
            raise ValueError(f"a run can only be read ({error}): ask with SELECT") from error
        problem = str(error).rstrip(".")  # some of Python's own end with one
        raise ValueError(f"{problem}. `esper query {run}` lists the tables and views with their columns") from error
    if cursor.description is None:
        raise ValueError("this statement gives no rows: ask with SELECT (or WITH, EXPLAIN, PRAGMA)")
    return [column[0] for column in cursor.description], cursor


def _no_other_files(what: int, *details: str | None) -> int:
    """The store is open for reading only, but ATTACH makes and changes other files; so does VACUUM INTO, by ATTACH."""
    return sqlite3.SQLITE_DENY if what == sqlite3.SQLITE_ATTACH else sqlite3.SQLITE_OK


def _contents(connection: sqlite3.Connection) -> tuple[list[str], Iterable[Cells]]:
    """Tables first, then views, each with its rows and columns."""
    named = connection.execute(
        "SELECT name, type FROM sqlite_schema WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite_%' "
        "ORDER BY type, rowid"
    ).fetchall()
    listed: list[Cells] = []
    for name, kind in named:
        quoted = '"' + name.replace('"', '""') + '"'
        (count,) = connection.execute(f"SELECT count(*) FROM {quoted}").fetchone()
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info({quoted})")]
        listed.append((name, kind, count, ", ".join(columns)))
    return ["name", "kind", "rows", "columns"], listed


def _print_json(columns: list[str], rows: Iterable[Cells]) -> None:
    """Cells by row, so that a large answer needs no memory."""
    from esper.telemetry.records import to_json

    separator = "["
    for row in rows:
        cells = (value.hex() if isinstance(value, bytes) else value for value in row)
        print(separator + "\n  " + to_json(dict(zip(columns, cells, strict=True))), end="")
        separator = ","
    print("\n]" if separator == "," else "[]")


def _print_table(columns: list[str], rows: Iterable[Cells]) -> None:
    table = Table(box=None, pad_edge=False)
    every = list(rows)
    for i, name in enumerate(columns):
        numeric = all(isinstance(row[i], int | float | None) for row in every) and bool(every)
        table.add_column(Text(name), justify="right" if numeric else "left", overflow="fold")
    for row in every:
        table.add_row(*(Text(_shown(value)) for value in row))  # Text: nothing in a message is markup
    # A file or a pipe has no width to fit into.
    console = wide_console(file_width=10_000)
    console.print(table)
    console.print(f"{len(every)} row{'' if len(every) == 1 else 's'}", style="dim", highlight=False)


def _shown(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


COMMAND = Query

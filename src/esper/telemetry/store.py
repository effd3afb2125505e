"""The run store: one SQLite file with everything a run did. Written by one process, read by anyone at any time."""

from __future__ import annotations

import os
import sqlite3
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from esper.telemetry.records import to_json
from esper.telemetry.schema import MIGRATIONS, RUN_TABLES, upgrade_script
from esper.telemetry.writer import BackgroundWriter, Rows, StoreError

STORE_NAME = "run.sqlite"
"""Of the file in a run's folder."""


class RunStore:
    """Writes rows in the background. `StoreRecorder` gives it the records of a run."""

    def __init__(
        self,
        path: Path,
        *,
        capacity: int = 20_000,
        linger: float = 0.5,
        migrations: tuple[str, ...] = MIGRATIONS,
    ) -> None:
        """Open or create the store at `path`, and bring it up to this version."""
        self.path = path.absolute()  # a run that changes its working directory still finds its file
        self._connection = _open(self.path, migrations)
        self._writer = BackgroundWriter(self._connection, self.path, capacity, linger)

    def add(self, *rows: Rows) -> None:
        """Statements with their rows, written together; see `BackgroundWriter`."""
        self._writer.add(rows)

    def describe(self, facts: Mapping[str, object]) -> None:
        """Note facts about the run (its task, its settings) in `meta`; a key that is there already is replaced."""
        rows = [(key, to_json(value)) for key, value in facts.items()]
        self.add(("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows))

    def begin_session(self, from_update: int = 0, version: str = "", command: Sequence[str] = ()) -> None:
        """Note that this process writes from now on, having resumed from update `from_update`."""
        words = " ".join(command or sys.argv)
        row = (time.time(), from_update, os.getpid(), version, words)
        columns = "started, from_update, process, version, command"
        self.add((f"INSERT INTO sessions ({columns}) VALUES (?, ?, ?, ?, ?)", [row]))

    def rewind(self, update: int) -> int:
        """Forget everything after `update`, in one transaction; gives the number of rows that went.

        A run that resumes from the checkpoint of that update then writes the rows of an uninterrupted run.
        """
        return self._writer.change((f"DELETE FROM {name} WHERE update_number > ?", [(update,)]) for name in RUN_TABLES)

    @property
    def last_update(self) -> int:
        """The highest update with a metric on the disk, or 0."""
        self.flush()
        (last,) = self._connection.execute("SELECT max(update_number) FROM metrics").fetchone()
        return int(last or 0)

    def flush(self) -> None:
        """Return when everything is on the disk. Before a checkpoint is written: a checkpoint ahead of its history
        could not be resumed without a gap."""
        self._writer.flush()

    def close(self) -> None:
        """Write what is left. Raises StoreError if anything could not be written; a second call does nothing."""
        self._writer.close()

    def __enter__(self) -> RunStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.close()
        except StoreError:
            if not isinstance(error, StoreError):  # else it has been said
                raise


def find_store(run: Path) -> Path:
    """The store of a run's folder, or the file itself."""
    path = run / STORE_NAME if run.is_dir() else run
    if not path.is_file():
        what = f"has no {STORE_NAME}" if run.is_dir() else "is neither a run's folder nor a run store"
        raise StoreError(f"{run} {what}")
    return path


@contextmanager
def open_readonly(run: Path) -> Iterator[sqlite3.Connection]:
    """A connection to the store of `run` (its folder or its file) that cannot change it, also while it is written."""
    path = find_store(run).absolute()
    connection = _readable(path)
    try:
        yield connection
    finally:
        connection.close()


def _readable(path: Path) -> sqlite3.Connection:
    # A store in a folder where nothing may be created cannot have SQLite's shared memory file; if nobody writes it,
    # it can be read as a file that does not change.
    log = path.with_name(path.name + "-wal")
    modes = ["mode=ro"] if log.exists() and log.stat().st_size > 0 else ["mode=ro", "immutable=1"]
    problem: sqlite3.Error | None = None
    for mode in modes:
        connection = sqlite3.connect(f"{path.as_uri()}?{mode}", uri=True, timeout=30.0)
        try:
            connection.execute("SELECT count(*) FROM sqlite_schema")
        except sqlite3.Error as error:
            connection.close()
            problem = error
        else:
            return connection
    raise StoreError(f"cannot read {path}: {problem}") from problem


def _open(path: Path, migrations: tuple[str, ...]) -> sqlite3.Connection:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path, timeout=30.0, isolation_level=None, check_same_thread=False)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"cannot open the run store {path}: {error}") from error
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        # An fsync for each transaction, a few a second: like a checkpoint, what flush() promised survives a power cut.
        connection.execute("PRAGMA synchronous = FULL")
        _upgrade(connection, path, migrations)
    except sqlite3.Error as error:
        connection.close()
        raise StoreError(f"cannot open the run store {path}: {error}") from error
    except StoreError:
        connection.close()
        raise
    return connection


def _upgrade(connection: sqlite3.Connection, path: Path, migrations: tuple[str, ...]) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(migrations):
        raise StoreError(
            f"{path} was written by a newer Esper (version {version} of the store; this one knows {len(migrations)}): "
            "upgrade Esper to continue this run"
        )
    if version < len(migrations):
        try:
            connection.executescript(upgrade_script(version, migrations))
        except sqlite3.Error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

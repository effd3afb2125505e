"""The run store: one SQLite file with everything a run did. Written by one process, read by anyone at any time.

Rows wait in memory until `flush`, which writes them in one transaction: once an update, before its checkpoint. So a
reader sees whole updates, and a killed process loses only what a resumed run does again. There is no writing thread:
what it took off the training loop is about 10 ms an update (benchmarks/telemetry.py).
"""

from __future__ import annotations

import atexit
import os
import sqlite3
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from esper.telemetry.records import to_json
from esper.telemetry.schema import MIGRATIONS, RUN_TABLES, upgrade_script

STORE_NAME = "run.sqlite"
"""Of the file in a run's folder."""
CAPACITY = 20_000
"""Calls that may wait in memory (about 50 updates of 400 decisions): a caller who never flushes needs no more."""

Statement = tuple[str, Sequence[Sequence[object]]]
"""With placeholders, and what to run it for."""


class StoreError(RuntimeError):
    """The run store cannot be opened or written, with the reason."""


class RunStore:
    """Keeps rows until `flush` writes them. `StoreRecorder` gives it the records of a run."""

    def __init__(self, path: Path, *, capacity: int = CAPACITY, migrations: tuple[str, ...] = MIGRATIONS) -> None:
        """Open or create the store at `path`, and bring it up to this version."""
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, not {capacity}")
        self.path = path.absolute()  # a run that changes its working directory still finds its file
        self._connection = _open(self.path, migrations)
        self._capacity = capacity
        self._file = os.stat(self.path).st_ino
        self._process = os.getpid()
        self._pending: list[Statement] = []
        self._error: Exception | None = None
        self._closed = False
        atexit.register(self.close)  # nothing is lost where a caller does not close

    def add(self, *statements: Statement) -> None:
        """Keep statements for the next flush; those of one call are never split over two transactions."""
        if os.getpid() != self._process:
            raise StoreError(
                f"{self.path} is written by process {self._process}: a forked worker has to send its records there"
            )
        self._check()
        self._pending += statements
        if len(self._pending) >= self._capacity:
            self.flush()

    def describe(self, facts: Mapping[str, object]) -> None:
        """Note facts about the run (its task, its settings) in `meta`; a key that is there already is replaced."""
        rows = [(key, to_json(value)) for key, value in facts.items()]
        self.add(("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows))

    def begin_session(self, from_update: int, version: str, command: Sequence[str] = ()) -> None:
        """Note that this process writes from now on, having resumed from update `from_update`."""
        words = " ".join(command or sys.argv)
        row = (time.time(), from_update, os.getpid(), version, words)
        columns = "started, from_update, process, version, command"
        self.add((f"INSERT INTO sessions ({columns}) VALUES (?, ?, ?, ?, ?)", [row]))

    def rewind(self, update: int) -> int:
        """Delete everything after `update`, in one transaction; gives the number of rows that went.

        A run that resumes from the checkpoint of that update then writes the rows of an uninterrupted run.
        """
        self.flush()
        before = self._connection.total_changes
        self.add(*((f"DELETE FROM {name} WHERE update_number > ?", [(update,)]) for name in RUN_TABLES))
        self.flush()
        return self._connection.total_changes - before

    def flush(self) -> None:
        """Return when everything is on the disk. Before a checkpoint is written: a checkpoint ahead of its history
        could not be resumed without a gap."""
        self._check()
        if self._pending:
            try:
                self._write(self._pending)
            except Exception as error:  # whatever it is, later calls must fail, too
                self._error = error
                self._check()
            self._pending.clear()

    def close(self) -> None:
        """Write what is left. Raises StoreError if anything could not be written; a second call does nothing."""
        if self._closed or os.getpid() != self._process:
            return
        try:
            self.flush()
        finally:
            self._closed = True
            atexit.unregister(self.close)
            self._connection.close()

    def __enter__(self) -> RunStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.close()
        except StoreError:
            if not isinstance(error, StoreError):  # else it has been said
                raise

    def _write(self, statements: Iterable[Statement]) -> None:
        # A file that was removed can still be written on most systems: without this look, into nowhere.
        if os.stat(self.path).st_ino != self._file:
            raise FileNotFoundError("the file was replaced by another one during the run")
        by_sql: dict[str, list[Sequence[object]]] = {}
        for sql, rows in statements:
            by_sql.setdefault(sql, []).extend(rows)
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            for sql, rows in by_sql.items():
                self._connection.executemany(sql, rows)
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # some errors, a full disk among them, have already rolled back
                self._connection.execute("ROLLBACK")
            raise

    def _check(self) -> None:
        """After an error nothing more is taken: the history would have a gap."""
        if isinstance(self._error, sqlite3.IntegrityError):
            raise StoreError(
                f"{self.path}: something was recorded twice ({self._error}). Within an update and an arm each episode "
                "needs an `env` of its own, and a run that resumes has to rewind first"
            ) from self._error
        if self._error is not None:
            gone = isinstance(self._error, FileNotFoundError) and self._error.errno is not None
            why = "the file was removed during the run" if gone else str(self._error)
            raise StoreError(
                f"cannot write the run store {self.path}: {why}. What was written before is whole; once there is space "
                "and access again, the run can be resumed from its last checkpoint"
            ) from self._error
        if self._closed:
            raise StoreError(f"the run store {self.path} is closed: nothing more can be recorded")


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
    # A store in a folder where nothing may be created cannot have SQLite's shared memory file; if it is at rest,
    # it can be read as a file that does not change.
    log = path.with_name(path.name + "-wal")
    modes = ["mode=ro"] if _size(log) > 0 else ["mode=ro", "immutable=1"]
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


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # a run that ends removes its log at any moment
        return 0


def _open(path: Path, migrations: tuple[str, ...]) -> sqlite3.Connection:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path, timeout=30.0, isolation_level=None)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"cannot open the run store {path}: {error}") from error
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        # An fsync for each transaction, one an update: like a checkpoint, what flush() wrote survives a power cut.
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
            f"{path} was written by a newer Esper (version {version} of the store; this one reads {len(migrations)}): "
            "upgrade Esper to continue this run"
        )
    if version < len(migrations):
        try:
            connection.executescript(upgrade_script(version, migrations))
        except sqlite3.Error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

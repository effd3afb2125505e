"""The one thread that writes to a run store: batches, back-pressure, and errors that reach whoever records.

Rows that are handed over in one call are never split over two transactions, so a reader sees all of them or none.
Nothing is dropped: when the writer is behind by `capacity` calls, the caller waits.
"""

from __future__ import annotations

import atexit
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

Row = Sequence[object]
Rows = tuple[str, Sequence[Row]]
"""A statement with placeholders, and the rows to run it for."""


class StoreError(RuntimeError):
    """The run store cannot be opened or written, with the reason."""


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All or nothing. The connection must be in autocommit mode, so that this is the only place that begins one."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # some errors, a full disk among them, have already rolled back
            connection.execute("ROLLBACK")
        raise


class BackgroundWriter:
    """Takes rows from any thread of one process and writes them in the background."""

    def __init__(self, connection: sqlite3.Connection, path: Path, capacity: int = 20_000, linger: float = 0.5) -> None:
        """`capacity` calls may wait to be written; they wait `linger` seconds at most to be written together."""
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, not {capacity}")
        self._connection, self._path = connection, path
        self._capacity, self._linger = capacity, linger
        self._file = os.stat(path).st_ino
        self._process = os.getpid()
        self._pending: list[Sequence[Rows]] = []
        self._urgent = self._writing = self._closing = False
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._work, self._progress = threading.Condition(self._lock), threading.Condition(self._lock)
        self._connection_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="esper run store", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a caller who forgets to close still loses nothing

    def add(self, rows: Sequence[Rows]) -> None:
        """Hand rows over; they are written together. Waits while the writer is behind."""
        if os.getpid() != self._process:
            raise StoreError(
                f"{self._path} is written by process {self._process}: a forked worker has to send its records there"
            )
        with self._lock:
            self._check()
            while len(self._pending) >= self._capacity and self._error is None:
                self._urgent = True
                self._work.notify()
                self._progress.wait()
            self._check()
            self._pending.append(rows)
            if len(self._pending) >= self._capacity:
                self._work.notify()

    def flush(self) -> None:
        """Return when everything handed over so far is on the disk."""
        with self._lock:
            self._urgent = True
            self._work.notify()
            self._progress.wait_for(lambda: self._error is not None or not (self._pending or self._writing))
            self._check()

    def change(self, rows: Iterable[Rows]) -> int:
        """Write everything, then run these statements in one transaction of their own; gives the rows changed."""
        self.flush()
        before = self._connection.total_changes
        with self._connection_lock:
            try:
                self._write(rows)
            except (sqlite3.Error, OSError) as error:
                raise self._explained(error) from error
        return self._connection.total_changes - before

    def close(self) -> None:
        """Write what is left and stop. Raises if anything could not be written; later calls do nothing."""
        if os.getpid() != self._process:
            return
        with self._lock:
            if self._closing:
                return
            self._closing = self._urgent = True
            self._work.notify()
        self._thread.join()
        atexit.unregister(self.close)
        self._connection.close()
        if self._error is not None:
            raise self._explained(self._error) from self._error

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._lock:
                self._work.wait_for(self._due, timeout=self._linger)
                batch, self._pending = self._pending, []
                self._urgent, self._writing = False, bool(batch)
                last = self._closing
            try:
                if batch and self._error is None:
                    with self._connection_lock:
                        self._write(rows for call in batch for rows in call)
            except BaseException as error:  # whatever it is, whoever records must hear of it
                with self._lock:
                    self._error = error
            with self._lock:
                self._writing = False
                self._progress.notify_all()
                if last and not self._pending:
                    return

    def _due(self) -> bool:
        return self._urgent or len(self._pending) >= self._capacity

    def _write(self, rows: Iterable[Rows]) -> None:
        # A file that was removed can still be written on most systems: without this look, into nowhere.
        if os.stat(self._path).st_ino != self._file:
            raise FileNotFoundError("the file was replaced by another one during the run")
        by_statement: dict[str, list[Row]] = {}
        for statement, several in rows:
            by_statement.setdefault(statement, []).extend(several)
        with transaction(self._connection):
            for statement, several in by_statement.items():
                self._connection.executemany(statement, several)

    # -- errors --------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._error is not None:
            raise self._explained(self._error) from self._error
        if self._closing:
            raise StoreError(f"the run store {self._path} is closed: nothing more can be recorded")

    def _explained(self, error: BaseException) -> StoreError:
        if isinstance(error, sqlite3.IntegrityError):
            return StoreError(
                f"{self._path}: something was recorded twice ({error}). Within an update and an arm each episode needs "
                "an `env` of its own, and a run that resumes has to rewind first"
            )
        gone = isinstance(error, FileNotFoundError) and error.errno is not None
        why = "the file was removed during the run" if gone else str(error)
        return StoreError(
            f"cannot write the run store {self._path}: {why}. What was written before is whole; once there is space "
            "and access again, the run can be resumed from its last checkpoint"
        )

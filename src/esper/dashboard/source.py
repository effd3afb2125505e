"""What can be watched: the folder of a run, its store, or the folder of a grown network. Opened for reading only."""

from __future__ import annotations

import json
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from esper.dashboard.growth_recorder import HISTORY, store_of_history
from esper.telemetry.schema import MIGRATIONS
from esper.telemetry.store import STORE_NAME, StoreError, open_readonly

Stamp = tuple[int, ...]
"""Changes whenever the store does."""


@dataclass(frozen=True, slots=True)
class Source:
    """One run or one grown network."""

    name: str
    folder: Path
    """Downloads come from here and from nowhere else."""
    store: Path
    keeps: tempfile.TemporaryDirectory[str] | None = field(default=None, compare=False, repr=False)
    """Where the store of a finished network is, which has only its history; gone when this is."""

    @classmethod
    def of(cls, path: Path) -> Source:
        """Refuses what is neither, in words."""
        folder = path if path.is_dir() else path.parent
        name = folder.resolve().name or str(folder)
        store = folder / STORE_NAME if path.is_dir() else path
        if not store.is_file() and path.is_dir() and (path / HISTORY).is_file():
            keeps = tempfile.TemporaryDirectory(prefix="esper-watch-")
            return cls(name, folder, store_of_history(path / HISTORY, Path(keeps.name) / STORE_NAME), keeps)
        if not store.is_file():
            raise StoreError(
                f"{path} is no run and no grown network: there is neither {STORE_NAME} nor {HISTORY} in it"
                if path.is_dir()
                else f"{path} is neither a folder nor a run store"
            )
        with open_readonly(store) as connection:
            _check(connection, store)
        return cls(name, folder, store)

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection of its own for whoever asks; a run that writes does not wait for it."""
        with open_readonly(self.store) as connection:
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA query_only = 1")
            try:
                _fill_in(connection)
                yield connection
            except (sqlite3.Error, json.JSONDecodeError) as error:
                raise StoreError(f"{self.store} cannot be read, it may be damaged: {error}") from error

    def stamp(self) -> Stamp:
        """From the files alone, so that looking often costs nothing; a comparison that is written counts, too."""
        return (*self._store_changes(), *_changes(sorted(self.folder.glob("comparison*/comparison.json"))))

    def written(self) -> float:
        """When the store last changed, in seconds since 1970."""
        return max(self._store_changes()[::2], default=0) / 1e9

    def _store_changes(self) -> Stamp:
        return _changes([self.store, self.store.with_name(self.store.name + "-wal")])

    def is_inside(self, path: Path) -> bool:
        """Whether a file is one of this folder's, links followed."""
        return path.resolve().is_relative_to(self.folder.resolve())


def _changes(paths: Sequence[Path]) -> Stamp:
    """Time and size of each file. An empty one is left out: a reader makes the log of a store at rest."""
    found: list[int] = []
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            continue
        if status.st_size:
            found += [status.st_mtime_ns, status.st_size]
    return tuple(found)


def _check(connection: sqlite3.Connection, path: Path) -> None:
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    if not {"metrics", "episodes", "decisions", "events", "meta"} <= tables:
        raise StoreError(f"{path} is an SQLite file, but not the store of a run")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(MIGRATIONS):
        raise StoreError(
            f"{path} was written by a newer Esper (version {version} of the store; this one reads {len(MIGRATIONS)}): "
            "upgrade Esper to look at it"
        )


def _fill_in(connection: sqlite3.Connection) -> None:
    """A store of an older version lacks columns that questions name: views of this connection stand in for them."""
    columns = [row["name"] for row in connection.execute("PRAGMA table_info(decisions)")]
    has_details = connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'step_details'").fetchone()
    if "accuracy" in columns and has_details:
        return
    connection.execute("PRAGMA query_only = 0")  # of temporary views only: the file itself is open for reading
    connection.execute(
        "CREATE TEMP VIEW decisions AS SELECT *, NULL AS accuracy, NULL AS parameters FROM main.decisions"
    )
    connection.execute(
        "CREATE TEMP VIEW step_details AS SELECT update_number, arm, env, epoch, NULL AS slots, NULL AS choices "
        "FROM main.decisions WHERE 0"
    )
    connection.execute("PRAGMA query_only = 1")


def meta(connection: sqlite3.Connection) -> dict[str, Any]:
    """Facts about the run by name; one that cannot be read is left out."""
    found: dict[str, Any] = {}
    for row in connection.execute("SELECT key, value FROM meta"):
        try:
            found[row["key"]] = json.loads(row["value"])
        except ValueError:
            continue
    return found

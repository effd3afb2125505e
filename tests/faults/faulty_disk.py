"""A disk that fails at its k-th operation: the process is killed, the power is cut, or there is no space any more.

Operations are found by tracing, in the process that is to fail: what Python writes, syncs, renames, removes and makes
in one folder, and the statements that SQLite runs. `FaultyDisk` replaces the functions of this process for good, so it
is for child processes.

After a power cut only what was synced is there: of a file its content at its last fsync, of a folder the names at its
last fsync (or, as other file systems have it, the names of now, for files that may be empty). What SQLite had written
when a statement ended outside a transaction counts as synced, because the store runs with `synchronous = FULL`; that is
asked at every COMMIT.
"""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import pickle
import shutil
import signal
import sqlite3
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STORE_FILES = ("run.sqlite", "run.sqlite-wal")
FULL = sqlite3.OperationalError("database or disk is full")


@dataclass
class Durable:
    """What would be there after a power cut, by inode."""

    content: dict[int, bytes] = field(default_factory=dict)
    names: dict[int, dict[str, tuple[int, bool]]] = field(default_factory=dict)
    """Of a folder: for each name its inode, and whether it is a folder."""
    store: dict[str, bytes] = field(default_factory=dict)
    """SQLite's files by their path in the root."""


class FaultyDisk:
    """Everything under `root`. `mode`: "count" fails never, "kill", "cut" and "full" at operation `at`."""

    def __init__(self, root: Path, mode: str, at: int, scratch: Path) -> None:
        """What a process that is killed must leave to the tests goes to `scratch`."""
        self.root, self.mode, self.at, self.scratch = root.resolve(), mode, at, scratch
        self.operations: list[str] = []
        self.durable = Durable()
        self._note_folder(self.root)
        self._last_statement = ""

    def operation(self, what: str, *, grows: bool) -> None:
        """Count one; fail if it is time. `grows`: it needs space."""
        self.operations.append(what)
        if len(self.operations) <= self.at or self.mode == "count":
            return
        if self.mode == "full":
            if grows:
                raise FULL if what.startswith("sql") else OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return
        if self.mode == "cut":
            (self.scratch / "cut").write_bytes(pickle.dumps(self.durable))
        self.tell(self.operations[:-1])
        os.kill(os.getpid(), signal.SIGKILL)

    def tell(self, operations: list[str]) -> None:
        """Which were carried out."""
        (self.scratch / "operations.json").write_text(json.dumps(operations))

    # -- Python's files ------------------------------------------------------------------------------------------------

    def install(self) -> None:
        real_open, real_fsync, real_os_open = io.open, os.fsync, os.open

        def opened(file: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
            found = real_open(file, mode, *rest, **more)
            if not set(mode) & set("wax+") or not self._ours(found.fileno()):
                return found
            self._forget_new(found.fileno())
            return _Written(found, self)

        def os_open(path: Any, flags: int, *rest: Any, **more: Any) -> int:
            handle = real_os_open(path, flags, *rest, **more)
            if flags & os.O_CREAT and self._ours(handle):
                self._forget_new(handle)
            return handle

        def fsync(handle: Any) -> None:
            number = handle if isinstance(handle, int) else handle.fileno()
            if self._ours(number):
                self.operation(f"fsync {self._name(number)}", grows=True)
            real_fsync(handle)
            if self._ours(number):
                self._synced(number)

        io.open = builtins.open = opened  # type: ignore[assignment]
        os.open, os.fsync = os_open, fsync  # type: ignore[assignment]
        for name, grows in {"replace": True, "rename": True, "link": True, "mkdir": True, "unlink": False}.items():
            setattr(os, name, self._counted(name, getattr(os, name), grows))
        os.remove = os.unlink
        sqlite3.connect = self._connect  # type: ignore[assignment]

    def _counted(self, name: str, real: Callable[..., Any], grows: bool) -> Callable[..., Any]:
        def call(path: Any, *rest: Any, **more: Any) -> Any:
            if Path(path).absolute().is_relative_to(self.root):
                self.operation(f"{name} {Path(path).name}", grows=grows)
            return real(path, *rest, **more)

        return call

    def _ours(self, handle: int) -> bool:
        """Of `root`, and not SQLite's: a path of the kernel's, so links do not matter."""
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        return path.is_relative_to(self.root) and not path.name.startswith("run.sqlite")

    def _name(self, handle: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{handle}")).name

    def _forget_new(self, handle: int) -> None:
        """An inode may be used again: the content of a new file is not that of the one before."""
        if os.fstat(handle).st_size == 0:
            self.durable.content.pop(os.fstat(handle).st_ino, None)

    def _synced(self, handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            self._note_folder(path)
        else:
            self.durable.content[os.fstat(handle).st_ino] = Path(f"/proc/self/fd/{handle}").read_bytes()

    def _note_folder(self, path: Path) -> None:
        with os.scandir(path) as entries:
            names = {e.name: (e.inode(), e.is_dir()) for e in entries if not e.name.startswith("run.sqlite")}
        self.durable.names[path.stat().st_ino] = names

    # -- SQLite --------------------------------------------------------------------------------------------------------

    def _connect(self, *arguments: Any, **settings: Any) -> sqlite3.Connection:
        disk = self

        class Traced(sqlite3.Connection):
            def __init__(self, *arguments: Any, **settings: Any) -> None:
                super().__init__(*arguments, **settings)
                if disk.mode != "full":  # a trace cannot refuse; it sees every statement of a script, and every row
                    self.set_trace_callback(disk.statement)

            def execute(self, sql: str, *rest: Any) -> sqlite3.Cursor:
                return self._run(super().execute, sql, *rest)

            def executemany(self, sql: str, *rest: Any) -> sqlite3.Cursor:
                return self._run(super().executemany, sql, *rest)

            def executescript(self, sql: str) -> sqlite3.Cursor:
                return self._run(super().executescript, sql)

            def _run(self, run: Callable[..., sqlite3.Cursor], sql: str, *rest: Any) -> sqlite3.Cursor:
                if disk.mode == "full":
                    disk.operation(f"sql {sql[:40]}", grows=not sql.startswith(("SELECT", "ROLLBACK", "PRAGMA user")))
                cursor = run(sql, *rest)
                if sql == "COMMIT":
                    (level,) = super().execute("PRAGMA synchronous").fetchone()
                    assert level >= 2, "a COMMIT that SQLite does not sync"
                if not self.in_transaction:
                    disk.store_synced()
                return cursor

            def close(self) -> None:
                super().close()
                disk.store_synced()

        return _REAL_CONNECT(*arguments, factory=Traced, **settings)

    def statement(self, sql: str) -> None:
        """The rows of one statement are one operation: within a transaction they come and go together."""
        begins = " ".join(sql.split()[:4])[:40]
        again = begins == self._last_statement and begins.startswith("INSERT")
        if again or begins == "PRAGMA synchronous":  # the latter is asked by this file
            return
        self._last_statement = begins
        self.operation(f"sql {begins}", grows=True)

    def store_synced(self) -> None:
        now = {path for name in STORE_FILES for path in self.root.rglob(name)}
        self.durable.store = {str(path.relative_to(self.root)): path.read_bytes() for path in now}


_REAL_CONNECT = sqlite3.connect


class _Written:
    """A file whose writes are counted. On a full disk half of what is written gets there."""

    def __init__(self, file: Any, disk: FaultyDisk) -> None:
        self._file, self._disk = file, disk

    def write(self, content: Any) -> Any:
        try:
            self._disk.operation(f"write {Path(str(self._file.name)).name}", grows=True)
        except OSError:
            self._file.write(content[: len(content) // 2])
            raise
        return self._file.write(content)

    def __enter__(self) -> _Written:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def after_power_cut(root: Path, cut_file: Path, *, names_synced: bool) -> None:
    """Leave in `root` what the disk kept. `names_synced`: names are kept as folders were synced; else, as they are now,
    in front of content that may be gone."""
    durable: Durable = pickle.loads(cut_file.read_bytes())
    cut_file.unlink()
    if names_synced:
        top = root.stat().st_ino
        for path in root.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        _make(root, top, durable)
    else:
        for path in [path for path in root.rglob("*") if path.is_file()]:
            if path.name.startswith("run.sqlite"):
                path.unlink()
            else:
                path.write_bytes(durable.content.get(path.stat().st_ino, b""))
    for name, content in durable.store.items():
        if (root / name).parent.is_dir():
            (root / name).write_bytes(content)


def _make(folder: Path, inode: int, durable: Durable) -> None:
    for name, (number, is_folder) in durable.names.get(inode, {}).items():
        if is_folder:
            (folder / name).mkdir()
            _make(folder / name, number, durable)
        else:
            (folder / name).write_bytes(durable.content.get(number, b""))

"""Where commands write: found out before the work, not after it, and not over results that are there."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path


def file_name(task: str) -> str:
    """Of what is kept about a task: `mixed/vector` is one name, not a folder in a folder."""
    return task.replace("/", "-")


@contextmanager
def results_folder(chosen: Path | None, usual: Path) -> Iterator[Path]:
    """The folder that somebody chose, or a new one like the usual, which goes again if there is nothing to keep."""
    if chosen is not None:
        claim(chosen)
        yield chosen
        return
    out = new_folder(usual.parent, usual.name)
    try:
        yield out
    finally:
        with suppress(OSError):  # only an empty folder can be removed
            out.rmdir()


def refuse_if_it_holds(folder: Path | None, files: Sequence[str], what: str) -> None:
    """What was written there before would be lost."""
    if folder is not None and any((folder / name).exists() for name in files):
        raise ValueError(f"{folder} holds {what} already: choose another folder with --out")


def new_folder(parent: Path, name: str) -> Path:
    """The first of NAME, NAME-2, … that does not exist, made at once: another command may be looking for one, too."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for i in count(1):
            out = parent / (f"{name}-{i}" if i > 1 else name)
            with suppress(FileExistsError):
                out.mkdir()
                break
    except OSError as error:
        raise OSError(f"cannot write to {parent} ({error.strerror}): choose another folder with --out") from error
    return out


def claim(out: Path) -> None:
    """Find out whether results can be kept in this folder."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        _try_folder(out)
    except OSError as error:
        raise OSError(f"cannot write to {out} ({error.strerror}): choose another folder with --out") from error


def claim_file(path: Path, option: str, *, new: bool = False) -> None:
    """Find out whether the file can be written; where it must be `new`, nothing may be there."""
    if new and (path.is_file() or path.is_symlink()):
        raise ValueError(f"{path} exists already: choose another file with {option}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        if not path.exists():
            _try_folder(path.parent)
        elif not os.access(path, os.W_OK):  # not opened: a pipe would wait for its reader
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise OSError(f"cannot write {path} ({error.strerror}): choose another file with {option}") from error


def _try_folder(folder: Path) -> None:
    """By a file without a name, where the system has such, else with one that nothing had: no link can be laid."""
    tempfile.TemporaryFile(dir=folder).close()

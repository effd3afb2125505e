"""A command that was refused leaves nothing: no empty folder, and of a new run that made no step, no file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from esper.cli.options import OUTPUTS

USUAL = (Path("grown"), Path("compared"), Path("runs"))
"""Where results go if nobody said."""
RUN_FILES = ("config.json", "run.sqlite", "run.sqlite-wal", "run.sqlite-shm", "checkpoints/start.safetensors", ".lock")
"""What a run's folder has before its first update."""


@contextmanager
def no_empty_folders(command: object) -> Iterator[None]:
    """If the command fails, the folders that it made and that hold nothing are removed."""
    named = [getattr(command, name, None) for name in OUTPUTS]
    paths = [Path(value) for value in named if isinstance(value, str | Path)]
    with no_empty_folder(*paths, *(path.with_suffix("") for path in paths if path.name), *USUAL):
        yield


@contextmanager
def no_empty_folder(*paths: Path) -> Iterator[None]:
    """The same for these folders, and those that they are in."""
    missing = [folder for path in paths for folder in (path, *path.parents) if not os.path.exists(folder)]
    try:
        yield
    except BaseException:
        for folder in sorted(missing, key=lambda folder: -len(folder.parts)):
            with suppress(OSError, ValueError):  # it is no folder, or not empty, or was not made
                folder.rmdir()
        raise


class NewRun:
    """A run's folder that was made a moment ago."""

    begun = False
    """From its first step on, what it wrote is kept, whatever happens."""


@contextmanager
def discarded_unless_begun(folder: Path, *, new: bool) -> Iterator[NewRun]:
    """What a new run wrote goes again if it fails, or is interrupted, before its first step. Only under the run's lock:
    the files of another process must not be taken for one's own."""
    run = NewRun()
    had_tensorboard = (folder / "tensorboard").exists()
    try:
        yield run
    except BaseException:
        if new and not run.begun:
            for name in RUN_FILES:
                (folder / name).unlink(missing_ok=True)
            if not had_tensorboard:
                shutil.rmtree(folder / "tensorboard", ignore_errors=True)
        raise

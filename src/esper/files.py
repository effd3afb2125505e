"""Files that are there whole or not at all, whatever happens while they are written. Links are not followed."""

from __future__ import annotations

import io
import os
from pathlib import Path


def write_whole(path: Path, content: bytes | str) -> None:
    """Beside its place, flushed to disk, then renamed: after a crash the old file or the new one is there.

    A link at `path` is replaced; what it led to is not touched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with _create(temporary) as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)  # the rename itself


def sync_folder(path: Path) -> None:
    """Which files a folder has is known to the disk, too."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _create(path: Path) -> io.BufferedWriter:
    """A new file. What has its name, of a process that was killed or a link that was laid, is removed, not opened."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o666)
    except FileExistsError:
        path.unlink()
        descriptor = os.open(path, flags, 0o666)
    return os.fdopen(descriptor, "wb")

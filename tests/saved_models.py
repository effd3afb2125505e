"""Folders of saved models that tests change on purpose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from esper.growth.folder import FILES, with_digests


def sealed(architecture: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The architecture with the digests of the files that are in the folder now."""
    return with_digests(
        architecture, {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}
    )

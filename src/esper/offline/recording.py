"""Recordings on disk: a folder of safetensors files, one per append. Reading one never executes anything.

Every file is complete in itself (schema, provenance, episodes), is written beside its place, flushed and renamed. So
an append that is killed, or finds the disk full, leaves all earlier episodes as they were, and nothing needs repair: a
file is there or it is not. There is no index that could disagree with the files. A digest in each shows damage.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from esper.agent.tensor_files import TensorFile, TensorFileError, read_header, read_tensor_file, write_tensor_file
from esper.offline.episodes import Episodes, RecordingError, Schema, check, from_tensors, join, tensors_of

RECORDING_VERSION = 2
"""What this code writes: 1 had no digest, which is all that differs, so both are read."""
READ_VERSIONS = (1, 2)
DIGEST_VERSION = 2
"""From here on a file without a digest is damaged."""
_HEADER = "esper-episodes"
_PATTERN = "episodes-*.safetensors"


@dataclass(frozen=True, slots=True)
class Recording:
    """What a folder holds."""

    episodes: Episodes
    provenance: tuple[dict[str, Any], ...]
    """How each file came about, in the order of the files."""

    @property
    def task(self) -> str | None:
        """The family that the episodes are from; None if they are from several, or from something else."""
        first, *others = [entry.get("task") for entry in self.provenance]  # compared: a file may hold a list there
        return first if isinstance(first, str) and all(task == first for task in others) else None


def append(folder: Path, episodes: Episodes, schema: Schema, provenance: Mapping[str, Any]) -> Path:
    """Add episodes to the recording in `folder`, which is made if need be; gives the new file."""
    check(episodes, schema)
    present = _files(folder)
    if present:
        _header_of(
            present[0], schema
        )  # a recording holds one schema: find out before the work is written, not when read
    header = {
        "version": RECORDING_VERSION,
        "schema": schema.to_json(),
        "controllers": list(episodes.controllers),
        "provenance": dict(provenance),
    }
    number = 1 + max((int(path.stem.split("-")[1]) for path in present), default=0)
    # The random part keeps two processes that record into one folder from writing over each other.
    path = folder / f"episodes-{number:06d}-{secrets.token_hex(4)}.safetensors"
    write_tensor_file(path, tensors_of(episodes), _HEADER, header)
    return path


def read(folder: Path, schema: Schema) -> Recording:
    """All episodes of a recording. A file that is damaged, or of another schema, is refused by name, never skipped."""
    if not folder.is_dir():
        raise RecordingError(f"there is no recording {folder}: make one with esper record --out {folder}")
    files = _files(folder)
    if not files:
        raise RecordingError(f"{folder} holds no recorded episodes (no {_PATTERN})")
    parts, provenance = [], []
    for path in files:
        header, episodes = _read(path, schema)
        parts.append(episodes)
        provenance.append(header["provenance"])
    episodes = join(parts)
    # By problem, whatever order several processes finished in: what is learnt must not depend on it.
    place = torch.tensor([sorted(episodes.controllers).index(name) for name in episodes.controllers])
    order = torch.argsort(episodes.draw * len(place) + place[episodes.controller], stable=True)
    return Recording(episodes.select(order), tuple(provenance))


def next_draw(folder: Path, schema: Schema, first: int) -> int:
    """The number after the last problem that is recorded in `folder`, at least `first`."""
    if not folder.exists() or not _files(folder):
        return first
    return max(first, int(read(folder, schema).episodes.draw.max()) + 1)


def _files(folder: Path) -> list[Path]:
    """A file that was being written when its process died does not have this kind of name yet."""
    found = sorted(folder.glob(_PATTERN))
    for path in found:
        if not path.stem.split("-")[1].isdecimal():
            raise RecordingError(f"{path} does not have the name of a recorded file; move it elsewhere")
    return found


def _read(path: Path, schema: Schema) -> tuple[dict[str, Any], Episodes]:
    """Header and episodes of one opening, checked."""
    try:
        file = read_tensor_file(path, _HEADER)
    except TensorFileError as error:
        raise _refusal(path, f"it is damaged, cut short, or no safetensors file ({error})") from error
    header = _parsed(path, file.header, schema)
    if header["version"] >= DIGEST_VERSION and not file.has_digest:
        raise _refusal(path, "it is damaged: its header has lost the digest of its contents")
    return header, _episodes(path, header, file, schema)


def _header_of(path: Path, schema: Schema) -> dict[str, Any]:
    try:
        text, _ = read_header(path, _HEADER)
    except TensorFileError as error:
        raise _refusal(path, f"it is damaged, cut short, or no safetensors file ({error})") from error
    return _parsed(path, text, schema)


def _parsed(path: Path, text: str | None, schema: Schema) -> dict[str, Any]:
    """The JSON of a file, checked: its form, its version, its schema."""
    if text is None:
        raise _refusal(path, "it holds tensors, but no recorded episodes")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refusal(path, f"its header is not JSON ({error})") from error
    if not isinstance(header, dict) or not isinstance(header.get("version"), int):
        raise _refusal(path, "its header says no version")
    if header["version"] not in READ_VERSIONS:
        raise _refusal(path, f"it has version {header['version']}, this Esper reads {RECORDING_VERSION}")
    names = header.get("controllers")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise _refusal(path, "its header names no controllers")
    if not isinstance(header.get("schema"), dict) or not isinstance(header.get("provenance"), dict):
        raise _refusal(path, "its header has no schema or no provenance")
    if differences := schema.differences(header["schema"]):
        raise _refusal(path, f"it was recorded under another schema: {'; '.join(differences)}")
    return header


def _episodes(path: Path, header: dict[str, Any], file: TensorFile, schema: Schema) -> Episodes:
    try:
        episodes = from_tensors(file.tensors, header["controllers"])
        check(episodes, schema)
    except RecordingError as error:
        raise _refusal(path, str(error)) from error
    return episodes


def _refusal(path: Path, why: str) -> RecordingError:
    why = " ".join(why.split())[:500]  # what a hostile file says about itself must not fill a screen
    return RecordingError(f"{path} was refused: {why}")

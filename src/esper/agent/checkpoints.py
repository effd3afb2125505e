"""Checkpoints: named tensors and JSON in one safetensors file. Reading one never executes anything.

A file is written beside its place, flushed to disk, then renamed over it, so there is always a whole one. `data` is any
JSON: the network's configuration, counters, and what the training loop wants to keep. A digest shows damage.

Older versions are not guessed at while loading: `load_checkpoint` refuses them and names the command, and
`upgrade_checkpoint` rewrites them, one registered step per version. Version 2 differs from 3 in the digest alone, and
is read as it is: the policies that come with Esper have that version.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.agent.tensor_files import TensorFileError, read_header, read_tensor_file, write_tensor_file
from esper.config import ConfigError, settings_from
from esper.errors import first_line, shown
from esper.policy.network import NetworkConfig

CHECKPOINT_VERSION = 3
"""What this code writes.

1  a torch.save dictionary: network, optimizer, config, update_count. No random state, no return statistics.
2  safetensors with a JSON header: everything that determines the future, so that a resumed run is the same run.
3  the same with a digest, which must be there.
"""
READ_VERSIONS = (2, 3)
"""What this code reads. A digest that is there is checked in both."""
DIGEST_VERSION = 3
"""From here on a file without a digest is damaged."""

_HEADER = "esper"


class CheckpointError(ValueError):
    """A file that is no checkpoint, or none for this purpose. The message says what to do."""


class DamagedCheckpointError(CheckpointError):
    """A file that is not what was written, or that nothing can go on from. An earlier one may be whole."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a file holds."""

    tensors: dict[str, Tensor]
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What can be said about a file without reading its tensors (version 1: with reading them)."""

    path: Path
    version: int
    data: dict[str, Any]
    tensors: dict[str, tuple[int, ...]]
    """Shapes by name."""

    @property
    def current(self) -> bool:
        return self.version == CHECKPOINT_VERSION

    @property
    def readable(self) -> bool:
        """Without an upgrade."""
        return self.version in READ_VERSIONS


def save_checkpoint(path: str | Path, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
    """Write atomically: after a crash the old file or the new one is there, never half of one."""
    write_tensor_file(Path(path), tensors, _HEADER, {"version": CHECKPOINT_VERSION, "data": dict(data)})


def load_checkpoint(path: str | Path, device: torch.device | str = "cpu") -> Checkpoint:
    """Header and tensors of one opening, their digest checked."""
    version, checkpoint = _read(_present(path), device)
    if version > CHECKPOINT_VERSION:
        raise CheckpointError(
            f"{path} is a checkpoint of version {version}, this Esper reads {CHECKPOINT_VERSION}: use a newer one"
        )
    if version not in READ_VERSIONS:
        raise CheckpointError(
            f"{path} is a checkpoint of version {version}, this Esper reads {CHECKPOINT_VERSION}. "
            f"Convert it with: esper checkpoint upgrade {path}"
        )
    return checkpoint


def inspect_checkpoint(path: str | Path) -> CheckpointInfo:
    """Version, JSON and shapes of any version. The digest is not checked: that needs all of the file."""
    path = _present(path)
    try:
        header, shapes = read_header(path, _HEADER)
    except TensorFileError as error:
        version, data, tensors = _read_old(path, error)
        return CheckpointInfo(path, version, data, {name: tuple(t.shape) for name, t in tensors.items()})
    version, data = _parse_header(path, header)
    return CheckpointInfo(path, version, data, shapes)


def _present(path: str | Path) -> Path:
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint {path}")
    return path


def _read(path: Path, device: torch.device | str) -> tuple[int, Checkpoint]:
    """A file of any version, with the version that it has."""
    try:
        file = read_tensor_file(path, _HEADER, device)
    except TensorFileError as error:
        version, data, tensors = _read_old(path, error)
        return version, Checkpoint(tensors, data)
    version, data = _parse_header(path, file.header)
    if DIGEST_VERSION <= version <= CHECKPOINT_VERSION and not file.has_digest:
        raise DamagedCheckpointError(f"{path} is damaged: its header has lost the digest of its contents")
    return version, Checkpoint(file.tensors, data)


def _parse_header(path: Path, header: str | None) -> tuple[int, dict[str, Any]]:
    if header is None:
        raise DamagedCheckpointError(
            f"{path} holds tensors, but is not one of Esper's checkpoints (no {_HEADER!r} header)"
        )
    try:
        parsed = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path} has a damaged header: {first_line(error)}") from error
    version, data = (parsed.get("version"), parsed.get("data")) if isinstance(parsed, dict) else (None, None)
    if type(version) is not int or not isinstance(data, dict):
        raise DamagedCheckpointError(
            f"{path} has a damaged header: it must hold a version number and an object of data"
        )
    for key in ("network", "caller"):  # whoever looks into them may rely on it
        if not isinstance(data.get(key, {}), dict):
            raise DamagedCheckpointError(
                f"{path} has a damaged header: {key!r} must be an object, not {shown(data[key])}"
            )
    return version, data


# --- upgrading --------------------------------------------------------------------------------------------------------

Upgrade = Callable[[dict[str, Tensor], dict[str, Any]], tuple[dict[str, Tensor], dict[str, Any]]]
UPGRADES: dict[int, Upgrade] = {}
"""From version n to n + 1."""


def upgrade_checkpoint(path: str | Path, out: str | Path | None = None) -> tuple[int, Path]:
    """Rewrite `path` (or write `out`) in the current version. Returns the version it had, and where it now is."""
    path, target = Path(path), Path(out or path)
    had, checkpoint = _read(_present(path), "cpu")
    if had > CHECKPOINT_VERSION:
        raise CheckpointError(f"{path} has version {had}, newer than this Esper's {CHECKPOINT_VERSION}")
    tensors, data = checkpoint.tensors, checkpoint.data
    for version in range(had, CHECKPOINT_VERSION):
        if version not in UPGRADES:
            raise CheckpointError(f"no way from version {version} to {version + 1}: {path} cannot be upgraded")
        tensors, data = UPGRADES[version](tensors, data)
    save_checkpoint(target, tensors, data)
    return had, target


def _read_old(path: Path, as_tensors: TensorFileError) -> tuple[int, dict[str, Any], dict[str, Tensor]]:
    """A version 1 file: a dictionary by torch.save, read without executing anything.

    `as_tensors` says why the file is none of a later version, for one that is of no version at all.
    """
    if not zipfile.is_zipfile(path):
        raise DamagedCheckpointError(
            f"{path} is damaged, or is not a checkpoint of Esper; it was not loaded ({as_tensors})"
        ) from as_tensors
    if not _is_stored(path):
        raise DamagedCheckpointError(f"{path} is damaged, or compressed as no checkpoint is; it was not loaded")
    try:
        with path.open("rb") as file:  # by its content: torch would take a name in .safetensors at its word
            content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises half a dozen kinds for files that are not its own, or not safe
        raise DamagedCheckpointError(
            f"{path} is not a checkpoint of Esper, or holds more than tensors and plain data; it was not loaded"
        ) from error
    if not isinstance(content, dict) or "version" not in content or "network" not in content:
        raise CheckpointError(f"{path} is a torch file, but not a checkpoint of Esper")
    kinds = {"version": int, "network": dict, "optimizer": dict, "config": dict, "update_count": int}
    for key, kind in kinds.items():
        if not isinstance(content.get(key), kind):
            raise DamagedCheckpointError(
                f"{path} is damaged: a checkpoint of version 1 needs {key!r}, of type {kind.__name__}"
            )
    states = content["optimizer"].get("state")
    if not isinstance(states, dict) or not all(isinstance(slots, dict) for slots in states.values()):
        raise DamagedCheckpointError(f"{path} is damaged: its 'optimizer' has no usable 'state'")
    tensors = {f"network/{name}": tensor for name, tensor in content["network"].items()}
    for index, slots in states.items():
        tensors |= {f"optimizer/{index}/{name}": tensor for name, tensor in slots.items()}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise DamagedCheckpointError(f"{path} is damaged: {name} must be a tensor, not {shown(tensor)}")
        if tensor.layout != torch.strided or tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise DamagedCheckpointError(f"{path} is damaged: {name} says more than the file holds")
    tensors["update_count"] = torch.tensor(content["update_count"])
    return content["version"], {"network": dict(content["config"])}, tensors


def _is_stored(path: Path) -> bool:
    """Whether nothing in the archive is compressed, as torch writes it: then no more is read than the file holds."""
    try:
        with zipfile.ZipFile(path) as archive:
            return all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())
    except Exception:  # zipfile, too, raises half a dozen kinds
        return False


def _from_1_to_2(tensors: dict[str, Tensor], data: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Version 1 critics predicted plain returns: mean 0, deviation 1. Its random state is gone; say so."""
    for name, value in (("count", 0.0), ("mean", [0.0]), ("variance", [1.0])):
        tensors[f"values/{name}"] = torch.tensor(value, dtype=torch.float64)
    note = "upgraded from version 1: continues to learn, but not with the random numbers it would have drawn"
    return tensors, {**data, "note": note}


UPGRADES[1] = _from_1_to_2
UPGRADES[2] = lambda tensors, data: (tensors, data)  # the digest of version 3 comes with writing


# --- configurations ---------------------------------------------------------------------------------------------------


def config_data(config: NetworkConfig) -> dict[str, Any]:
    """As JSON."""
    return {**asdict(config), "space": [list(row) for row in config.space.uses]}


def config_from_data(data: Mapping[str, Any]) -> NetworkConfig:
    """The inverse. A missing key is an error: a default would be a guess about someone's weights."""
    space = {"space": {"uses": data["space"]}} if "space" in data else {}
    try:
        return settings_from({**data, **space}, NetworkConfig, "network configuration", complete=True)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error


def check_same_network(saved: Mapping[str, Any], config: NetworkConfig) -> None:
    """Refuse weights that were made for something else, naming every difference."""
    ours = config_data(config)
    theirs = config_data(config_from_data(saved))
    differences = [
        f"{name}: saved {shown(theirs[name])}, here {ours[name]!r}" for name in ours if ours[name] != theirs[name]
    ]
    if differences:
        raise CheckpointError("the checkpoint was made for another network: " + "; ".join(differences))

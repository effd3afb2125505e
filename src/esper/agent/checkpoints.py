"""Checkpoints: a run's whole state as tensors and JSON in one safetensors file. Reading one never executes anything.

A file is written beside its place, flushed to disk, then renamed over it, so there is always a whole one. `data` is any
JSON: the network's configuration, counters, and what the training loop wants to keep. A digest shows damage.

Every tensor is checked before any of them is handed to torch (`check_tensors`, `check_state`). The fused optimizer
takes the sizes of its moments from the weights: moments of another shape are written past their end, which is a crash
at best.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from esper.agent import schema_1
from esper.agent.tensor_files import TensorFileError, read_header, read_tensor_file, write_tensor_file
from esper.config import ConfigError, settings_from
from esper.errors import first_line, shown
from esper.policy.network import NetworkConfig

if TYPE_CHECKING:
    from esper.agent.ppo import PPOAgent

CHECKPOINT_VERSION = 3
"""What this code writes.

1  a torch.save dictionary without random state and return statistics. Not read any more.
2  safetensors with a JSON header: everything that determines the future, so that a resumed run is the same run.
3  the same with a digest, which must be there.
"""
READ_VERSIONS = (2, 3)
"""What this code reads, and `esper checkpoint upgrade` rewrites. The policies that come with Esper have version 2."""
DIGEST_VERSION = 3
"""From here on a file without a digest is damaged. A digest that is there is checked in every version."""

_HEADER = "esper"
POLICY_PARTS = ("network/", "observations/", "values/")
"""Prefixes of a policy's tensors. They are copied into tensors of the reader's own, so that any floating-point dtype
will do: a shipped policy has float16."""


class CheckpointError(ValueError):
    """A file that is no checkpoint, or none for this purpose. The message says what to do."""


class DamagedCheckpointError(CheckpointError):
    """A file that is not what was written, or that nothing can go on from. An earlier one may be whole."""


@dataclass(frozen=True, slots=True)
class AgentCheckpoint:
    """What a file holds."""

    tensors: dict[str, Tensor]
    data: dict[str, Any]
    version: int = CHECKPOINT_VERSION


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What can be said about a file without reading its tensors."""

    shapes: dict[str, tuple[int, ...]]
    data: dict[str, Any]
    version: int


def save_checkpoint(path: str | Path, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
    """Write atomically: after a crash the old file or the new one is there, never half of one."""
    write_tensor_file(Path(path), tensors, _HEADER, {"version": CHECKPOINT_VERSION, "data": dict(data)})


def load_checkpoint(path: str | Path, device: torch.device | str = "cpu") -> AgentCheckpoint:
    """Header and tensors of one opening, their digest checked."""
    try:
        file = read_tensor_file(_present(path), _HEADER, device)
    except TensorFileError as error:
        raise _foreign(path, error) from error
    version, data = _parse_header(path, file.header)
    if version >= DIGEST_VERSION and not file.has_digest:
        raise DamagedCheckpointError(f"{path} is damaged: its header has lost the digest of its contents")
    if schema_1.is_old(data.get("network", {})):
        data = {**data, "network": schema_1.with_rent(data["network"])}
        return AgentCheckpoint(schema_1.policy_with_rent(file.tensors), data, version)
    return AgentCheckpoint(file.tensors, data, version)


def inspect_checkpoint(path: str | Path) -> CheckpointInfo:
    """Version, JSON and shapes. The digest is not checked: that needs all of the file."""
    try:
        header, shapes = read_header(_present(path), _HEADER)
    except TensorFileError as error:
        raise _foreign(path, error) from error
    version, data = _parse_header(path, header)
    return CheckpointInfo(shapes, data, version)


def upgrade_checkpoint(path: str | Path, out: str | Path | None = None) -> tuple[int, Path]:
    """Rewrite `path` (or write `out`) in the current version. Returns the version it had, and where it now is."""
    checkpoint, target = load_checkpoint(path), Path(out or path)
    save_checkpoint(target, checkpoint.tensors, checkpoint.data)
    return checkpoint.version, target


def _present(path: str | Path) -> Path:
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint {path}")
    return path


def _foreign(path: str | Path, reason: TensorFileError) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"{path} is damaged, or is not a checkpoint of Esper; it was not loaded ({reason})")


def _parse_header(path: str | Path, header: str | None) -> tuple[int, dict[str, Any]]:
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
    if version > CHECKPOINT_VERSION:
        raise CheckpointError(
            f"{path} is a checkpoint of version {version}, this Esper reads {CHECKPOINT_VERSION}: use a newer one"
        )
    if version not in READ_VERSIONS:
        raise CheckpointError(f"{path} is a checkpoint of version {version}, older than this Esper reads")
    return version, data


# --- tensors ----------------------------------------------------------------------------------------------------------


def check_tensors(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], place: str, advice: str = "") -> None:
    """Refuse `found` unless every tensor is there, no other, each with its shape and dtype, and made of numbers.

    `place` is the thing that has no place for an unknown tensor; `advice` follows the message about NaN or infinity.
    """
    if missing := sorted(wanted.keys() - found.keys()):
        raise DamagedCheckpointError(f"it lacks {missing[0]} ({len(missing)} such tensors)")
    if unknown := sorted(found.keys() - wanted.keys()):
        raise DamagedCheckpointError(f"{place} has no place for {unknown[0]} ({len(unknown)} such tensors)")
    for name, like in wanted.items():
        tensor = found[name]
        fits = tensor.is_floating_point() if name.startswith(POLICY_PARTS) else tensor.dtype == like.dtype
        if tensor.shape != like.shape or not fits:
            raise DamagedCheckpointError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}, and should be {like.dtype} {list(like.shape)}"
            )
        # As float32, in which a policy calculates: a number that it cannot hold is infinite.
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all()):
            raise DamagedCheckpointError(f"{name} contains NaN or infinity{advice}")
        if name.endswith(("/step", "/exp_avg_sq", "/variance", "/count")) and bool((tensor < 0).any()):
            what = "variance" if name.endswith("variance") else "number"
            raise DamagedCheckpointError(f"{name} contains a negative {what}")


def check_state(agent: PPOAgent, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that `agent` cannot go on from, naming the first."""
    check_tensors(agent.state_dict(), tensors, "the agent")
    try:
        torch.Generator(agent.generator.device).set_state(tensors["generator"].cpu())
    except RuntimeError as error:
        raise DamagedCheckpointError(f"generator holds no state of a random generator ({first_line(error)})") from error
    if int(tensors["update_count"]) < 0:
        raise DamagedCheckpointError("update_count is negative")


def first_non_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of a tensor with NaN or infinity. One wait for the device where all is well."""
    named = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel()}
    largest = torch.stack([tensor.abs().amax().float() for tensor in named.values()])
    if bool(torch.isfinite(largest).all()):
        return None
    return next(name for name, value in zip(named, largest.tolist(), strict=True) if not value < float("inf"))


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

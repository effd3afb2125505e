"""Is the policy in a checkpoint what the checkpoint says? Asked before a network is built from it.

A file may be damaged, or made to do harm: a configuration of a billion layers would keep the builder busy for ever. So
what it says is compared with the tensors that it holds, and those must be numbers that a policy can decide by.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from esper.agent.checkpoints import Checkpoint, CheckpointError, DamagedCheckpointError, config_from_data
from esper.agent.normalisers import ObservationNormaliser, ValueNormaliser
from esper.errors import first_line
from esper.policy.network import FactoredRecurrentActorCritic, NetworkConfig


def check_policy(path: str | Path, checkpoint: Checkpoint, *, values: bool = False) -> None:
    """Refuse one that cannot be built, or cannot decide; `values`: its critic's units must be there, too."""
    if "network" not in checkpoint.data:
        raise CheckpointError(f"{path} holds no policy: it does not say what network its tensors are for")
    try:
        config = config_from_data(checkpoint.data["network"])
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    network = tensors_under("network/", checkpoint.tensors)
    _check_sizes(path, config, network)
    _check_tensors(path, "network/", _network_state(path, config), network)
    if observed := tensors_under("observations/", checkpoint.tensors):
        normaliser = ObservationNormaliser(config.overall_features, config.slot_features)
        _check_tensors(path, "observations/", normaliser.state(), observed)
    units = tensors_under("values/", checkpoint.tensors)
    if values or units:
        _check_tensors(path, "values/", ValueNormaliser().moments.state(), units)


def tensors_under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _check_sizes(path: str | Path, config: NetworkConfig, network: Mapping[str, Tensor]) -> None:
    """No more layers than the file has, and no width beyond its weights: what is left can be built quickly."""
    layers = sum(name.startswith("lstm.weight_ih_l") for name in network)
    feature_layers = sum(name.startswith("features.") and name.endswith(".linear.weight") for name in network)
    weights = sum(tensor.numel() for tensor in network.values())
    widths = ("overall_features", "slot_features", "blueprints", "blends", "slots", "hidden", "slot_width", "embedding")
    for name, most in {"layers": layers, "feature_layers": feature_layers, **dict.fromkeys(widths, weights)}.items():
        if getattr(config, name) > most:
            raise DamagedCheckpointError(
                f"{path} is damaged: its network configuration says {name} = {getattr(config, name)}, but the file "
                f"holds {layers} layers, {feature_layers} feature layers and {weights:,} weights"
            )


def _network_state(path: str | Path, config: NetworkConfig) -> dict[str, Tensor]:
    """What the network's tensors look like. Built without memory, and without drawing random numbers."""
    try:
        with torch.device("meta"):
            return FactoredRecurrentActorCritic(config).state_dict()
    except (ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} does not describe a network: {first_line(error)}") from error


def _check_tensors(path: str | Path, prefix: str, wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Every tensor there, no other, each of its shape, and made of numbers."""
    if missing := sorted(wanted.keys() - found.keys()):
        raise DamagedCheckpointError(f"{path} is damaged: it lacks {prefix}{missing[0]} ({len(missing)} such tensors)")
    if unknown := sorted(found.keys() - wanted.keys()):
        raise DamagedCheckpointError(
            f"{path} is damaged: its network configuration has no place for {prefix}{unknown[0]} "
            f"({len(unknown)} such tensors)"
        )
    for name, like in wanted.items():
        tensor = found[name]
        if tensor.shape != like.shape or not tensor.is_floating_point():
            raise DamagedCheckpointError(
                f"{path} is damaged: {prefix}{name} is {tensor.dtype} {list(tensor.shape)}, and should be "
                f"{like.dtype} {list(like.shape)}"
            )
        if not bool(torch.isfinite(tensor.float()).all()):
            raise DamagedCheckpointError(
                f"{path}: {prefix}{name} contains NaN or infinity: this policy cannot decide, use an earlier one"
            )
        if name.endswith("variance") and bool((tensor < 0).any()):
            raise DamagedCheckpointError(f"{path} is damaged: {prefix}{name} contains a negative variance")

"""Policies: a network with the statistics of its observations and returns, as a file, as bytes, and as a controller.

A policy file is a checkpoint without what belongs to a run (optimizer, random state, recurrent state). Those that come
with Esper are in `agent/shipped`; offline learning writes others; every checkpoint of a run holds one.

A file may be damaged, or made to do harm: a configuration of a billion layers would keep the builder busy for ever. So
its configuration is compared with the tensors that it holds before a network is built from it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import Tensor

from esper.actions import Action
from esper.agent.actor import PolicyActor
from esper.agent.checkpoints import (
    POLICY_PARTS,
    AgentCheckpoint,
    CheckpointError,
    DamagedCheckpointError,
    check_same_network,
    check_tensors,
    config_data,
    config_from_data,
    load_checkpoint,
    save_checkpoint,
)
from esper.agent.normalisers import ObservationNormaliser, ValueNormaliser
from esper.agent.reasons import with_reasons
from esper.agent.removals import without_costly_removals
from esper.agent.schema_1 import RENT
from esper.env.observation import OVERALL_FIELDS, SCHEMA_VERSION, SLOT_FIELDS
from esper.env.situation import Situation, as_tensors, world_of
from esper.env.spaces import ActionMasks, Observation
from esper.env.world import World
from esper.errors import first_line, shown
from esper.growth.blueprints import blueprint_names
from esper.policy.network import FactoredRecurrentActorCritic, NetworkConfig, NetworkOutput, RecurrentState

if TYPE_CHECKING:
    from esper.agent.ppo import PPOAgent

LAYOUT = f"growth observation {SCHEMA_VERSION}"
"""What a policy was trained to read; a checkpoint for another layout is refused."""
LEAST_RENT_VARIANCE = 1e-6
"""Variance of the rent as it is shown, below which a policy was trained at one rent."""
SPARE_BLUEPRINTS = 8
"""Room in a new network's blueprint embedding for blueprints that people add."""


def growth_network_config(**changes: object) -> NetworkConfig:
    """The network for growing: its widths follow from the observation's fields."""
    settings: dict[str, object] = {
        "overall_features": len(OVERALL_FIELDS),
        "slot_features": len(SLOT_FIELDS),
        "blueprints": len(blueprint_names()) + SPARE_BLUEPRINTS,
        "layout": LAYOUT,
    }
    return NetworkConfig(**{**settings, **changes})  # type: ignore[arg-type]


# --- as tensors -------------------------------------------------------------------------------------------------------


def policy_tensors(
    network: FactoredRecurrentActorCritic,
    observations: ObservationNormaliser | None,
    values: ValueNormaliser | None = None,
) -> dict[str, Tensor]:
    tensors = {f"network/{name}": t for name, t in network.state_dict().items()}
    if observations is not None:
        tensors |= {f"observations/{name}": t for name, t in observations.state().items()}
    if values is not None:
        tensors |= {f"values/{name}": t for name, t in values.moments.state().items()}
    return tensors


def load_policy_tensors(
    tensors: Mapping[str, Tensor],
    network: FactoredRecurrentActorCritic,
    observations: ObservationNormaliser | None,
    values: ValueNormaliser | None = None,
) -> None:
    """The inverse of `policy_tensors`, for tensors that have been checked."""
    network.load_state_dict(tensors_under("network/", tensors))
    if observations is not None:
        observations.load(tensors_under("observations/", tensors))
    if values is not None:
        values.moments.load(tensors_under("values/", tensors))


def tensors_under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _build(
    data: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device | str
) -> tuple[FactoredRecurrentActorCritic, ObservationNormaliser | None]:
    config = config_from_data(data)
    network, observations = FactoredRecurrentActorCritic(config).to(device), None
    if any(name.startswith("observations/") for name in tensors):
        observations = ObservationNormaliser(config.overall_features, config.slot_features, device=device)
    load_policy_tensors(tensors, network, observations)
    return network, observations


def pack_policy(network: FactoredRecurrentActorCritic, observations: ObservationNormaliser | None) -> bytes:
    """What an Actor in another process needs."""
    tensors = {name: t.detach().cpu().clone() for name, t in policy_tensors(network, observations).items()}
    return safetensors.torch.save(tensors, {"network": json.dumps(config_data(network.config))})


def unpack_policy(
    packed: bytes, device: torch.device | str = "cpu"
) -> tuple[FactoredRecurrentActorCritic, ObservationNormaliser | None]:
    header = json.loads(packed[8 : 8 + int.from_bytes(packed[:8], "little")])
    return _build(json.loads(header["__metadata__"]["network"]), safetensors.torch.load(packed), device)


# --- as files ---------------------------------------------------------------------------------------------------------


def save_policy(
    path: str | Path,
    network: FactoredRecurrentActorCritic,
    observations: ObservationNormaliser,
    values: ValueNormaliser,
    data: Mapping[str, Any],
) -> None:
    """Write a policy; `data` is JSON about where it comes from. One that could not be loaded again is refused."""
    tensors = policy_tensors(network, observations, values)
    checkpoint = AgentCheckpoint(tensors, {"network": config_data(network.config), "caller": dict(data)})
    try:
        check_policy(path, checkpoint, values=True)
    except CheckpointError as error:
        raise CheckpointError(f"the policy was not written: {error}") from error
    save_checkpoint(path, checkpoint.tensors, checkpoint.data)


def load_policy(
    path: str | Path, device: torch.device | str = "cpu"
) -> tuple[FactoredRecurrentActorCritic, ObservationNormaliser | None]:
    """What an Actor needs from a checkpoint, to act for any number of environments."""
    checkpoint = read_policy(path, device)
    return _build(checkpoint.data["network"], checkpoint.tensors, device)


def read_policy(path: str | Path, device: torch.device | str = "cpu", *, values: bool = False) -> AgentCheckpoint:
    """A checkpoint whose policy has been checked."""
    checkpoint = load_checkpoint(path, device)
    check_policy(path, checkpoint, values=values)
    return checkpoint


def start_from(agent: PPOAgent, path: str | Path) -> None:
    """Give an agent the network, the units and, as its teacher, a frozen copy of the policy in a checkpoint.

    The observation statistics stay as they are in the file from then on: a policy whose inputs are rescaled under it is
    another policy, and the teacher must be shown what the student is shown.
    """
    checkpoint = read_policy(path, agent.device, values=True)
    # The floor has no weights: it is the run's to set.
    floor = {"floor": agent.network.config.floor}
    check_same_network({**checkpoint.data["network"], **floor}, agent.network.config)
    observed = any(name.startswith("observations/") for name in checkpoint.tensors)
    if observed != (agent.observation_normaliser is not None):
        raise CheckpointError(f"{path}: either it or this agent normalises observations, but not both")
    load_policy_tensors(checkpoint.tensors, agent.network, agent.observation_normaliser, agent.value_normaliser)
    if agent.observation_normaliser is not None:
        agent.observation_normaliser.fixed = True
        if agent.network.config.layout == LAYOUT:
            leave_out_unseen_rent(agent.network, agent.observation_normaliser)
    agent.teacher = copy.deepcopy(agent.network).requires_grad_(False)


def leave_out_unseen_rent(network: FactoredRecurrentActorCritic, observations: ObservationNormaliser) -> None:
    """Give the rent no weight in a policy that was only ever shown one: to its normaliser any other is ten standard
    deviations away, and its weights for it are the initial ones."""
    seen = observations.frozen["overall"]
    if float(seen.variance[RENT]) < LEAST_RENT_VARIANCE:
        with torch.no_grad():
            network.features.first.linear.weight[:, RENT] = 0.0
        seen.mean[RENT], seen.variance[RENT] = 0.0, 1.0


# --- checks -----------------------------------------------------------------------------------------------------------


def check_policy(path: str | Path, checkpoint: AgentCheckpoint, *, values: bool = False) -> None:
    """Refuse one that cannot be built, or cannot decide; `values`: its critic's units must be there, too."""
    if "network" not in checkpoint.data:
        raise CheckpointError(f"{path} holds no policy: it does not say what network its tensors are for")
    try:
        config = config_from_data(checkpoint.data["network"])
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    found = {name: tensor for name, tensor in checkpoint.tensors.items() if name.startswith(POLICY_PARTS)}
    _check_sizes(path, config, tensors_under("network/", found))
    try:
        with torch.device("meta"):  # without memory, and without drawing random numbers
            network = FactoredRecurrentActorCritic(config)
    except (ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} does not describe a network: {first_line(error)}") from error
    observed = any(name.startswith("observations/") for name in found)
    valued = values or any(name.startswith("values/") for name in found)
    wanted = policy_tensors(
        network,
        ObservationNormaliser(config.overall_features, config.slot_features) if observed else None,
        ValueNormaliser() if valued else None,
    )
    try:
        check_tensors(wanted, found, "its network configuration", ": this policy cannot decide, use an earlier one")
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error}") from error


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


def _check_blueprints(path: Path, known: Any) -> None:
    """Refuse a policy whose kinds of seed have other numbers here: it would plant one and mean another.

    Kinds that came later are no matter, nor are kinds of the policy that are not registered here.
    """
    if not isinstance(known, list):
        raise CheckpointError(f"{path} is damaged: the kinds of seed that it knows must be a list, not {shown(known)}")
    for number, (then, now) in enumerate(zip(known, blueprint_names(), strict=False)):
        if then != now:
            raise ValueError(
                f"{path} was trained when seed kind {number} was {shown(then)}; here it is {now!r}: register your own "
                "blueprints in the same order as then"
            )


# --- as a controller --------------------------------------------------------------------------------------------------


class LearnedController:
    """A frozen policy. It takes the most probable action, so an episode depends on nothing but its problem; seeds that
    clearly earn their rent are not removed (`removals.py`)."""

    def __init__(
        self,
        network: FactoredRecurrentActorCritic,
        normaliser: ObservationNormaliser | None,
        name: str = "learned",
        value_units: ValueNormaliser | None = None,
    ) -> None:
        self.name = name
        self.network = network.eval()
        self.normaliser = normaliser
        self.value_units = value_units
        """What turns the critic's output into points of reward; without it nothing is said of what is expected."""
        self._actor: PolicyActor | None = None

    @classmethod
    def load(cls, path: Path) -> LearnedController:
        """From a training checkpoint."""
        checkpoint = read_policy(path)
        network, normaliser = _build(checkpoint.data["network"], checkpoint.tensors, "cpu")
        if network.config.layout != LAYOUT:
            raise ValueError(
                f"{path} holds a policy for {shown(network.config.layout or 'other observations')}; "
                f"this version of Esper shows its controllers {LAYOUT}"
            )
        ours, theirs = config_data(growth_network_config()), config_data(network.config)
        for name in ("encoder", "overall_features", "slot_features", "space", "blends"):
            if ours[name] != theirs[name]:
                raise CheckpointError(
                    f"{path} holds a policy for other observations or decisions than Esper's: {name} is "
                    f"{shown(theirs[name])}, and should be {shown(ours[name])}"
                )
        _check_blueprints(path, checkpoint.data.get("caller", {}).get("blueprints", []))
        if normaliser is not None:
            leave_out_unseen_rent(network, normaliser)
        units, values = tensors_under("values/", checkpoint.tensors), ValueNormaliser()
        if not units or float(units["count"]) == 0.0:  # its critic never learnt
            return cls(network, normaliser)
        values.moments.load(units)
        return cls(network, normaliser, value_units=values)

    @property
    def reads_rent(self) -> bool:
        """Whether its decisions depend on the rent: those of policies that were trained at one rent do not."""
        return bool(self.network.features.first.linear.weight[:, RENT].any())

    def reset(self, seeds: Sequence[int]) -> None:
        room, needed = self.network.config.blueprints, len(blueprint_names())
        if needed > room:
            raise ValueError(
                f"this policy has room for {room} kinds of seed and {needed} are registered: train one with them"
            )
        self._actor = PolicyActor(self.network, self.normaliser)
        self._actor.reset(seeds)

    def state_dict(self) -> dict[str, Any]:
        memory = None if self._actor is None else self._actor.state
        return {"memory": None if memory is None else [memory.hidden.clone(), memory.cell.clone()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._actor is not None and state["memory"] is not None:
            self._actor.state = RecurrentState(*(t.clone() for t in state["memory"]))

    def act(self, world: World, observation: Observation, masks: ActionMasks) -> Tensor:
        with torch.inference_mode():
            return self._forward(observation, without_costly_removals(masks, world)).policy.mode()

    def decide(self, situations: Sequence[Situation]) -> list[Action]:
        observation, masks = as_tensors(situations)
        out = self._forward(observation, without_costly_removals(masks, world_of(situations)[0]))
        returns = None if self.value_units is None else self.value_units.to_returns(out.value)
        return with_reasons(out.policy.mode(), out.policy, returns, situations)

    def _forward(self, observation: Observation, masks: ActionMasks) -> NetworkOutput:
        if self._actor is None:
            raise RuntimeError("reset the controller before it decides")
        device = observation.overall.device
        if self.network.uses.device != device:  # before the first step of an episode: its memory is empty
            self.network.to(device)
            if self.normaliser is not None:
                self.normaliser.to(device)
            if self.value_units is not None:
                self.value_units.moments.to(device)
            self.reset(range(observation.overall.shape[0]))
        return self._actor.forward(observation, masks)

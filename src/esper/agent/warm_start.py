"""A policy as a file of its own, and an agent that starts from one.

A policy file is an ordinary checkpoint without what belongs to a run (optimizer, random numbers, recurrent state): what
`load_policy` and `LearnedController` read, and what offline learning writes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esper.agent.checkpoints import (
    Checkpoint,
    CheckpointError,
    check_same_network,
    config_data,
    load_checkpoint,
    save_checkpoint,
)
from esper.agent.normalisers import ObservationNormaliser, ValueNormaliser
from esper.agent.policy_check import check_policy, tensors_under
from esper.agent.ppo import PPOAgent
from esper.policy.network import FactoredRecurrentActorCritic


def save_policy(
    path: str | Path,
    network: FactoredRecurrentActorCritic,
    observations: ObservationNormaliser,
    values: ValueNormaliser,
    data: Mapping[str, Any],
) -> None:
    """Write a policy; `data` is JSON about where it comes from. One that could not be loaded again is refused."""
    tensors = {f"network/{name}": tensor for name, tensor in network.state_dict().items()}
    tensors |= {f"observations/{name}": tensor for name, tensor in observations.state().items()}
    tensors |= {f"values/{name}": tensor for name, tensor in values.moments.state().items()}
    checkpoint = Checkpoint(tensors, {"network": config_data(network.config), "caller": dict(data)})
    try:
        check_policy(path, checkpoint, values=True)
    except CheckpointError as error:
        raise CheckpointError(f"the policy was not written: {error}") from error
    save_checkpoint(path, checkpoint.tensors, checkpoint.data)


def start_from(agent: PPOAgent, path: str | Path) -> None:
    """Give an agent the network, the units and, as its teacher, a frozen copy of the policy in a checkpoint.

    The observation statistics stay as they are in the file from then on: a policy whose inputs are rescaled under it is
    another policy, and the teacher must be shown what the student is shown.
    """
    checkpoint = load_checkpoint(path, agent.device)
    check_policy(path, checkpoint, values=True)
    # The floor has no weights: it is the run's to set.
    floor = {"floor": agent.network.config.floor}
    check_same_network({**checkpoint.data["network"], **floor}, agent.network.config)
    observed = tensors_under("observations/", checkpoint.tensors)
    if bool(observed) != (agent.observation_normaliser is not None):
        raise CheckpointError(f"{path}: either it or this agent normalises observations, but not both")
    agent.network.load_state_dict(tensors_under("network/", checkpoint.tensors))
    agent.value_normaliser.moments.load(tensors_under("values/", checkpoint.tensors))
    if agent.observation_normaliser is not None:
        agent.observation_normaliser.load(observed)
        agent.observation_normaliser.fixed = True
    agent.teacher = copy.deepcopy(agent.network).requires_grad_(False)

"""Do the tensors of a checkpoint fit the agent that goes on from them? Asked before any of them is handed to torch.

The fused optimizer takes the sizes of its moments from the weights: moments of another shape are written past their
end, which is a crash at best. So every tensor must be there, with its shape and dtype, and no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from esper.agent.checkpoints import DamagedCheckpointError
from esper.agent.tensor_files import one_line

if TYPE_CHECKING:
    from esper.agent.ppo import PPOAgent

NUMBERS = ("network/", "values/", "observations/")
"""Copied into tensors of the agent's own: any floating-point dtype will do. A shipped policy has float16."""
FORMER = ("recurrent/hidden", "recurrent/cell", "start")
"""In checkpoints from when rollouts could stop in the middle of an episode: not read any more."""


def check_state(agent: PPOAgent, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that `agent` cannot go on from, naming the first."""
    wanted = _wanted(agent, tensors)
    if missing := sorted(wanted.keys() - tensors.keys()):
        raise DamagedCheckpointError(f"it lacks {missing[0]} ({len(missing)} such tensors)")
    if unknown := sorted(tensors.keys() - wanted.keys() - set(FORMER)):
        raise DamagedCheckpointError(f"the agent has no place for {unknown[0]} ({len(unknown)} such tensors)")
    for name, like in wanted.items():
        _check(name, tensors[name], like)
    if "generator" in wanted:
        _check_generator(agent.generator, tensors["generator"])
    if int(tensors["update_count"]) < 0:
        raise DamagedCheckpointError("update_count is negative")


def _wanted(agent: PPOAgent, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors like those that must be there. The optimizer's are there whole, or not at all."""
    wanted = {f"network/{name}": t for name, t in agent.network.state_dict().items()}
    wanted |= {f"values/{name}": t for name, t in agent.value_normaliser.moments.state().items()}
    if agent.observation_normaliser is not None:
        wanted |= {f"observations/{name}": t for name, t in agent.observation_normaliser.state().items()}
    if any(name.startswith("optimizer/") for name in tensors):  # before the first step there are no moments
        parameters = [p for group in agent.optimizer.param_groups for p in group["params"]]
        for index, parameter in enumerate(parameters):
            wanted[f"optimizer/{index}/step"] = torch.zeros(())
            wanted[f"optimizer/{index}/exp_avg"] = wanted[f"optimizer/{index}/exp_avg_sq"] = parameter.detach()
    if "generator" in tensors:  # a checkpoint that was upgraded from version 1 has none
        wanted["generator"] = agent.generator.get_state()
    return wanted | {"update_count": torch.tensor(0)}


def _check(name: str, tensor: Tensor, like: Tensor) -> None:
    fits = tensor.is_floating_point() if name.startswith(NUMBERS) else tensor.dtype == like.dtype
    if tensor.shape != like.shape or not fits:
        raise DamagedCheckpointError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}, and should be {like.dtype} {list(like.shape)}"
        )
    if non_finite(tensor):
        raise DamagedCheckpointError(f"{name} contains NaN or infinity")
    if name.endswith(("/step", "/exp_avg_sq", "/variance", "/count")) and bool((tensor < 0).any()):
        raise DamagedCheckpointError(f"{name} contains a negative number")


def _check_generator(generator: torch.Generator, state: Tensor) -> None:
    try:
        torch.Generator(generator.device).set_state(state.cpu())
    except RuntimeError as error:
        raise DamagedCheckpointError(f"generator holds no state of a random generator ({one_line(error)})") from error


def non_finite(tensor: Tensor) -> bool:
    """Also what float32 cannot hold: that is what a policy calculates in."""
    return tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all())


def first_non_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of a tensor with NaN or infinity. One wait for the device where all is well."""
    named = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel()}
    largest = torch.stack([tensor.abs().amax().float() for tensor in named.values()])
    if bool(torch.isfinite(largest).all()):
        return None
    return next(name for name, value in zip(named, largest.tolist(), strict=True) if not value < float("inf"))

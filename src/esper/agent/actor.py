"""A trained policy at work: it acts and remembers, and does not learn. What a comparison or a controller runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from esper.agent.normalisers import ObservationNormaliser
from esper.env.spaces import ActionMasks, Observation
from esper.policy.network import FactoredRecurrentActorCritic, NetworkOutput


def exact(device: torch.device) -> AbstractContextManager[Any]:
    """cuDNN's LSTM uses TF32 by default: ten bits of mantissa, and replay no longer agrees with acting (1.4e-3 was
    measured on an H200)."""
    if device.type != "cuda":
        return nullcontext()
    flags: AbstractContextManager[Any] = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
    return flags


class Actor:
    """Keeps the recurrent state of `environments` environments; the network and the normaliser are only read."""

    def __init__(
        self,
        network: FactoredRecurrentActorCritic,
        environments: int,
        observation_normaliser: ObservationNormaliser | None = None,
        deterministic: bool = True,
        seed: int = 0,
    ) -> None:
        self.network = network
        self.observation_normaliser = observation_normaliser
        self.deterministic = deterministic
        self.generator = torch.Generator(network.uses.device).manual_seed(seed)
        self.state = network.initial_state(environments)

    def act(self, observation: Observation, masks: ActionMasks) -> Tensor:
        """[N, heads] int64."""
        return self.act_with_output(observation, masks)[0]

    @torch.inference_mode()
    def act_with_output(self, observation: Observation, masks: ActionMasks) -> tuple[Tensor, NetworkOutput]:
        """The actions, and what the network put out: for whoever asks why."""
        seen = observation if self.observation_normaliser is None else self.observation_normaliser(observation)
        with exact(self.network.uses.device):
            out = self.network(seen, masks, self.state)
        self.state = out.state
        action: Tensor = out.policy.mode() if self.deterministic else out.policy.sample(self.generator)[0]
        return action, out

    @torch.inference_mode()
    def episode_ended(self, done: Tensor) -> None:
        """Forget what belongs to environments whose episode is over, [N] bool."""
        self.state = self.state.keep(~done)

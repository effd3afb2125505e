"""A learned policy as an actor: it decides and keeps its recurrent state, and does not learn."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from esper.agent.normalisers import ObservationNormaliser
from esper.env.situation import Situation
from esper.env.spaces import ActionMasks, Observation
from esper.env.world import World
from esper.policy.network import FactoredRecurrentActorCritic, NetworkOutput
from esper.rollout.play import Decisions


def exact(device: torch.device) -> AbstractContextManager[Any]:
    """cuDNN's LSTM uses TF32 by default: ten bits of mantissa, and replay no longer agrees with acting (1.4e-3 was
    measured on an H200)."""
    if device.type != "cuda":
        return nullcontext()
    flags: AbstractContextManager[Any] = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
    return flags


class PolicyActor:
    """Holds the recurrent state of the episodes it acts in; the network and the normaliser are only read."""

    name = "policy"

    def __init__(
        self,
        network: FactoredRecurrentActorCritic,
        normaliser: ObservationNormaliser | None = None,
        seed: int | None = None,
    ) -> None:
        """`seed` of the draws from the policy; None takes the most probable action."""
        self.network, self.normaliser, self.seed = network, normaliser, seed
        self.generator = torch.Generator(network.uses.device)
        self.reset(())

    def reset(self, draws: Sequence[int]) -> None:
        self.state = self.network.initial_state(len(draws))
        self.generator.manual_seed(self.seed or 0)

    def act(self, situations: Sequence[Situation] | World, observation: Observation, masks: ActionMasks) -> Decisions:
        out = self.forward(observation, masks)
        with torch.inference_mode():
            if self.seed is None:
                action = out.policy.mode()
                return Decisions(action, action, value=out.value)
            action, log_prob = out.policy.sample(self.generator)
            return Decisions(action, action, log_prob, out.value)

    @torch.inference_mode()
    def forward(self, observation: Observation, masks: ActionMasks) -> NetworkOutput:
        """One step of the network, from the memory of the steps before it."""
        seen = observation if self.normaliser is None else self.normaliser(observation)
        with exact(self.network.uses.device):
            out: NetworkOutput = self.network(seen, masks, self.state)
        self.state = out.state
        return out

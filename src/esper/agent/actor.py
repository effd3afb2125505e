"""A trained policy at work: it acts and remembers, and does not learn. What a comparison or a controller runs."""

from __future__ import annotations

import torch
from torch import Tensor

from esper.agent.normalisers import ObservationNormaliser
from esper.env.spaces import ActionMasks, Observation
from esper.policy.network import FactoredRecurrentActorCritic


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

    @torch.inference_mode()
    def act(self, observation: Observation, masks: ActionMasks) -> Tensor:
        """[N, heads] int64."""
        seen = observation if self.observation_normaliser is None else self.observation_normaliser(observation)
        out = self.network(seen, masks, self.state)
        self.state = out.state
        action: Tensor = out.policy.mode() if self.deterministic else out.policy.sample(self.generator)[0]
        return action

    @torch.inference_mode()
    def episode_ended(self, done: Tensor) -> None:
        """Forget what belongs to environments whose episode is over, [N] bool."""
        self.state = self.state.keep(~done)

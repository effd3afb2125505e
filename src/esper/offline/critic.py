"""Q over factored actions, with the agent's own network.

    Q(s, a) = base(s) + q(op) + q(slot | op) + q(blueprint | slot) + q(blend | slot)        (terms that the op uses)

The shapes are those of the policy's scores, so any number of slots is served, and every action has a value without a
pass per action. What it cannot express is a blueprint and a blend that are good only together.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from esper.env.spaces import ActionMasks, Observation
from esper.offline.rows import EpisodeRows
from esper.policy.distribution import BLEND, BLUEPRINT, MASK_VALUE, SLOT, FactoredLogits, FactoredPolicy
from esper.policy.network import FactoredRecurrentActorCritic, RecurrentState


@dataclass(frozen=True, slots=True)
class ActionValues:
    """Q of every action at some states, in parts."""

    base: Tensor
    """[...]"""
    parts: FactoredLogits
    masks: ActionMasks
    uses: Tensor

    def of(self, action: Tensor) -> Tensor:
        """Q of one action per state, [...]."""
        p = self.parts
        # A policy's log-probability picks and masks by head exactly as a sum of parts must.
        picked = FactoredPolicy(p.op, p.slot, p.blueprint, p.blend, self.masks, self.uses).log_prob(action)
        return self.base + picked.sum(-1)

    def soft_maximum(self) -> Tensor:
        """log Σ exp Q over all legal actions, [...]: exact, because the parts only add up."""
        uses = self.uses.to(self.base.dtype)  # [O, heads]
        blueprint = _log_sum(self.parts.blueprint, self.masks.blueprint)  # [..., S]
        blend = _log_sum(self.parts.blend, self.masks.blend)
        then = uses[:, BLUEPRINT, None] * blueprint[..., None, :] + uses[:, BLEND, None] * blend[..., None, :]
        slot = _log_sum(self.parts.slot + then, self.masks.slot)  # [..., O]
        return self.base + _log_sum(self.parts.op + uses[:, SLOT] * slot, self.masks.op)


def _log_sum(values: Tensor, mask: Tensor) -> Tensor:
    return values.masked_fill(~mask, MASK_VALUE).logsumexp(-1)


class FactoredCritic(FactoredRecurrentActorCritic):
    """The policy's network, read as action values."""

    def action_values(self, observation: Observation, masks: ActionMasks, state: RecurrentState) -> ActionValues:
        """For whole episodes [N, T, ...] from the state before their first steps."""
        slots, features = self._encode(observation)
        core, _ = self._core(features, state)
        base: Tensor = self.value_head(core).squeeze(-1)
        return ActionValues(base, self._logits(core, slots, observation, masks), masks, self.uses)


class Twin(nn.Module):
    """Two critics and their slow copies. The smaller Q counts: what one overestimates by chance is not believed."""

    def __init__(self, first: FactoredCritic, second: FactoredCritic) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.slow_first, self.slow_second = (copy.deepcopy(c).requires_grad_(False) for c in self.live)

    @property
    def live(self) -> tuple[FactoredCritic, FactoredCritic]:
        return self.first, self.second

    @torch.no_grad()
    def smaller(self, rows: EpisodeRows) -> Tensor:
        """Of the slow copies' Q of the rows' actions, [E, T]."""
        state = self.first.initial_state(len(rows))
        first, second = (
            critic.action_values(rows.observation, rows.masks, state).of(rows.action)
            for critic in (self.slow_first, self.slow_second)
        )
        return torch.minimum(first, second)

    @torch.no_grad()
    def follow(self, rate: float) -> None:
        """The slow copies go a share of the way towards the critics."""
        for slow, critic in zip((self.slow_first, self.slow_second), self.live, strict=True):
            torch._foreach_lerp_(list(slow.parameters()), list(critic.parameters()), rate)

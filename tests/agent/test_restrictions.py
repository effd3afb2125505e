"""Restricted training episodes: what they forbid, that PPO stays exact under them, and what a policy learns by them.

Covers: R058
"""

from __future__ import annotations

from functools import partial

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from toy_environments import ToyEnvironment, evaluate, make_agent, open_masks, vector_observation

from esper.actions import Op
from esper.agent.config import PPOConfig
from esper.env.spaces import ActionMasks, Observation
from esper.policy.distribution import BLUEPRINT, GROWTH_ACTIONS, OP
from esper.rollout.play import play
from esper.rollout.restrictions import LATEST, Restrictions

KINDS = 4


class LateCue(ToyEnvironment):
    """One of four seeds is right, which is shown from the third step on. The safe one pays 0.7 whatever is right, the
    right one 1, the others nothing; a step of waiting costs 0.01."""

    space = GROWTH_ACTIONS
    features = KINDS + 1
    blueprints = KINDS + 1
    length = 8

    def _restart(self) -> None:
        self.right = torch.randint(1, KINDS + 1, (self.environments,), generator=self.generator)

    def _observe(self) -> Observation:
        cue = torch.nn.functional.one_hot(self.right - 1, KINDS).float() * (self.time >= 2)
        clock = torch.full((self.environments, 1), self.time / self.length)
        return vector_observation(torch.cat((cue, clock), 1), self.blueprints)

    def _masks(self) -> ActionMasks:
        masks = super()._masks()
        masks.op[:, [Op.PRUNE, Op.FOSSILIZE]] = False
        return masks

    def _apply(self, action: Tensor) -> tuple[Tensor, Tensor]:
        planted, what = action[:, OP] == Op.GERMINATE, action[:, BLUEPRINT]
        worth = torch.where(what == 0, 0.7, (what == self.right).float())
        return torch.where(planted, worth, -0.01), planted | self._at_the_end()


def learned(share: float) -> float:
    """Mean return of the frozen policy. Every update checks |ratio − 1| before its first step."""
    env = LateCue(64)
    agent = make_agent(env, PPOConfig(learning_rate=3e-3, entropy_coefficient=0.0, discount=1.0, target_kl=None))
    for update in range(40):
        restrict = partial(Restrictions.drawn, share=share, seed=update) if share else None
        agent.update(play(env, agent.actor(update), range(64), restrict=restrict))
    return evaluate(env, agent, 256)


def test_a_policy_learns_what_it_would_have_stopped_trying() -> None:
    """Whoever plants the safe seed at once has 0.7; whoever waits for the cue has 0.98."""
    assert 0.6 < learned(0.0) < 0.75
    assert learned(0.5) > 0.95


@given(
    share=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**63 - 1),
    slots=st.integers(1, 4),
    epoch=st.integers(0, LATEST + 1),
)
def test_a_restriction_only_ever_forbids_planting(share: float, seed: int, slots: int, epoch: int) -> None:
    rng = torch.Generator().manual_seed(seed % 1000)
    masks = open_masks((7,), len(Op), slots, 5, 3)
    masks = ActionMasks(*(torch.rand(m.shape, generator=rng) < 0.7 for m in (masks.op, masks.slot)), *_heads(masks))
    masks.slot[:, Op.GERMINATE] &= masks.blueprint.any(-1)
    masks.op[:, Op.GERMINATE] = masks.slot[:, Op.GERMINATE].any(-1)
    limits = Restrictions.drawn(masks, share, seed)
    left = limits.applied(masks, epoch)
    others = [op for op in Op if op is not Op.GERMINATE]
    assert torch.equal(left.op[:, others], masks.op[:, others])
    assert torch.equal(left.slot[:, others], masks.slot[:, others])
    assert torch.equal(left.blend, masks.blend)
    assert not (left.blueprint & ~masks.blueprint).any()
    assert not (left.slot & ~masks.slot).any()
    may = left.slot[:, Op.GERMINATE]
    assert torch.equal(left.op[:, Op.GERMINATE], may.any(-1))
    assert not (may & ~left.blueprint.any(-1)).any()  # whoever may plant has something to plant
    assert not may[limits.earliest > epoch].any()
    if share == 0.0:
        assert torch.equal(left.slot, masks.slot)
        assert torch.equal(left.blueprint, masks.blueprint)


def _heads(masks: ActionMasks) -> tuple[Tensor, Tensor]:
    blueprint = torch.rand(masks.blueprint.shape, generator=torch.Generator().manual_seed(1)) < 0.7
    return blueprint, masks.blend


def test_the_shares_are_those_asked_for() -> None:
    """Each kind of restriction comes by a coin of its own; a shorter life of planting and fewer seeds, together too."""
    masks = open_masks((4000,), len(Op), 2, 12, 3)
    limits = Restrictions.drawn(masks, 0.3, 5)
    later, fewer = limits.earliest > 0, ~limits.blueprints.all(-1)
    for found, wanted in ((later, 0.3), (fewer, 0.3), (later & fewer, 0.09), (limits.blueprints[fewer], 0.5)):
        assert abs(float(found.float().mean()) - wanted) < 0.03
    assert limits.earliest[later].unique().tolist() == list(range(1, LATEST + 1))
    again, other = (Restrictions.drawn(masks, 0.3, seed) for seed in (5, 6))
    assert torch.equal(limits.blueprints, again.blueprints)
    assert not torch.equal(limits.blueprints, other.blueprints)

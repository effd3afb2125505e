"""Rollouts without networks: seeds live by the rules of the lifecycle, what is measured of them is made up.

For benchmarks and tests of whatever records episodes: thousands of them in a second, as columns.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from esper.actions import BLENDS, HEAD_NAMES, Op
from esper.engine.epoch import EpochColumns
from esper.engine.governor import FAULTS
from esper.env.reward.config import TERMS
from esper.env.reward.reward import RewardColumns
from esper.env.reward.suspicion import SUSPICION_KINDS
from esper.env.spaces import ActionMasks, Observation
from esper.env.steps import StepFacts
from esper.growth.blueprints import blueprint_names
from esper.lifecycle import LIVE, Rules, Stage
from esper.rollout.episodes import Episodes, stack_steps
from esper.rollout.facts import Facts
from esper.slot_columns import CONTRAST, SlotColumns

ODDS = {Op.WAIT: 0.6, Op.GERMINATE: 0.25, Op.PRUNE: 0.08, Op.FOSSILIZE: 0.07}
SUSPICION_RATE = 0.01
HOST = 700.0


class _Made:
    """The state of N made-up networks between two epochs."""

    def __init__(self, networks: int, steps: int, slots: int, faults: float, rng: torch.Generator) -> None:
        self.networks, self.slots, self.faults, self.rng = networks, slots, faults, rng
        self.columns = SlotColumns.empty([slots] * networks, [Rules()] * networks)
        self.horizon = torch.randint(max(1, steps - 7), steps + 1, (networks,), generator=rng)
        self.over = torch.zeros(networks, dtype=torch.bool)
        self.born = torch.zeros(networks, dtype=torch.int64)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(self.networks, *shape, generator=self.rng, dtype=torch.float64)

    def step(self, t: int) -> StepFacts:
        c, played = self.columns, ~self.over
        op, slot, blueprint, blend, changed = self._act(played)
        c.begin_epoch()
        stage, alpha, live = c.stage.clone(), c.alpha.clone(), c.within(LIVE)
        incubating = (c.stage == Stage.TRAINING) & played[:, None]
        acting = live & ~incubating & played[:, None]
        sort = torch.randint(len(FAULTS), (self.networks,), generator=self.rng)
        fault = torch.where(played & (self.uniform() < self.faults), sort, -1)
        c.prune(live & (fault >= 0)[:, None], at_once=True)
        gradient = torch.where(incubating, self.uniform(self.slots), math.nan)
        shadow, contribution = self._contrast(incubating), self._contrast(acting)
        c.measure(gradient, shadow, contribution)
        ends = played & ((fault >= 0) | (t + 1 >= self.horizon))
        c.end_epoch(played & ~(ends & (fault < 0)))
        self.over |= ends
        nothing = torch.full((self.networks,), math.nan, dtype=torch.float64)
        accuracy = torch.where(played, 40.0 + 50.0 * self.uniform(), nothing)
        parameters = HOST + (c.size * (c.alpha > 0.0)).sum(1)
        epoch = EpochColumns(
            played=played,
            op=torch.where(played, op, -1),
            slot=slot,
            blueprint=blueprint,
            blend=blend,
            changed=changed,
            train_loss=self.uniform(),
            host_gradient=self.uniform(),
            seed_gradient=gradient,
            accuracy=accuracy,
            loss=self.uniform(),
            shadow=shadow,
            contribution=contribution,
            stage=stage,
            alpha=alpha,
            parameters=parameters,
            fault=fault,
            fault_seen=torch.where(fault >= 0, 9.0, nothing),
            fault_limit=torch.where(fault >= 0, 3.0, nothing),
        )
        return StepFacts(epoch, self._reward(accuracy, acting, ends, played), c.stage.clone(), parameters)

    def _act(self, played: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """A random operation where it is legal, else nothing."""
        c = self.columns
        legal = {Op.GERMINATE: c.stage == Stage.DORMANT, Op.PRUNE: c.prunable, Op.FOSSILIZE: c.fossilizable}
        limits = torch.tensor(list(ODDS.values()), dtype=torch.float64).cumsum(0)[:-1]
        op = torch.bucketize(self.uniform(), limits)
        order = self.uniform(self.slots)
        slot = torch.zeros(self.networks, dtype=torch.int64)
        changed = torch.zeros(self.networks, dtype=torch.bool)
        blueprint = torch.randint(len(blueprint_names()), (self.networks,), generator=self.rng)
        blend = torch.randint(len(BLENDS), (self.networks,), generator=self.rng)
        for one, possible in legal.items():
            able = (op == one) & played & possible.any(1)
            at = torch.where(possible, order, -1.0).argmax(1)
            slot, changed = torch.where(able, at, slot), changed | able
            where = able[:, None] & (torch.arange(self.slots) == at[:, None])
            if one is Op.GERMINATE:
                self.born += able
                size = 50 * (1 + blueprint)
                c.germinate(where, *(column[:, None] for column in (self.born, blueprint, blend, size)))
            elif one is Op.PRUNE:
                c.prune(where)
            else:
                c.fossilize(where)
        op = torch.where(changed, op, int(Op.WAIT))
        planted = op == Op.GERMINATE
        return op, slot, torch.where(planted, blueprint, 0), torch.where(planted, blend, 0), changed

    def _contrast(self, there: Tensor) -> Tensor:
        numbers = torch.stack((4.0 * self.uniform(self.slots) - 1.0, *self.uniform(2, self.slots).unbind(1)), -1)
        assert numbers.shape[-1] == len(CONTRAST)
        return torch.where(there[..., None], numbers, math.nan)

    def _reward(self, accuracy: Tensor, acting: Tensor, ends: Tensor, played: Tensor) -> RewardColumns:
        terms = torch.where(played[:, None], self.uniform(len(TERMS)) - 0.5, 0.0)
        points = torch.where(acting, self.uniform(self.slots), math.nan)
        suspected = acting[..., None] & (self.uniform(self.slots, len(SUSPICION_KINDS)) < SUSPICION_RATE)
        score = torch.where(ends, accuracy - 5.0, math.nan)
        return RewardColumns(terms, self.uniform(), score, suspected, points, points - 1.0)


def synthetic_rollout(networks: int, steps: int, slots: int, seed: int = 0, *, faults: float = 0.001) -> Episodes:
    """Episodes of at most `steps` steps, with everything that the store is given of them; observations are empty.

    `faults` is the share of steps that the governor undoes.
    """
    rng = torch.Generator().manual_seed(seed)
    made = _Made(networks, steps, slots, faults, rng)
    played = stack_steps([made.step(t) for t in range(steps)])
    kinds = tuple(f"kind {i}" for i in range(8))
    facts = Facts(
        steps=played,
        host_parameters=torch.full((networks,), HOST, dtype=torch.float64),
        rules=made.columns.rules,
        host=torch.zeros(networks, dtype=torch.int64),
        paths=(tuple(f"stages.{i}" for i in range(slots)),),
        kind=torch.arange(networks) % len(kinds),
        kinds=kinds,
    )
    shape = (networks, steps)
    action = torch.stack([getattr(played.epoch, name) for name in HEAD_NAMES], -1)  # [N, T, heads]
    none = torch.zeros(*shape, slots, 0)
    return Episodes(
        observation=Observation(none[..., 0, :], none, none.sum(-1).long(), none, none.sum(-1) == 0),
        masks=ActionMasks(torch.ones(*shape, len(Op), dtype=torch.bool), *(torch.ones(*shape, 1, 1).bool(),) * 3),
        action=action,
        label=action,
        reward=played.reward.terms.sum(-1).float(),
        terminated=torch.isfinite(played.reward.score),
        lengths=facts.lengths,
        draw=torch.arange(networks) + 100_000 * seed,
        controller=torch.zeros(networks, dtype=torch.int64),
        controllers=("made up",),
        log_prob=torch.rand(*shape, len(HEAD_NAMES), generator=rng).log(),
        value=torch.rand(*shape, generator=rng),
        facts=facts,
    )

"""Recorded episodes of the op-conditional toy task, by teachers of very different worth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from toy_environments import OpConditional

from esper.agent.actor import PolicyActor
from esper.offline.fitting import Learned
from esper.offline.recording import Schema
from esper.policy.network import NetworkConfig
from esper.rollout.episodes import Episodes, join
from esper.rollout.play import Decisions, play

TOY = Schema(
    layout="op-conditional",
    overall_features=OpConditional.features,
    slot_features=0,
    blueprints=tuple(str(i) for i in range(OpConditional.blueprints)),
)

Teacher = Callable[[OpConditional, torch.Generator], Tensor]


def waits(env: OpConditional, rng: torch.Generator) -> Tensor:
    """3.75 of 5."""
    return torch.zeros(env.environments, 4, dtype=torch.int64)


def at_random(env: OpConditional, rng: torch.Generator) -> Tensor:
    sizes = (env.slots, env.blueprints, env.blends, env.space.ops)
    return torch.stack([torch.randint(0, k, (env.environments,), generator=rng) for k in sizes], dim=-1)


def half_knows(env: OpConditional, rng: torch.Generator) -> Tensor:
    """Sees when to grow, and gets each of slot, blueprint and blend right half of the time, else guesses."""
    wanted = torch.stack([*env.wanted, env.asked.long()], dim=-1)
    guess = torch.rand(wanted.shape, generator=rng) < 0.5
    guess[:, 3] = False
    return torch.where(guess, at_random(env, rng), wanted)


TEACHERS: dict[str, Teacher] = {"waits": waits, "random": at_random, "half knows": half_knows}


class TeacherActor:
    """A teacher, overruled with probability `noise`."""

    def __init__(self, name: str, env: OpConditional, noise: float, seed: int) -> None:
        self.name, self.env, self.noise = name, env, noise
        self.rng = torch.Generator().manual_seed(1000 + seed)

    def reset(self, draws: Sequence[int]) -> None: ...

    def act(self, *seen: object) -> Decisions:
        label = TEACHERS[self.name](self.env, self.rng)
        explores = torch.rand(len(label), generator=self.rng) < self.noise
        action = torch.where(explores[:, None], at_random(self.env, self.rng), label)
        uses = torch.tensor(self.env.space.uses)
        return Decisions(action * uses[action[:, 3]], label * uses[label[:, 3]])


def record_toy(name: str, episodes: int, noise: float, seed: int) -> Episodes:
    env = OpConditional(episodes, seed)
    draws = range(1_000_000 * seed, 1_000_000 * seed + episodes)
    return replace(play(env, TeacherActor(name, env, noise, seed), draws), final=None)


def toy_mixture(episodes: int, noise: float, seed: int) -> Episodes:
    """As many of each teacher; all with exploration noise."""
    return join([record_toy(name, episodes, noise, 10 * seed + i) for i, name in enumerate(TEACHERS)])


def toy_network(hidden: int = 64) -> NetworkConfig:
    return OpConditional(1).network_config(hidden=hidden, layout=TOY.layout)


def toy_score(learned: Learned, episodes: int = 200, seed: int = 9) -> list[float]:
    """Returns without luck, of each of `episodes` episodes: 5 is perfect. The same problems for the same seed."""
    env = OpConditional(episodes, seed)
    env.luck = 0.0
    actor = PolicyActor(learned.network, learned.units.observations)
    return play(env, actor, range(episodes)).returns().tolist()

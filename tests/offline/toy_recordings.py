"""Recorded episodes of the op-conditional toy task, by teachers of very different worth."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from toy_environments import OpConditional

from esper.agent.actor import Actor
from esper.offline.episodes import Episodes, Schema, join
from esper.offline.fitting import Learned
from esper.offline.recorder import Tape
from esper.policy.network import NetworkConfig

TOY = Schema(
    layout="op-conditional",
    overall_features=OpConditional.features,
    slot_features=0,
    blueprints=tuple(str(i) for i in range(OpConditional.blueprints)),
)

Teacher = Callable[[OpConditional, torch.Generator], Tensor]


def waits(env: OpConditional, dice: torch.Generator) -> Tensor:
    """3.75 of 5."""
    return torch.zeros(env.environments, 4, dtype=torch.int64)


def at_random(env: OpConditional, dice: torch.Generator) -> Tensor:
    sizes = (env.slots, env.blueprints, env.blends, env.space.ops)
    return torch.stack([torch.randint(0, k, (env.environments,), generator=dice) for k in sizes], dim=-1)


def half_knows(env: OpConditional, dice: torch.Generator) -> Tensor:
    """Sees when to grow, and gets each of slot, blueprint and blend right half of the time, else guesses."""
    wanted = torch.stack([*env.wanted, env.asked.long()], dim=-1)
    guess = torch.rand(wanted.shape, generator=dice) < 0.5
    guess[:, 3] = False
    return torch.where(guess, at_random(env, dice), wanted)


TEACHERS: dict[str, Teacher] = {"waits": waits, "random": at_random, "half knows": half_knows}


def record_toy(name: str, episodes: int, noise: float, seed: int) -> Episodes:
    env, dice = OpConditional(episodes, seed), torch.Generator().manual_seed(1000 + seed)
    observation, masks = env.reset()
    tape = Tape()
    for _ in range(env.length):
        label = TEACHERS[name](env, dice)
        explores = torch.rand(episodes, generator=dice) < noise
        taken = torch.where(explores[:, None], at_random(env, dice), label)
        uses = torch.tensor(env.space.uses)
        step = env.step(taken)
        acted = torch.ones(episodes, dtype=torch.bool)
        label, taken = label * uses[label[:, 3]], taken * uses[taken[:, 3]]
        tape.note(observation, masks, label, taken, step.reward, step.terminated, acted)
        observation, masks = step.observation, step.masks
    return tape.episodes(torch.arange(episodes) + 1_000_000 * seed, name)


def toy_mixture(episodes: int, noise: float, seed: int) -> Episodes:
    """As many of each teacher; all with exploration noise."""
    return join([record_toy(name, episodes, noise, 10 * seed + i) for i, name in enumerate(TEACHERS)])


def toy_network(hidden: int = 64) -> NetworkConfig:
    return OpConditional(1).network_config(hidden=hidden, layout=TOY.layout)


def toy_score(learned: Learned, episodes: int = 200, seed: int = 9) -> list[float]:
    """Returns without luck, of each of `episodes` episodes: 5 is perfect. The same problems for the same seed."""
    env = OpConditional(episodes, seed)
    env.luck = 0.0
    actor = Actor(learned.network, episodes, learned.units.observations)
    observation, masks = env.reset()
    total = torch.zeros(episodes)
    for _ in range(env.length):
        step = env.step(actor.act(observation, masks))
        total += step.reward
        observation, masks = step.observation, step.masks
    return total.tolist()

"""Tiny vectorised environments, each testing one ability, and the loop that trains an agent on them.

They are environments for `play` with a plain vector in `overall`. An episode that is over stands still until `reset`;
one that reaches `length` without an end of its own was cut short.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from esper.agent.config import PPOConfig
from esper.agent.metrics import UpdateMetrics
from esper.agent.ppo import PPOAgent
from esper.env.spaces import ActionMasks, Observation
from esper.env.steps import EnvStep
from esper.policy.distribution import GROWTH_ACTIONS, ActionSpace
from esper.policy.network import FactoredRecurrentActorCritic, NetworkConfig
from esper.rollout.episodes import Episodes, join
from esper.rollout.play import play


def vector_observation(features: Tensor, blueprints: int = 1) -> Observation:
    """[..., G] as an observation without slots."""
    lead = features.shape[:-1]
    return Observation(
        overall=features,
        slots=features.new_zeros((*lead, 0, 0)),
        blueprints=torch.zeros((*lead, 0), dtype=torch.int64),
        costs=features.new_zeros((*lead, 0, blueprints)),
        present=torch.zeros((*lead, 0), dtype=torch.bool),
    )


def open_masks(lead: tuple[int, ...], ops: int, slots: int = 1, blueprints: int = 1, blends: int = 1) -> ActionMasks:
    """Everything is legal."""
    return ActionMasks(
        op=torch.ones((*lead, ops), dtype=torch.bool),
        slot=torch.ones((*lead, ops, slots), dtype=torch.bool),
        blueprint=torch.ones((*lead, slots, blueprints), dtype=torch.bool),
        blend=torch.ones((*lead, slots, blends), dtype=torch.bool),
    )


class ToyEnvironment:
    """Subclasses say what is seen, legal, paid and over. Draw ids mean nothing: problems come from the generator."""

    space = ActionSpace.uniform(2, ("op",))
    features = 1
    slots, blueprints, blends = 1, 1, 1
    scale = 1.0
    """Multiplies every reward."""
    situations = ()
    length = 0
    """Steps after which an episode is over."""

    def __init__(self, environments: int, seed: int = 0, length: int | None = None) -> None:
        self.environments = environments
        self.generator = torch.Generator().manual_seed(seed)
        self.length = length or self.length

    def network_config(self, **changes: object) -> NetworkConfig:
        settings: dict[str, object] = {
            "overall_features": self.features,
            "encoder": "vector",
            "space": self.space,
            "slots": self.slots,
            "blueprints": self.blueprints,
            "blends": self.blends,
            "hidden": 64,
        }
        return NetworkConfig(**{**settings, **changes})  # type: ignore[arg-type]

    @property
    def over(self) -> bool:
        return not bool(self.active.any())

    def reset(self, draws: Sequence[int] = (), *, held_out: bool = False) -> tuple[Observation, ActionMasks]:
        self.time = 0
        self.active = torch.ones(self.environments, dtype=torch.bool)
        self._restart()
        return self._observe(), self._masks()

    def step(self, action: Tensor) -> EnvStep:
        acted = self.active
        reward, terminated = self._apply(action)
        terminated = terminated & acted
        self.time += 1
        self.active = acted & ~terminated & (self.time < self.length)
        infos = (None,) * self.environments
        return EnvStep(self._observe(), self._masks(), reward * acted * self.scale, terminated, acted, infos)

    def _masks(self) -> ActionMasks:
        return open_masks((self.environments,), self.space.ops, self.slots, self.blueprints, self.blends)

    def _at_the_end(self) -> Tensor:
        return torch.full((self.environments,), self.time + 1 >= self.length)

    def _restart(self) -> None: ...
    def _observe(self) -> Observation: ...
    def _apply(self, action: Tensor) -> tuple[Tensor, Tensor]:
        """Reward and whether nothing follows, [N]."""


class MaskedMultiDiscrete(ToyEnvironment):
    """Name four digits of 0..3, shown one-hot, all of them right, 100 times; 6 of the 16 (head, digit) are forbidden.

    The heads are op, slot, blueprint and blend, and every op uses all of them. The right digit is always legal.
    """

    space = ActionSpace.uniform(4)
    features = 16
    slots, blueprints, blends = 4, 4, 4
    length = 100

    def _draw(self) -> None:
        shape = (self.environments, 4)
        self.target = torch.randint(0, 4, shape, generator=self.generator)
        wrong = torch.rand((self.environments, 16), generator=self.generator)
        wrong = wrong.view(-1, 4, 4).scatter(-1, self.target[..., None], -1.0)
        forbidden = wrong.flatten(1).topk(6, dim=1).indices
        self.legal = torch.ones(self.environments, 16, dtype=torch.bool).scatter(1, forbidden, False).view(-1, 4, 4)

    def _restart(self) -> None:
        self._draw()

    def _observe(self) -> Observation:
        shown = torch.nn.functional.one_hot(self.target, 4).flatten(1).float()
        return vector_observation(shown, self.blueprints)

    def _masks(self) -> ActionMasks:
        op, slot, blueprint, blend = self.legal.unbind(1)
        return ActionMasks(
            op=op,
            slot=slot[:, None].expand(-1, 4, -1),
            blueprint=blueprint[:, None].expand(-1, 4, -1),
            blend=blend[:, None].expand(-1, 4, -1),
        )

    def _apply(self, action: Tensor) -> tuple[Tensor, Tensor]:
        slot, blueprint, blend, op = action.unbind(-1)
        right = torch.stack((op, slot, blueprint, blend), -1) == self.target
        allowed = self.legal.gather(-1, torch.stack((op, slot, blueprint, blend), -1)[..., None]).all()
        assert bool(allowed), "a forbidden action was taken"
        self._draw()
        return right.all(-1).float(), self._at_the_end()


class CueMemory(ToyEnvironment):
    """One of four cues is shown for two steps; ten steps later it must be named. Chance is 0.25."""

    space = ActionSpace.uniform(4, ("op",))
    features = 5
    length = 12

    def _restart(self) -> None:
        self.cue = torch.randint(0, 4, (self.environments,), generator=self.generator)

    def _observe(self) -> Observation:
        shown = torch.nn.functional.one_hot(self.cue, 4).float() * (self.time < 2)
        asked = torch.full((self.environments, 1), float(self.time == self.length - 1))
        return vector_observation(torch.cat((shown, asked), dim=1))

    def _apply(self, action: Tensor) -> tuple[Tensor, Tensor]:
        over = self._at_the_end()
        return ((action[:, 3] == self.cue) & over).float(), over


class OpConditional(ToyEnvironment):
    """Sub-heads matter under one op only. A quarter of the contexts ask for GERMINATE with the slot, blueprint and
    blend that they show, and pay a third for each that is right. The others ask for WAIT: it pays 1, with luck."""

    space = GROWTH_ACTIONS
    slots, blueprints, blends = 4, 6, 3
    features = 2 + 4 + 6 + 3
    length = 5
    luck = 1.0

    def _draw(self) -> None:
        n, g = self.environments, self.generator
        self.asked = torch.rand(n, generator=g) < 0.25
        self.wanted = [torch.randint(0, k, (n,), generator=g) for k in (self.slots, self.blueprints, self.blends)]

    def _restart(self) -> None:
        self._draw()

    def _observe(self) -> Observation:
        sizes = (self.slots, self.blueprints, self.blends)
        one_hot = [torch.nn.functional.one_hot(w, k).float() for w, k in zip(self.wanted, sizes, strict=True)]
        asked = torch.stack((self.asked, ~self.asked), dim=1).float()
        return vector_observation(torch.cat((asked, *one_hot), dim=1), self.blueprints)

    def _apply(self, action: Tensor) -> tuple[Tensor, Tensor]:
        grown = action[:, 3] == 1
        right = torch.stack([action[:, h] == self.wanted[h] for h in range(3)]).float().mean(0)
        luck = torch.randn(self.environments, generator=self.generator)
        reward = torch.where(self.asked, right * grown, (action[:, 3] == 0) + luck * self.luck)
        self._draw()
        return reward, self._at_the_end()


class EndlessChain(ToyEnvironment):
    """Reward 1 for ever, whatever is done; the position on a ring of four is shown. V = 1 / (1 − γ) everywhere."""

    features = 4
    length = 32

    def _restart(self) -> None:
        self.position = torch.randint(0, 4, (self.environments,), generator=self.generator)

    def _observe(self) -> Observation:
        return vector_observation(torch.nn.functional.one_hot(self.position, 4).float())

    def _apply(self, action: Tensor) -> tuple[Tensor, Tensor]:
        self.position = (self.position + 1 + action[:, 3]) % 4
        return torch.ones(self.environments), torch.zeros(self.environments, dtype=torch.bool)


class CartPoleWithoutVelocities(ToyEnvironment):
    """The classic cart-pole (same equations and limits as Gymnasium's v1), of which only positions are shown."""

    features = 2
    length = 500
    track, tilt = 2.4, 12 * 2 * torch.pi / 360

    def _restart(self) -> None:
        self.body = torch.rand((self.environments, 4), generator=self.generator) * 0.1 - 0.05

    def _observe(self) -> Observation:
        return vector_observation(torch.stack((self.body[:, 0] / self.track, self.body[:, 2] / self.tilt), dim=1))

    def _apply(self, action: Tensor) -> tuple[Tensor, Tensor]:
        x, speed, angle, turn = self.body.unbind(1)
        force = torch.where(action[:, 3] == 1, 10.0, -10.0)
        cos, sin = angle.cos(), angle.sin()
        pull = (force + 0.05 * turn**2 * sin) / 1.1
        turning = (9.8 * sin - cos * pull) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
        speeding = pull - 0.05 * turning * cos / 1.1
        tau = 0.02
        body = torch.stack((x + tau * speed, speed + tau * speeding, angle + tau * turn, turn + tau * turning), 1)
        self.body = torch.where(self.active[:, None], body, self.body)
        fallen = (self.body[:, 0].abs() > self.track) | (self.body[:, 2].abs() > self.tilt)
        return torch.ones_like(x), fallen


def make_agent(env: ToyEnvironment, config: PPOConfig, seed: int = 0, **network: object) -> PPOAgent:
    torch.manual_seed(seed)
    return PPOAgent(FactoredRecurrentActorCritic(env.network_config(**network)), config, seed=seed)


def give_values(agent: PPOAgent) -> None:
    """Values that differ from state to state: a critic starts at zero, where most comparisons of values would hold."""
    torch.nn.init.orthogonal_(agent.network.value_output.weight)


def rollout(env: ToyEnvironment, agent: PPOAgent, steps: int = 1) -> Episodes:
    """One episode of each environment, again until there are so many steps. The seeds follow from the update's number,
    so that an agent that was saved and loaded plays on as it would have."""
    parts: list[Episodes] = []
    while sum(part.steps for part in parts) < steps:
        seed = 1000 * agent.update_count + len(parts)
        parts.append(play(env, agent.actor(seed), range(env.environments)))
    return join(parts)


def train(env: ToyEnvironment, agent: PPOAgent, total_steps: int, steps: int = 1) -> list[UpdateMetrics]:
    done, seen = 0, []
    while done < total_steps:
        episodes = rollout(env, agent, steps)
        done += episodes.steps
        seen.append(agent.update(episodes))
    return seen


def evaluate(env: ToyEnvironment, agent: PPOAgent, episodes: int, deterministic: bool = True) -> float:
    """Mean return of at least so many episodes."""
    actor = agent.actor(None if deterministic else 1)
    draws = range(env.environments)
    returns = [play(env, actor, draws).returns().mean() for _ in range(-(-episodes // env.environments))]
    return float(torch.stack(returns).mean())

"""`play`: the one loop in which an actor and an environment make episodes, for whoever needs some.

An environment gives observations, masks and rewards; an actor gives decisions. A learned policy is an actor by itself
(`agent/actor.py`); `ControllerActor` makes one of any controller, with exploration noise where that is wanted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from esper.actions import Action
from esper.env.observation import to_tensor
from esper.env.situation import Situation
from esper.env.spaces import ActionMasks, Observation
from esper.env.steps import EnvStep
from esper.env.world import World
from esper.policy.controller import ColumnController, Controller, RandomLegal, decisions_of
from esper.rollout.episodes import Episodes, stack_steps
from esper.rollout.facts import facts_from


class StoppedError(Exception):
    """`stop` ended a rollout before its episodes were over."""


class Environment(Protocol):
    """N episodes side by side. One that is over stands still: its observation stays the one after its last step."""

    @property
    def situations(self) -> Sequence[Situation] | World:
        """What controllers read: records, or the columns of thousands of networks."""

    @property
    def over(self) -> bool: ...

    def reset(self, draws: Sequence[int], /, *, held_out: bool) -> tuple[Observation, ActionMasks]: ...

    def step(self, actions: Tensor | Sequence[Action], /) -> EnvStep: ...


@runtime_checkable
class WorldEnv(Protocol):
    """An environment of growing networks: its steps have facts."""

    world: World
    kinds: Sequence[str]
    """Of the problems [N], where they are known; for analysis only."""


@dataclass(frozen=True, slots=True)
class Decisions:
    """What an actor decided about one step of N environments."""

    action: Tensor
    """[N, heads] int64: what is done."""
    label: Tensor
    """[N, heads] int64: what was decided; the same tensor where no noise replaces decisions."""
    log_prob: Tensor | None = None
    """[N, heads] of the action, where it was drawn from a policy."""
    value: Tensor | None = None
    """[N] the critic's output."""
    records: Sequence[Action] | None = None
    """The same as `action`, with reasons."""


class Actor(Protocol):
    """Whatever decides."""

    name: str

    def reset(self, draws: Sequence[int], /) -> None:
        """Begin new episodes, one per draw id."""

    def act(
        self, situations: Sequence[Situation] | World, observation: Observation, masks: ActionMasks, /
    ) -> Decisions: ...


class ControllerActor:
    """A controller as an actor. With probability `noise`, a random legal decision takes the place of the controller's;
    every episode has its own random numbers, which follow from the name and the draw id."""

    def __init__(self, controller: Controller, name: str | None = None, noise: float = 0.0) -> None:
        if not 0.0 <= noise <= 1.0:
            raise ValueError(f"noise is a probability, not {noise}")
        self.controller, self.noise = controller, noise
        self.name = controller.name if name is None else name
        self._rngs: list[random.Random] = []

    def reset(self, draws: Sequence[int]) -> None:
        self.controller.reset(draws)
        self._rngs = [random.Random(f"{self.name}/{draw}") for draw in draws]
        self._explorer = RandomLegal()
        self._explorer.reset(draws)

    def act(self, situations: Sequence[Situation] | World, observation: Observation, masks: ActionMasks) -> Decisions:
        if isinstance(situations, World):
            return self._act_on_columns(situations, observation, masks)
        decided = decisions_of(self.controller, situations)
        label = to_tensor(decided)
        if not self.noise:
            return Decisions(label, label, records=decided)
        explore = RandomLegal().rule
        done = [
            explore(situation, rng) if rng.random() < self.noise else action
            for situation, rng, action in zip(situations, self._rngs, decided, strict=True)
        ]
        return Decisions(to_tensor(done), label, records=done)

    def _act_on_columns(self, world: World, observation: Observation, masks: ActionMasks) -> Decisions:
        if not isinstance(self.controller, ColumnController):
            raise ValueError(f"the controller {self.name} has no `act` over columns: play it with the eager engine")
        label = self.controller.act(world, observation, masks)
        if not self.noise:
            return Decisions(label, label)
        chance = torch.tensor([rng.random() for rng in self._rngs], device=label.device)
        done = torch.where((chance < self.noise)[:, None], self._explorer.act(world, observation, masks), label)
        return Decisions(done, label)


def never() -> bool:
    return False


def play(
    env: Environment,
    actor: Actor,
    draws: Sequence[int],
    *,
    held_out: bool = False,
    longest: int | None = None,
    stop: Callable[[], bool] = never,
) -> Episodes:
    """One episode of every draw, from its first step to its last; `longest` is the number of steps it may have."""
    observation, masks = env.reset(draws, held_out=held_out)
    actor.reset(draws)
    seen: list[tuple[Observation, ActionMasks]] = []
    decided: list[Decisions] = []
    given: list[EnvStep] = []
    while not env.over:
        if stop():
            raise StoppedError
        if len(given) == longest:
            raise ValueError(f"an episode lasts longer than the {longest} steps that it may have")
        decisions = actor.act(env.situations, observation, masks)
        step = env.step(decisions.action if decisions.records is None else decisions.records)
        seen.append((observation, masks))
        decided.append(decisions)
        given.append(step)
        observation, masks = step.observation, step.masks
    infos = zip(*(step.infos for step in given), strict=True)  # [N][T], or nothing
    facts = [step.facts for step in given if step.facts is not None]
    device, draw = observation.overall.device, torch.tensor(draws)
    action = torch.stack([d.action for d in decided], 1).to(device)
    same = all(d.label is d.action for d in decided)
    return Episodes(
        observation=stack_steps([o for o, _ in seen]),
        masks=stack_steps([m for _, m in seen]),
        action=action,
        label=action if same else torch.stack([d.label for d in decided], 1).to(device),
        reward=torch.stack([step.reward for step in given], 1),
        terminated=torch.stack([step.terminated for step in given], 1),
        lengths=torch.stack([step.acted for step in given], 1).sum(1),
        draw=draw.to(device),
        controller=torch.zeros_like(draw, device=device),
        controllers=(actor.name,),
        final=observation,
        log_prob=_stacked([d.log_prob for d in decided]),
        value=_stacked([d.value for d in decided]),
        reports=tuple(tuple(info for info in row if info is not None) for row in infos),
        facts=facts_from(stack_steps(facts), env.world, env.kinds) if facts and isinstance(env, WorldEnv) else None,
    )


def _stacked(column: Sequence[Tensor | None]) -> Tensor | None:
    there = [tensor for tensor in column if tensor is not None]
    return torch.stack(there, 1) if len(there) == len(column) else None

"""Controllers decide what to grow, where and when. One interface for rules and for the learned policy.

A rule is written once, over columns of N networks on any device (`choose`). A world of thousands of networks asks for
tensors (`act`); who shows decisions to people asks for records with reasons (`decide`).
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.actions import BLENDS, HEAD_NAMES, Action, Op
from esper.env.observation import decode_one
from esper.env.situation import Situation, world_of
from esper.env.spaces import ActionMasks, Observation
from esper.env.world import World
from esper.errors import shown
from esper.plain_data import as_data
from esper.policy.distribution import GROWTH_ACTIONS, FactoredLogits, FactoredPolicy


class Controller(Protocol):
    """Decides for a number of networks at once, one action each per epoch."""

    name: str

    def reset(self, seeds: Sequence[int]) -> None:
        """Begin new episodes, one per seed; drop the old ones."""

    def decide(self, situations: Sequence[Situation]) -> list[Action]:
        """One action per network, in the order of `reset`. Each must be one that its situation allows."""


def decisions_of(controller: Controller, situations: Sequence[Situation]) -> list[Action]:
    """What a controller decides; an answer that is not one action for each network is refused in its name."""
    decided = controller.decide(situations)
    given = decided if isinstance(decided, list | tuple) else [decided]
    if decided is not given or len(given) != len(situations) or not all(isinstance(one, Action) for one in given):
        raise ValueError(
            f"the controller {controller.name!r} must answer decide() with a list of one Action for each network "
            f"({len(situations)}), not {shown(decided)}; Action() waits"
        )
    return list(given)


@runtime_checkable
class ColumnController(Controller, Protocol):
    """One that can also decide for a world of columns, on its device. All but those of a person's own model can."""

    def act(self, world: World, observation: Observation, masks: ActionMasks) -> Tensor:
        """One action per network, [N, heads], without reasons and without waiting for the device."""

    def state_dict(self) -> dict[str, Any]:
        """Its state in the episodes that it was reset for, as plain data and tensors."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """After `reset`, with what `state_dict` gave."""


class RuleController(ABC):
    """A controller written as a rule over columns."""

    name: str

    def __init__(self) -> None:
        self._networks = 0

    def reset(self, seeds: Sequence[int]) -> None:
        self._networks = len(seeds)

    def state_dict(self) -> dict[str, Any]:
        """Its state in its episodes: none, unless a rule says otherwise."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """After `reset`, with what `state_dict` gave."""
        if state:
            raise ValueError(f"{self.name} remembers nothing, so this is no state of it")

    def act(self, world: World, observation: Observation, masks: ActionMasks) -> Tensor:
        return self.choose(world, masks)[0]

    def decide(self, situations: Sequence[Situation]) -> list[Action]:
        self._check(situations)
        if not situations:
            return []
        actions, codes = (part.tolist() for part in self.choose(*world_of(situations)))
        rows = zip(actions, codes, situations, strict=True)
        return [decode_one(action, self.reason(action, code, situation)) for action, code, situation in rows]

    def _check(self, situations: Sequence[Situation]) -> None:
        if len(situations) != self._networks:
            raise ValueError(f"{self.name} was reset for {self._networks} learners, not {len(situations)}")

    @abstractmethod
    def choose(self, world: World, masks: ActionMasks) -> tuple[Tensor, Tensor]:
        """Actions [N, heads] and a code [N] of why, for `reason`."""

    def reason(self, action: Sequence[int], code: int, situation: Situation) -> str:
        """Why an action, in the order of `HEAD_NAMES`, was chosen."""
        return ""


def first(where: Tensor) -> tuple[Tensor, Tensor]:
    """The first true column of each row of [N, K]: whether there is one, and its index, else 0; both [N]."""
    index = F.pad(where, (0, 1), value=True).int().argmax(1)  # also where K is 0
    found = index < where.shape[1]
    return found, index * found


def waiting(world: World) -> Tensor:
    """[N, heads]: WAIT for every network."""
    return torch.full((world.epoch.shape[0], len(HEAD_NAMES)), int(Op.WAIT), device=world.epoch.device)


@cache
def _uses(device: torch.device) -> Tensor:
    return GROWTH_ACTIONS.table(device)


class NoGrowth(RuleController):
    """Never grows anything: the host alone."""

    name = "none"

    def choose(self, world: World, masks: ActionMasks) -> tuple[Tensor, Tensor]:
        return waiting(world), torch.zeros_like(world.epoch)


class RandomLegal(RuleController):
    """A uniformly random legal operation, then a uniformly random legal way to do it.

    The random numbers of `decide` are each network's own; those of `act` are of all networks together.
    """

    name = "random"

    def __init__(self) -> None:
        super().__init__()
        self._rngs: list[random.Random] = []
        self._seed = 0
        self._generator: torch.Generator | None = None
        """On the world's device, from the first `act` of an episode on."""

    def reset(self, seeds: Sequence[int]) -> None:
        super().reset(seeds)
        self._rngs = [random.Random(seed) for seed in seeds]
        self._seed = random.Random(str(list(seeds))).getrandbits(63)
        self._generator = None

    def state_dict(self) -> dict[str, Any]:
        return {"rngs": [as_data(rng.getstate()) for rng in self._rngs]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for rng, (version, numbers, gauss) in zip(self._rngs, state["rngs"], strict=True):
            rng.setstate((version, tuple(numbers), gauss))

    def choose(self, world: World, masks: ActionMasks) -> tuple[Tensor, Tensor]:
        device, code = masks.op.device, torch.zeros_like(world.epoch)
        if not masks.slot.shape[-1]:  # not one slot to draw from
            return waiting(world), code
        if self._generator is None:
            self._generator = torch.Generator(device).manual_seed(self._seed)
        heads = (masks.op, masks.slot, masks.blueprint, masks.blend)
        logits = FactoredLogits(*(torch.zeros_like(mask, dtype=torch.float32) for mask in heads))
        policy = FactoredPolicy.from_logits(logits, masks, _uses(device))
        return policy.sample(self._generator)[0], code

    def decide(self, situations: Sequence[Situation]) -> list[Action]:
        self._check(situations)
        return [self.rule(situation, rng) for situation, rng in zip(situations, self._rngs, strict=True)]

    @staticmethod
    def rule(situation: Situation, rng: random.Random) -> Action:
        ops = [op for op in Op if op is Op.WAIT or situation.slots_for(op)]
        op = rng.choice(ops)
        if op is Op.WAIT:
            return Action(reason="at random")
        slot = rng.choice(situation.slots_for(op))
        if op is Op.GERMINATE:
            blueprint = rng.choice(sorted(slot.growable))
            return Action(op, slot.index, blueprint, rng.choice(BLENDS), reason="at random")
        return Action(op, slot.index, reason="at random")

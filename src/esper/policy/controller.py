"""Controllers decide what to grow, where and when. One interface for rules and for the learned policy."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from esper.actions import BLENDS, WAIT, Action, Op
from esper.env.situation import Situation


class Controller(Protocol):
    """Decides for a number of learners at once, one action each per epoch."""

    name: str

    def reset(self, seeds: Sequence[int]) -> None:
        """Begin new episodes, one per seed; forget the old ones."""

    def decide(self, situations: Sequence[Situation]) -> list[Action]:
        """One action per learner, in the order of `reset`. Each must be one that its situation allows."""


_Memory = TypeVar("_Memory")


class RuleController(ABC, Generic[_Memory]):
    """A controller written as a rule for one learner, with a memory per learner."""

    name: str

    def __init__(self) -> None:
        self._memories: list[_Memory] = []

    def reset(self, seeds: Sequence[int]) -> None:
        self._memories = [self.new_memory(seed) for seed in seeds]

    def decide(self, situations: Sequence[Situation]) -> list[Action]:
        if len(situations) != len(self._memories):
            raise ValueError(f"{self.name} was reset for {len(self._memories)} learners, not {len(situations)}")
        return [self.rule(s, m) for s, m in zip(situations, self._memories, strict=True)]

    @abstractmethod
    def new_memory(self, seed: int) -> _Memory: ...

    @abstractmethod
    def rule(self, situation: Situation, memory: _Memory) -> Action: ...


class NoGrowth(RuleController[None]):
    """Never grows anything: the host alone."""

    name = "none"

    def new_memory(self, seed: int) -> None:
        return None

    def rule(self, situation: Situation, memory: None) -> Action:
        return WAIT


class RandomLegal(RuleController[random.Random]):
    """A uniformly random legal operation, then a uniformly random legal way to do it."""

    name = "random"

    def new_memory(self, seed: int) -> random.Random:
        return random.Random(seed)

    def rule(self, situation: Situation, memory: random.Random) -> Action:
        ops = [op for op in Op if op is Op.WAIT or situation.slots_for(op)]
        op = memory.choice(ops)
        if op is Op.WAIT:
            return Action(reason="at random")
        slot = memory.choice(situation.slots_for(op))
        if op is Op.GERMINATE:
            blueprint = memory.choice(sorted(slot.growable))
            return Action(op, slot.index, blueprint, memory.choice(BLENDS), reason="at random")
        return Action(op, slot.index, reason="at random")


class ByHost:
    """Two controllers behind one name: `dense` decides for hosts whose slots are all dense, `others` for the rest.

    Each sees its own learners only, so it decides as it would without the other.
    """

    def __init__(self, name: str, dense: Controller, others: Controller) -> None:
        self.name, self.dense, self.others = name, dense, others
        self._seeds: list[int] = []
        self._parts: list[tuple[Controller, list[int]]] | None = None
        """Each controller with the places of its learners, from the first decision of an episode on."""

    def reset(self, seeds: Sequence[int]) -> None:
        self._seeds, self._parts = list(seeds), None

    def decide(self, situations: Sequence[Situation]) -> list[Action]:
        if len(situations) != len(self._seeds):
            raise ValueError(f"{self.name} was reset for {len(self._seeds)} learners, not {len(situations)}")
        if self._parts is None:  # slots do not change their layout, so the parts hold for whole episodes
            places: dict[bool, list[int]] = {True: [], False: []}
            for place, situation in enumerate(situations):
                places[all(slot.layout == "dense" for slot in situation.slots)].append(place)
            parts = ((self.dense, places[True]), (self.others, places[False]))
            self._parts = [(controller, theirs) for controller, theirs in parts if theirs]
            for controller, theirs in self._parts:
                controller.reset([self._seeds[place] for place in theirs])
        actions = [WAIT] * len(situations)
        for controller, theirs in self._parts:
            for place, action in zip(theirs, controller.decide([situations[i] for i in theirs]), strict=True):
                actions[place] = action
        return actions

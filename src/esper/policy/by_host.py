"""Two controllers behind one name: which of them decides about a host depends on its slots alone."""

from __future__ import annotations

from collections.abc import Sequence

from esper.actions import WAIT, Action
from esper.env.situation import Situation
from esper.policy.controller import Controller


class ByHost:
    """Asks `dense` about hosts whose slots are all dense, and `others` about every other host.

    Each sees its own learners only, so it decides as it would without the other.
    """

    def __init__(self, name: str, dense: Controller, others: Controller) -> None:
        self.name = name
        self.dense = dense
        self.others = others
        self._seeds: list[int] = []
        self._asked: list[tuple[Controller, list[int]]] | None = None

    def reset(self, seeds: Sequence[int]) -> None:
        self._seeds, self._asked = list(seeds), None

    def decide(self, situations: Sequence[Situation]) -> list[Action]:
        if len(situations) != len(self._seeds):
            raise ValueError(f"{self.name} was reset for {len(self._seeds)} learners, not {len(situations)}")
        if self._asked is None:
            self._asked = self._begin(situations)
        actions = [WAIT] * len(situations)
        for controller, places in self._asked:
            decided = controller.decide([situations[place] for place in places])
            for place, action in zip(places, decided, strict=True):
                actions[place] = action
        return actions

    def _begin(self, situations: Sequence[Situation]) -> list[tuple[Controller, list[int]]]:
        """Who is asked about which learners. Slots do not change their layout, so this holds for whole episodes."""
        dense = [all(slot.layout == "dense" for slot in situation.slots) for situation in situations]
        asked = []
        for controller, kind in ((self.dense, True), (self.others, False)):
            places = [place for place, is_dense in enumerate(dense) if is_dense is kind]
            if places:
                controller.reset([self._seeds[place] for place in places])
                asked.append((controller, places))
        return asked

"""Two controllers behind one name: each is asked about its own hosts, and does not notice the other."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.actions import Action, Op
from esper.policy.controller import ByHost

LAYOUTS = ("dense", "conv1d", "conv2d", "sequence")


class Noting:
    """Says by its action who it is, which seed the learner has, and how often it has decided since reset."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seeds: list[int] = []
        self.decided = 0

    def reset(self, seeds: Sequence[int]) -> None:
        self.seeds, self.decided = list(seeds), 0

    def decide(self, situations: Sequence[Any]) -> list[Action]:
        self.decided += 1
        says = f"{self.name} {self.decided}"
        pairs = zip(situations, self.seeds, strict=True)
        return [Action(Op.PRUNE, situation.epoch, reason=f"{says}, seed {seed}") for situation, seed in pairs]


def situation(layouts: Sequence[str], number: int = 0) -> Any:
    return SimpleNamespace(slots=[SimpleNamespace(layout=layout) for layout in layouts], epoch=number)


hosts = st.lists(st.lists(st.sampled_from(LAYOUTS), max_size=3), min_size=1, max_size=6)


@given(hosts=hosts, again=hosts)
def test_every_learner_gets_the_answer_that_is_meant_for_it(hosts: list[list[str]], again: list[list[str]]) -> None:
    pair = ByHost("pair", Noting("dense"), Noting("others"))
    for episode in (hosts, again):  # the second reset forgets the first episodes
        seeds = [7 + 2 * place for place in range(len(episode))]
        pair.reset(seeds)
        for epoch in (1, 2, 3):
            actions = pair.decide([situation(layouts, place) for place, layouts in enumerate(episode)])
            assert [action.slot for action in actions] == list(range(len(episode)))
            for action, layouts, seed in zip(actions, episode, seeds, strict=True):
                who = "dense" if set(layouts) <= {"dense"} else "others"
                assert action.reason == f"{who} {epoch}, seed {seed}"


def test_it_decides_for_as_many_as_it_was_reset_for() -> None:
    pair = ByHost("pair", Noting("dense"), Noting("others"))
    pair.reset([0, 1])
    with pytest.raises(ValueError, match="pair was reset for 2 learners, not 1"):
        pair.decide([situation(["dense"])])

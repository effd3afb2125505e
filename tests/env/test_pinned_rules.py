"""The rules over columns against the rules that they replaced, on what real networks measured.

`pinned_rules.json.gz` has 20 of 200 episodes of random legal play over all families that the code of commit 884ad7d
recorded: what the engine measured, and what the per-slot rules made of it in float64. All 200 (4,135 steps, 17 of them
undone by the governor) were replayed when the rules became columns: stages, masks, alphas and rewards exactly,
observations to 3e-16.

Covers: R114, R138, R149
"""

from __future__ import annotations

import pytest
from pinned_replay import Replay, pinned

from esper.env.reward import TERMS
from esper.growth.blueprints import blueprint_names


def test_the_names_are_the_recorded_ones() -> None:
    assert list(TERMS) == pinned()["terms"]
    assert list(blueprint_names()[: len(pinned()["blueprints"])]) == pinned()["blueprints"]


@pytest.mark.parametrize("index", range(20))
def test_columns_give_what_the_replaced_rules_gave(index: int) -> None:
    replay = Replay(pinned()["episodes"][index])
    replay.look(0)
    for t in range(len(replay.e["action"])):
        replay.step(t)
        replay.look(t + 1)

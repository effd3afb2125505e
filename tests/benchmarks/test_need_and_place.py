"""Need and place: every kind of problem has its schedules, whatever its layout.

Covers: R149 (what growing is worth, and where)
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from esper.growth.blueprints import SlotShape, fitting
from esper.tasks.family import get_family

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import need_and_place as page


@pytest.mark.parametrize("kind", ["series composition @0", "image motif @1", "vector scale @0", "token distant @1"])
def test_everything_is_tried_everywhere_and_so_is_what_was_meant(kind: str) -> None:
    draw = get_family("mixed", kinds=[kind]).draw(0)
    model = page.body(draw)
    names = [blueprint.name for blueprint in fitting(model.slots[0].shape)]
    tried = page.schedules(model)
    assert len(set(tried)) == len(tried)
    assert {f"{name}@{slot}" for name in names for slot in range(3)} <= set(tried)
    assert page.NONE in tried
    assert str(draw.facts["answer"]) in tried
    assert page.plan_of(str(draw.facts["answer"]), model) == draw.facts["answer"]  # the limits let all of it germinate


@pytest.mark.parametrize("layout", ["conv1d", "conv2d", "dense", "sequence"])
def test_every_layout_has_schedules_of_seeds_that_fit_it(layout: str) -> None:
    fit = {blueprint.name for blueprint in fitting(SlotShape(layout, 8))}  # type: ignore[arg-type]
    assert {part.split("@")[0] for text in page.COMBINATIONS[layout] for part in text.split("+")} <= fit


def problem(number: int, scores: dict[str, float]) -> page.Problem:
    draw = replace(get_family("mixed/vector").draw(number), facts={"kind": "vector scale @0", "number": number})
    table = np.array([[value, value] for value in scores.values()])  # [schedules, seeds]
    return page.Problem(draw, "dense", tuple(scores), table, table, {name: name for name in scores})


def test_headroom_is_what_choosing_per_draw_gains_over_the_best_single_schedule() -> None:
    # alone, norm@0 has (90 + 60) / 2 = 75 and mlp@1 (60 + 88) / 2 = 74; per draw 90 and 88, so gains of 0 and 28
    both = [
        problem(0, {"none": 50.0, "norm@0": 90.0, "mlp@1": 60.0}),
        problem(1, {"none": 50.0, "norm@0": 60.0, "mlp@1": 88.0}),
    ]
    found = page.headroom(both)
    assert found["single"] == {"dense": "norm@0"}
    assert found["gains"] == [0.0, 28.0]
    assert found["points"] == 14.0
    runs = {("mixed", n, page.NONE, 0): page.Run(50.0, 50.0, 60.0) for n in (0, 1)}
    text = page.page(both, both, "python benchmarks/need_and_place.py", runs)
    assert "14.0 points of score better than the best single one" in text
    assert "| vector scale @0 |  | 50.0 | norm@0 | 75.0 | mlp@1 74.0 |  |" in text
    assert "| norm | **75.0** |  |" in text
    assert "2 runs, 2 minutes of one core" in text


def test_a_run_is_scored_as_the_network_ends() -> None:
    alone, grown = (page.run(("mixed/vector channel", 0, plan, 0)) for plan in (page.NONE, "mlp_small@0"))
    again = page.run(("mixed/vector channel", 0, page.NONE, 0))
    assert (alone.val, alone.test) == (again.val, again.test)
    assert alone.test != grown.test

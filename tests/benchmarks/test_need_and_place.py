"""Need and place: every kind of problem has its schedules, whatever its layout.

Covers: R149 (what growing is worth, and where)
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from esper.growth.blueprints import SlotShape, fitting
from esper.tasks.family import get_family
from esper.tasks.mixed import KINDS

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import need_and_place as page


@pytest.mark.parametrize("kind", ["series composition @0", "image motif @1", "vector scale @0", "token distant @1"])
def test_everything_is_tried_everywhere_and_so_is_what_was_meant(kind: str) -> None:
    draw = get_family("mixed", kinds=[kind]).draw(0)
    model = page.body(draw)
    names = [blueprint.name for blueprint in fitting(model.slots[0].shape)]
    tried = page.schedules(model, quick=False)
    assert len(set(tried)) == len(tried)
    assert {f"{name}@{slot}" for name in names for slot in range(3)} <= set(tried)
    assert str(draw.facts["answer"]) in tried
    assert page.plan_of(str(draw.facts["answer"]), model) == draw.facts["answer"]  # the limits let all of it germinate
    quick = page.schedules(model, quick=True)
    assert set(quick) < set(tried)
    assert page.NONE in quick


@pytest.mark.parametrize("layout", ["conv1d", "conv2d", "dense", "sequence"])
def test_every_layout_has_schedules_of_seeds_that_fit_it(layout: str) -> None:
    fit = {blueprint.name for blueprint in fitting(SlotShape(layout, 8))}  # type: ignore[arg-type]
    assert {part.split("@")[0] for text in page.COMBINATIONS[layout] for part in text.split("+")} <= fit
    assert set(page.QUICK[layout]) <= fit


def test_the_quick_kinds_are_kinds() -> None:
    assert set(page.QUICK_KINDS) < set(KINDS)

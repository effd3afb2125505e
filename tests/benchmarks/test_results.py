"""The page of results: figures worked out by hand, parts that are really played, a page that is what the JSON says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import results
from esper.agent.shipped import provenance
from esper.engine.prepare import task_learner
from esper.tasks.family import get_family
from results import (
    BEFORE,
    LEARNED,
    PARTS,
    OtherNumbers,
    Part,
    by_kind,
    harm_table,
    harmed,
    lead,
    measure,
    over_parts,
    read,
    render,
    sum_of,
    write,
)
from short_family import ShortFamily


def part(**scores: list[float]) -> dict[str, Any]:
    arms = {
        arm: {
            "made": {"command": f"play {arm}", "sha256": ""},
            "score": values,
            "accuracy": values,
            "size": [1.5] * len(values),
            "kept": ["norm@0"] * len(values),
            "planted": [1] * len(values),
        }
        for arm, values in scores.items()
    }
    return {"family": "mixed", "rent": 5.0, "draws": [0, 1, 2, 3], "kinds": ["b", "a", "b", "a"], "arms": arms}


def test_leads_are_paired_by_draw() -> None:
    hard_and_easy = part(small=[11.0, 51.0, 91.0, 31.0], none=[10.0, 50.0, 90.0, 30.0])
    found = lead(hard_and_easy, "none")
    assert (found.value, found.low, found.high) == (1.0, 1.0, 1.0)


def test_families_count_alike_in_the_mean_over_them() -> None:
    near = part(small=[2.0] * 4, schedule=[0.0] * 4)
    far = part(small=[10.0] * 2, schedule=[0.0] * 2)
    assert over_parts([near, far], "schedule").value == pytest.approx(6.0)


def test_harm_is_what_ends_clearly_below_no_growth() -> None:
    found = part(small=[9.4, 9.6, 5.0, 12.0], none=[10.0] * 4)
    assert harmed(found) == pytest.approx([-5.0, -0.6])
    assert by_kind(found) == {"a": [1, 3], "b": [0, 2]}
    chance = part(small=[9.4, 9.6, 5.0, 12.0], none=[10.0] * 4, again=[9.0, 10.0, 11.0, 10.0])
    assert "| 2 of 4 | 50 % | −5.0, −0.6 | 25 % |" in "\n".join(harm_table({"mixed": chance}))


def test_a_part_is_played_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(PARTS, "tiny", Part("tiny", 3, "tiny"))
    monkeypatch.setattr(results, "family_of", lambda name: ShortFamily("mixed/vector"))
    found = measure("tiny", ["none", "schedule"], {"none": "none", "schedule": "schedule"}, 1)
    assert found["draws"] == [0, 1, 2]
    assert found["arms"]["none"]["size"] == [1.0] * 3
    schedule = found["arms"]["schedule"]
    assert all(a >= b for a, b in zip(schedule["accuracy"], schedule["score"], strict=True))
    path = tmp_path / "results.json"
    write({"tiny": found}, path)
    assert read(path) == {"tiny": found}
    assert read(tmp_path / "none.json") == {}


@pytest.mark.parametrize("name", ["grammar/vector", "mixed/vector"])
def test_the_same_problem_by_other_numbers(name: str) -> None:
    plain, other = get_family(name).draw(3, held_out=True), OtherNumbers(get_family(name)).draw(3, held_out=True)
    assert torch.equal(plain.task.splits.test.x, other.task.splits.test.x)
    assert plain.facts == other.facts
    ends = []
    for drawn in (plain, plain, other):
        learner = task_learner(drawn.task, drawn.seed, 2)
        learner.train()
        ends.append(torch.cat([p.detach().flatten() for p in learner.model.host.parameters()]))
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_the_page_has_what_was_measured_and_says_what_was_not(tmp_path: Path) -> None:
    arms = {
        "none": [10.0] * 4,
        "schedule": [20.0] * 4,
        "heuristic": [15.0] * 4,
        BEFORE: [24.0] * 4,
        LEARNED: [25.0] * 4,
    }
    text = render({"mixed": part(**arms), "rent 0": {**part(small=[25.0] * 4), "rent": 0.0}}, tmp_path)
    assert "| 10.0 | 20.0 | 15.0 | 24.0 | 25.0 | ×1.50 |" in text
    assert "| `mixed` | +15.0 (+15.0 to +15.0) | +5.0 (+5.0 to +5.0) |" in text
    assert "Not measured." in text  # kinds
    assert "| 0 | 25.0 (25.0 to 25.0) | ×1.50 (1.50 to 1.50) | 1.0 |" in text
    assert (tmp_path / "results_leads.png").stat().st_size > 1000


def test_the_page_in_docs_is_of_the_numbers_and_the_controller_that_ship(tmp_path: Path) -> None:
    store = read()
    assert store["mixed"]["arms"][LEARNED]["made"]["sha256"] == provenance(LEARNED).sha256 == sum_of(LEARNED)
    assert results.PAGE.read_text("utf-8") == render(store, tmp_path)

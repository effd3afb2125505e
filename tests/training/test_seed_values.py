"""What the seeds of the final network contribute, at the end of a run: in `Grown.history`, `history.json`, and a table.

Covers: R138, and the counterfactuals that DESIGN 3 names
"""

from __future__ import annotations

import json
from itertools import chain, combinations
from pathlib import Path

import pytest
import torch
from test_growing import quick_grow, rings
from torch import Tensor

import esper
from esper.engine import counterfactual
from esper.growth.graft import Grafted
from esper.policy.schedule import FixedSchedule, Planting

TWO = FixedSchedule("two", [Planting(1, 0, {"dense": "mlp"}), Planting(2, 1, {"dense": "lora"})])


def accuracies(grown: esper.Grown) -> dict[frozenset[int], float]:
    """Validation accuracy of the exported model with each set of its grown parts, the others switched off by hand."""
    x, y = rings(128, 1)
    parts = [module for module in grown.model.modules() if isinstance(module, Grafted)]
    own = [part.alpha for part in parts]
    numbers = range(len(parts))
    found = {}
    for acting in chain.from_iterable(combinations(numbers, k) for k in range(len(parts) + 1)):
        for i, part in enumerate(parts):
            part.alpha = own[i] if i in acting else 0.0
        with torch.no_grad():
            found[frozenset(acting)] = 100.0 * (grown.model(x).argmax(1) == y).double().mean().item()
    for part, alpha in zip(parts, own, strict=True):
        part.alpha = alpha
    return found


def test_values_of_two_seeds_from_the_exported_model_and_their_sum() -> None:
    grown = quick_grow(controller=TWO, epochs=12)
    v = accuracies(grown)
    none, a, b, both = (v[frozenset(s)] for s in ((), (0,), (1,), (0, 1)))
    assert both != none
    assert both == pytest.approx(grown.validation.accuracy, abs=1e-9)
    first, second = (story.value for story in grown.history.seeds())
    assert first is not None
    assert second is not None
    assert first.contribution.accuracy == pytest.approx(both - b, abs=1e-9)
    assert second.contribution.accuracy == pytest.approx(both - a, abs=1e-9)
    assert first.shapley.accuracy == pytest.approx(((a - none) + (both - b)) / 2, abs=1e-9)
    assert second.shapley.accuracy == pytest.approx(((b - none) + (both - a)) / 2, abs=1e-9)
    assert first.shapley.accuracy + second.shapley.accuracy == pytest.approx(both - none, abs=1e-9)


def test_the_history_file_has_the_values(tmp_path: Path) -> None:
    grown = quick_grow(controller=TWO, epochs=12)
    grown.save(tmp_path)
    saved = json.loads((tmp_path / "history.json").read_text())["seeds"]
    for seed, story in zip(saved, grown.history.seeds(), strict=True):
        assert story.value is not None
        assert seed["value"]["shapley"]["accuracy"] == story.value.shapley.accuracy
        assert seed["value"]["contribution"]["error"] == story.value.contribution.error


def test_a_seed_that_does_not_act_in_the_final_network_has_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise AssertionError("nothing acts: nothing to measure")

    monkeypatch.setattr(counterfactual, "_ask", fail)
    grown = quick_grow(controller=FixedSchedule("late", [Planting(5, 0, {"dense": "mlp"})]), epochs=6)
    assert [story.value for story in grown.history.seeds()] == [None]
    assert grown.history.to_json()["seeds"][0]["value"] is None
    assert not any("could not be measured" in remark for remark in grown.remarks)


def test_a_metric_of_the_whole_set_has_values_too() -> None:
    def accuracy_of_set(outputs: Tensor, targets: Tensor) -> float:
        return 100.0 * float((outputs.argmax(1) == targets).double().mean())

    values = [
        [(s.value.contribution.accuracy, s.value.shapley.accuracy) for s in grown.history.seeds() if s.value]
        for grown in (
            quick_grow(controller=TWO, epochs=12),
            quick_grow(controller=TWO, epochs=12, metric=accuracy_of_set),
        )
    ]
    assert len(values[0]) == 2
    assert values[0] == [pytest.approx(pair) for pair in values[1]]


def test_a_metric_that_fails_at_the_end_does_not_lose_the_grown_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("only one class is predicted\nsecond line")

    monkeypatch.setattr(counterfactual, "_ask", fail)
    grown = quick_grow()
    assert [story.value for story in grown.history.seeds()] == [None]
    assert grown.remarks[-1] == (
        "What each seed contributes to the final network could not be measured: only one class is predicted."
    )

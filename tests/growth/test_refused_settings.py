"""Settings that would be ignored, or that make no sense, are refused before anything is trained."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from esper.growth.attach import AttachError, attach

X = torch.randn(4, 1, 16)


def net() -> nn.Module:
    return nn.Sequential(nn.Conv1d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 8, 3, padding=1), nn.Flatten())


@pytest.mark.parametrize("option", ["layouts", "visibility"])
def test_a_pattern_that_no_slot_has_is_refused_with_the_near_miss(option: str) -> None:
    word = "conv1d" if option == "layouts" else "both"
    named = nn.Sequential()
    named.add_module("layer1", net()[0])
    named.add_module("layer2", net()[2])
    with pytest.raises(AttachError, match=rf"{option} names 'layr1', which is no slot; did you mean layer1 or"):
        attach(named, ["layer*"], X, **{option: {"layr1": word}})
    with pytest.raises(AttachError, match=rf"{option} names 'zzz', which is no slot; the slots are layer1, layer2"):
        attach(named, ["layer*"], X, **{option: {"layer1": word, "zzz": word}})
    attach(named, ["layer*"], X, **{option: {"layer*": word}})
    attach(named, ["layer1"], X, **{option: {"*": word}})


@pytest.mark.parametrize("budget", [float("nan"), float("inf"), 1e9, "many", True])
def test_a_budget_is_a_whole_number(budget: object) -> None:
    with pytest.raises(ValueError, match="the budget must be a whole number of parameters, not"):
        attach(net(), ["0"], X, budget=budget)


@pytest.mark.parametrize("most", [-1, 1.5, float("nan"), True])
def test_the_most_seeds_are_a_whole_number_from_0_on(most: object) -> None:
    with pytest.raises(ValueError, match="max_seeds must be a whole number, 0 or more, not"):
        attach(net(), ["0"], X, max_seeds=most)


def test_numbers_of_numpy_are_numbers() -> None:
    model = attach(net(), ["0"], X, budget=np.int64(10_000), max_seeds=np.int32(0))
    assert (model.budget, model.max_seeds) == (10_000, 0)

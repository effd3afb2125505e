"""A seed that learns moves neither random numbers nor what modules note on themselves, wherever these are kept.

Covers: R149
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import esper
from esper.actions import Action, Op
from esper.env.situation import Situation
from esper.growth.randomness import OtherRngs, preserved_rng
from esper.lifecycle import Rules

X = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
DATA = (X[:48], Y[:48]), (X[48:], Y[48:])


def draws() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


class Drops(nn.Module):
    """Leaves a layer out by chance, and follows the mean of what it sees in a plain attribute."""

    def __init__(self, number: Callable[[], float]) -> None:
        super().__init__()
        self.first, self.layer, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.number = number
        self.mean = torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        h = h - self.mean
        if not (self.training and self.number() < 0.5):
            h = h + self.layer(h).relu()
        return self.head(h)  # type: ignore[no-any-return]


class Plants:
    """One seed, which learns to the end."""

    name = "plants"

    def reset(self, seeds: Any) -> None: ...

    def decide(self, situations: list[Situation]) -> list[Action]:
        slots = [now.slots[0] for now in situations]
        return [Action(Op.GERMINATE, 0, "mlp", "linear") if slot.growable else Action() for slot in slots]


def grow(number: Callable[[], float], **settings: Any) -> esper.Grown:
    torch.manual_seed(0)
    rules = Rules(training_epochs=50)
    return esper.grow(Drops(number), *DATA, slots=["first"], batch_size=8, rules=rules, device="cpu", **settings)


SOURCES = pytest.mark.parametrize(
    "number", [lambda: random.random(), lambda: float(np.random.rand())], ids=["python", "numpy"]
)


@SOURCES
def test_a_host_that_draws_from_other_rngs_cannot_tell_whether_a_seed_incubates(number: Callable[[], float]) -> None:
    before = random.getstate(), np.random.get_state(legacy=False)["state"]["pos"]
    grown, alone = (grow(number, controller=controller, epochs=3) for controller in (Plants(), "none"))
    assert any(record.trained.shadow_losses for record in grown.history.records)
    kept = [one.model.state_dict() for one in (grown, alone)]
    assert all(torch.equal(value, kept[1][name]) for name, value in kept[0].items())
    assert [r.trained.loss for r in grown.history.records] == [r.trained.loss for r in alone.history.records]
    assert before == (random.getstate(), np.random.get_state(legacy=False)["state"]["pos"])


@SOURCES
def test_the_control_draws_what_the_growing_model_draws(number: Callable[[], float]) -> None:
    grown = grow(number, controller="none", epochs=3, control=True)
    ungrown = grown.ungrown
    assert ungrown is not None
    assert all(torch.equal(value, ungrown.state_dict()[name]) for name, value in grown.model.state_dict().items())


@SOURCES
def test_who_draws_from_torch_alone_pays_for_nothing_else(number: Callable[[], float]) -> None:
    def from_torch() -> float:
        return torch.rand(()).item()

    found = [esper.attach(Drops(draw), ["first"], X[:4]).survey.uses_other_rngs for draw in (number, from_torch)]
    assert found == [True, False]


def test_all_three_are_preserved_and_kept_as_data() -> None:
    with preserved_rng(torch.device("cpu")):
        expected = draws()
    state = OtherRngs.now()
    assert draws() == expected
    OtherRngs.from_data(state.data()).set()
    assert (random.random(), float(np.random.rand())) == expected[1:]
    state = OtherRngs.seeded(-3)
    state.set()
    first = draws()[1:]
    state.set()
    assert draws()[1:] == first

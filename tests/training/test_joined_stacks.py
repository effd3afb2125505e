"""Families in turn on the stacked engine: the problems of each member, made as it makes them."""

from __future__ import annotations

import pytest
import torch

from esper.actions import HEAD_NAMES
from esper.env.growth_env import GrowthEnv
from esper.env.stacked_env import StackedEnv
from esper.tasks.family import Together, get_family
from esper.training.engines import choose_engine
from esper.training.train_config import PRESETS

NAME = "2*grammar/vector+mixed/vector"


def test_rounds_are_shared_as_the_name_says() -> None:
    family, mixed = get_family(NAME), get_family("mixed/vector")
    assert isinstance(family, Together)
    assert family.name.startswith("2*grammar+")
    assert family.round == 2 + mixed.round
    owners = [family.member_of(number) for number in range(2 * family.round)]
    assert [own for member, own in owners if member is family.members[0]] == [0, 1, 2, 3]
    assert [own for member, own in owners if member is family.members[1]] == list(range(2 * mixed.round))


@pytest.mark.parametrize("name", ["0*grammar+mixed", "x*grammar+mixed", "*grammar+mixed", "9999*grammar+mixed"])
def test_rounds_that_are_no_number_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="before a \\* stands how many rounds"):
        get_family(name)


def test_half_of_the_preset_is_of_each_family() -> None:
    family = get_family(PRESETS["small"].task)
    assert isinstance(family, Together)
    assert sum(family.member_of(number)[0].name == "grammar" for number in range(family.round)) == family.round / 2


def test_stacks_of_joined_families_train_as_single_networks_do() -> None:
    family = get_family(NAME)
    draws = [*range(4), *range(family.round, family.round + 2)]
    assert choose_engine("auto", family, "cpu").name == "stacked"
    wait = torch.zeros(len(draws), len(HEAD_NAMES), dtype=torch.int64)
    measured = []
    for env in (GrowthEnv(family, len(draws)), StackedEnv(family, len(draws))):
        env.reset(draws)
        env.step(wait)
        measured.append(env.world)
    single, stacked = measured
    assert torch.equal(single.horizon, stacked.horizon)
    assert torch.allclose(single.loss[:, 0], stacked.loss[:, 0], atol=1e-4)

"""Rent as a column: what the reward, the observation and the score of an episode make of it, and how it varies.

Covers: R149
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from esper.actions import HEAD_NAMES, Op
from esper.env.growth_env import GrowthEnv
from esper.env.observation import OVERALL_FIELDS
from esper.env.rent import RENT_RATE
from esper.env.rents import HIGHEST, rents_of
from esper.env.stacked_env import StackedEnv
from esper.growth.blueprints import blueprint_names
from esper.tasks.family import get_family

DRAWS = [0, 0, 4, 8]
"""Of `grammar`: vectors; the first two are siblings."""


def rents(draws: list[int]) -> Tensor:
    found = rents_of("varied", draws, held_out=False)
    assert isinstance(found, Tensor)
    return found


def test_the_rent_of_a_draw_is_a_function_of_its_id() -> None:
    every = rents(list(range(4000)))
    assert torch.equal(every[[7, 7, 3999]], rents([7, 7, 3999]))
    assert (every >= 0).all()
    assert (every <= HIGHEST).all()
    free, usual = (every == 0).double().mean(), (every == RENT_RATE).double().mean()
    assert 0.17 < free < 0.23
    assert 0.17 < usual < 0.23
    rest = every[(every > 0) & (every != RENT_RATE)]
    half_way = math.sqrt(1 + HIGHEST) - 1  # the median, where log(1 + rent) is even
    assert 0.45 < (rest < half_way).double().mean() < 0.55


def test_held_out_draws_and_fixed_rents_do_not_vary() -> None:
    assert rents_of("varied", DRAWS, held_out=True) == RENT_RATE
    assert rents_of(2.5, DRAWS, held_out=False) == 2.5


@pytest.mark.parametrize("kind", [GrowthEnv, StackedEnv])
def test_an_episode_pays_and_shows_its_own_rent(kind: type[GrowthEnv] | type[StackedEnv]) -> None:
    """At the end: objective = accuracy − rent · (parameters / host − 1), with a seed that acts."""
    env = kind(get_family("grammar"), len(DRAWS), rent="varied")
    observation, _ = env.reset(DRAWS)
    wanted = rents(DRAWS)
    shown = (wanted.log1p() / math.log(21.0)).float()
    assert torch.allclose(observation.overall[:, OVERALL_FIELDS.index("rent")], shown, atol=1e-6)
    assert len(set(wanted.tolist())) > 1
    action = torch.zeros(len(DRAWS), len(HEAD_NAMES), dtype=torch.int64)
    action[:, HEAD_NAMES.index("op")] = Op.GERMINATE
    action[:, HEAD_NAMES.index("blueprint")] = blueprint_names().index("norm")
    step = env.step(action)
    assert env.world.planted.any(1).all()
    # Rent is felt at once: score shaping is γΦ' − Φ, and Φ' has the seed's rent in it.
    reward = step.facts.reward if step.facts else None
    assert reward is not None
    grown = env.world.parameters / env.world.host_parameters - 1.0
    potential = env.world.accuracy[:, 0] - wanted * grown
    found = env._reward.potential(env.world, env.world.accuracy[:, 0])[:, 0]
    assert torch.allclose(found, potential, atol=1e-9)
    while not env.over:
        step = env.step(torch.zeros_like(action))
        assert step.facts is not None
        ended, score = step.terminated, step.facts.reward.score
        size = env.world.acting_parameters / env.world.host_parameters - 1.0
        assert torch.allclose(score[ended], (env.world.accuracy[:, 0] - wanted * size)[ended], atol=1e-9)

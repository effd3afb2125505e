"""A frozen policy does not remove a seed that clearly earns its rent.

Covers: R149
"""

from __future__ import annotations

import math

import pytest
import torch

from esper.actions import Op
from esper.agent.policies import LearnedController, growth_network_config
from esper.agent.removals import pays, without_costly_removals
from esper.env.growth_env import GrowthEnv
from esper.env.observation import decode, to_tensor
from esper.env.world import World
from esper.growth.blueprints import blueprint_names
from esper.lifecycle import Rules, Stage
from esper.policy.network import FactoredRecurrentActorCritic
from esper.slot_columns import SlotColumns
from esper.tasks.mixed import Mixed

NOT_MEASURED = (math.nan, math.nan, math.nan)


def world_of(contribution: tuple[float, ...], shadow: tuple[float, ...], rent: float, size: int = 100) -> World:
    """One host of 100 parameters with one seed, which holds."""
    columns = SlotColumns.empty([1], [Rules()])
    columns.stage[:], columns.blueprint[:], columns.size[:], columns.age[:] = Stage.HOLDING, 0, size, 20
    columns.contribution[0, 0] = torch.tensor(contribution, dtype=torch.float64)
    columns.shadow[0, 0] = torch.tensor(shadow, dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    return World.start(
        columns,
        layout=torch.zeros((1, 1), dtype=torch.int64),
        channels=8.0 * one[None],
        position=0.0 * one[None],
        costs=torch.full((1, 1, len(blueprint_names())), 50.0, dtype=torch.float64),
        host_parameters=100.0 * one,
        budget=math.inf * one,
        max_seeds=math.inf * one,
        horizon=torch.tensor([25]),
        rent=rent,
    )


@pytest.mark.parametrize(
    ("contribution", "shadow", "rent", "size", "expected"),
    [
        ((42.6, 0.5, 2.0), NOT_MEASURED, 0.0, 2600, True),  # free
        ((42.6, 0.5, 2.0), NOT_MEASURED, 5.0, 2600, False),  # 26 host sizes at 5 points are 130
        ((42.6, 0.5, 2.0), NOT_MEASURED, 5.0, 700, True),  # 42.6 − 35 is above 2 · 2
        ((42.6, 0.5, 2.0), NOT_MEASURED, 5.0, 800, False),  # 42.6 − 40 is not
        ((4.0, 0.5, 2.0), NOT_MEASURED, 0.0, 100, False),  # two standard errors are not above two
        ((-3.0, -0.1, 0.1), NOT_MEASURED, 0.0, 100, False),
        (NOT_MEASURED, NOT_MEASURED, 0.0, 100, False),
        (NOT_MEASURED, (13.1, 0.2, 2.1), 0.0, 100, True),  # it incubates
        ((-3.0, -0.1, 0.1), (13.1, 0.2, 2.1), 0.0, 100, False),  # what it adds now counts, not what it promised
    ],
)
def test_what_clearly_pays(contribution, shadow, rent, size, expected):
    assert pays(world_of(contribution, shadow, rent, size)).tolist() == [[expected]]


def inclined_to_prune() -> LearnedController:
    """Wherever it can, it removes."""
    network = FactoredRecurrentActorCritic(growth_network_config())
    with torch.no_grad():
        network.op_head.out.bias[Op.PRUNE] += 100.0
        network.op_head.out.bias[Op.WAIT] += 50.0
    return LearnedController(network, None)


@pytest.mark.parametrize("rent", [0.0, 20.0])
def test_a_policy_that_would_remove_everything_spares_what_pays(rent: float) -> None:
    """Acting on columns and deciding on records; the environment itself goes on to allow the removal."""
    env = GrowthEnv(Mixed(), 4, rent=rent)
    observation, masks = env.reset(range(4))
    acting, deciding = inclined_to_prune(), inclined_to_prune()
    acting.reset(range(4))
    deciding.reset(range(4))
    plant = torch.zeros(4, 4, dtype=torch.int64)
    plant[:, 3] = Op.GERMINATE
    plant[:, 1] = masks.blueprint[:, 0].int().argmax(-1)
    env.step(decode(plant))
    columns = env.world.slots
    columns.stage[:, 0], columns.age[:, 0], columns.alpha[:, 0] = Stage.HOLDING, 20, 1.0
    dues = env.world.rent * columns.size[:, 0] / env.world.host_parameters
    for row, left in enumerate((9.0, 1.0, -9.0, math.nan)):  # points above the rent; the standard error is 2
        columns.contribution[row, 0] = torch.tensor([float(dues[row]) + left, 0.1, 2.0])
    observation, masks = env._shown()
    action = acting.act(env.world, observation, masks)
    assert action[:, 3].tolist() == [Op.WAIT, Op.PRUNE, Op.PRUNE, Op.PRUNE]
    assert to_tensor(deciding.decide(env.situations)).equal(action)
    assert masks.op[:, Op.PRUNE].all()
    assert masks.slot[:, Op.PRUNE, 0].all()


def test_other_choices_stay_as_they_are() -> None:
    env = GrowthEnv(Mixed(), 6)
    _, masks = env.reset(range(6))
    masks = masks.map(lambda mask: torch.ones_like(mask))
    env.world.slots.contribution[..., 0] = 50.0
    env.world.slots.contribution[..., 2] = 1.0
    allowed = without_costly_removals(masks, env.world)
    others = [op for op in Op if op is not Op.PRUNE]
    assert not allowed.op[:, Op.PRUNE].any()
    assert not allowed.slot[:, Op.PRUNE].any()
    assert allowed.op[:, others].all()
    assert allowed.slot[:, others].all()
    assert allowed.blueprint.all()
    assert allowed.blend.all()

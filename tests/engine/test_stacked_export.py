"""A network of a stack as a plain module: the same outputs, whatever grew in it."""

from __future__ import annotations

import pytest
import torch
from plain_network import exported

from esper.engine.stacked.engine import StackedEngine
from esper.env.stacked_env import StackedEnv
from esper.growth.graft import Grafted
from esper.lifecycle import Rules
from esper.policy.controller import RandomLegal
from short_family import ShortFamily

QUICK = Rules(training_epochs=1, gradient_activity=0.0, shadow_benefit=-1e9, blending_epochs=3, contribution=-1e9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exported_networks_give_the_outputs_of_the_stack(dtype: torch.dtype) -> None:
    """Measured by what the stack itself measures: the mean loss on the validation set, and every answer on it."""
    family, draws = ShortFamily("mixed", horizon=9, examples=64), list(range(24))
    env = StackedEnv(family, len(draws), rules=QUICK, dtype=dtype)
    observation, masks = env.reset(draws)
    players = RandomLegal()
    players.reset(draws)
    for _ in range(6):
        step = env.step(players.act(env.world, observation, masks))
        observation, masks = step.observation, step.masks
    grown, gated, partial = _check(env.engine, dtype)
    assert grown >= 8
    assert gated
    assert partial


def _check(engine: StackedEngine, dtype: torch.dtype) -> tuple[int, int, int]:
    """How many seeds act in all, how many of them are gated, and how many are blended in partly."""
    accuracy, loss = engine.evaluate_test()
    tolerance = 1e-5 if dtype is torch.float32 else 1e-12
    grown, gated, partial = 0, 0, 0
    for group, (stack, places) in enumerate(zip(engine.stacks, engine.places, strict=True)):
        problems = stack.problems
        for row, place in enumerate(places.tolist()):
            model = exported(engine, group, row)
            x = problems.test_x[row].to(dtype)
            x = x[tuple(map(slice, (len(x), *problems.sizes[row].tolist(), int(problems.features[row]))))]
            x = x.movedim(-1, 1) if problems.form.layout.startswith("conv") else x
            with torch.no_grad():
                out = model(x)
            found = torch.nn.functional.cross_entropy(out, problems.test_y[row])
            assert abs(float(found) - float(loss[place])) < tolerance
            assert float((out.argmax(1) == problems.test_y[row]).double().mean()) * 100 == pytest.approx(
                float(accuracy[place])
            )
            seeds = [module for module in model.modules() if isinstance(module, Grafted)]
            grown += len(seeds)
            gated += sum(type(one.seed).__name__ == "Gated" for one in seeds)
            partial += sum(one.alpha < 1.0 for one in seeds)
    return grown, gated, partial

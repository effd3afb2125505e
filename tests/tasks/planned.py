"""What a fixed plan makes of a problem, through the real lifecycle."""

from __future__ import annotations

from esper.engine.eager import EagerEngine
from esper.engine.prepare import task_learner
from esper.env.situation import observe
from esper.growth.blueprints import LAYOUTS
from esper.policy.schedule import FixedSchedule, Planting
from esper.tasks.family import Draw
from esper.training.own.run import settle


def score(draw: Draw, plan: str) -> float:
    """Validation accuracy minus rent of a schedule that plants `plan` ("depthwise@0+norm@1", or nothing) at epoch 2."""
    learner = task_learner(draw.task, draw.seed, draw.horizon, budget=draw.budget, max_seeds=draw.max_seeds)
    parts = [part.split("@") for part in plan.split("+")] if plan else []
    controller = FixedSchedule(plan, [Planting(2, int(slot), dict.fromkeys(LAYOUTS, name)) for name, slot in parts])
    controller.reset([0])
    engine, history = EagerEngine([learner]), []
    for _ in range(draw.horizon):
        history += engine.step(controller.decide([observe(learner, draw.horizon, history)]))
    settle(learner)
    model = learner.model
    return history[-1].measured.accuracy - 5.0 * (model.parameter_count / model.host_parameters - 1.0)

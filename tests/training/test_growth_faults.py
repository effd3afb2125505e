"""Training runs on growing networks with a constructed fault: the right alarm. And none without a fault.

Covers: R058, R110, R111, R145
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tiny_family import TinyFamily

from esper.actions import Op
from esper.agent.config import PPOConfig
from esper.agent.ppo import PPOAgent
from esper.telemetry.recorder import RunRecorder
from esper.telemetry.records import Event
from esper.training.loop import Trainer, UpdateReport
from esper.training.train_config import TrainConfig

LEARNING_RATE = PPOConfig().learning_rate


class Events(RunRecorder):
    def __init__(self) -> None:
        self.seen: list[Event] = []

    def event(self, event: Event) -> None:
        self.seen.append(event)

    @property
    def anomalies(self) -> set[str]:
        return {str(event.data["name"]) for event in self.seen if event.kind == "anomaly"}


def train(updates: int, fault: Callable[[PPOAgent], None] | None = None, *, envs: int = 4, at: int = 2) -> set[str]:
    """Names of the anomalies of a run on real, growing networks; the fault is made before update `at`."""
    config = TrainConfig(task="tiny", envs=envs, updates=updates, evaluate_every=0)
    recorder = Events()
    trainer = Trainer(config, recorder=recorder, family=TinyFamily(horizon=12))

    def on_update(report: UpdateReport) -> None:
        assert "episode/score" in report.metrics  # what the detector takes for the objective
        if fault is not None and report.update == at - 1:
            fault(trainer.agent)

    assert trainer.run(on_update)
    return recorder.anomalies


def set_learning_rate(factor: float) -> Callable[[PPOAgent], None]:
    def fault(agent: PPOAgent) -> None:
        agent.config = replace(agent.config, learning_rate=factor * LEARNING_RATE)

    return fault


def freeze(agent: PPOAgent) -> None:
    for parameter in agent.network.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.0)


def spoil_gradients(agent: PPOAgent) -> None:
    next(agent.network.parameters()).register_hook(lambda gradient: gradient * float("nan"))


def reverse_entropy(agent: PPOAgent) -> None:
    agent.config = replace(agent.config)
    object.__setattr__(agent.config, "entropy_coefficient", -1.0)  # no configuration may ask for it


def always_wait(agent: PPOAgent) -> None:
    with torch.no_grad():
        agent.network.op_head.out.bias[Op.WAIT] += 20.0


@pytest.mark.parametrize(
    ("fault", "updates", "expected"),
    [
        (set_learning_rate(100.0), 3, {"kl_spike", "kl_extreme"}),
        (set_learning_rate(0.0), 5, {"kl_stalled"}),
        (freeze, 5, {"gradient_vanishing", "kl_stalled"}),
        (spoil_gradients, 3, {"skipped_steps"}),
        (reverse_entropy, 16, {"entropy_collapse"}),
        (always_wait, 6, {"head_starved"}),
    ],
    ids=[
        "learning rate x 100",
        "learning rate 0",
        "frozen weights",
        "NaN gradient",
        "negative entropy coefficient",
        "always WAIT",
    ],
)
def test_a_fault_is_found(fault: Callable[[PPOAgent], None], updates: int, expected: set[str]) -> None:
    found = train(updates, fault)
    assert found & expected, f"reported {found}"


@pytest.mark.slow
def test_a_healthy_run_of_sixty_updates_is_silent() -> None:
    """It learns what to plant and stops exploring other blueprints, which is a decision and no collapse."""
    assert train(60, envs=8) == set()

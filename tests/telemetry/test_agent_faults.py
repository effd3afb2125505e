"""A real agent with a constructed fault: the right alarm, from the agent's own metrics. And none without a fault.

Covers: R065, R110, R111, R145, R151
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "agent"))

from toy_environments import CartPoleWithoutVelocities, OpConditional, make_agent, rollout

from esper.agent.config import PPOConfig
from esper.agent.metrics import METRICS
from esper.agent.ppo import PPOAgent
from esper.telemetry.gradients import GradientWatch
from esper.telemetry.health import AnomalyDetector

HEALTHY = PPOConfig(learning_rate=1e-3, epochs=3, minibatches=2)


def train(
    config: PPOConfig, updates: int, fault: Callable[[PPOAgent], None] = lambda agent: None, at: int = 10
) -> set[str]:
    """Names of the anomalies of a run of `updates` updates, the fault made in update `at`."""
    env = CartPoleWithoutVelocities(8, length=128)
    agent = make_agent(env, config, hidden=32)
    detector = AnomalyDetector(config.max_grad_norm)
    found: set[str] = set()
    for update in range(1, updates + 1):
        if update == at:
            fault(agent)
        metrics = agent.update(rollout(env, agent, 256))
        found |= {anomaly.name for anomaly in detector.check_all(metrics, update / updates)}
    return found


def set_learning_rate(rate: float) -> Callable[[PPOAgent], None]:
    def fault(agent: PPOAgent) -> None:
        agent.config = replace(agent.config, learning_rate=rate)

    return fault


def spoil_gradients(agent: PPOAgent) -> None:
    next(agent.network.parameters()).register_hook(lambda gradient: gradient * float("nan"))


def reverse_entropy(agent: PPOAgent) -> None:
    agent.config = replace(agent.config, target_kl=None)
    object.__setattr__(agent.config, "entropy_coefficient", -1.0)  # no configuration may ask for it


def test_a_healthy_run_is_silent() -> None:
    assert train(HEALTHY, 60) == set()


@pytest.mark.parametrize(
    ("fault", "at", "expected"),
    [
        (set_learning_rate(100 * HEALTHY.learning_rate), 10, {"kl_spike", "kl_extreme"}),
        (set_learning_rate(0.0), 10, {"kl_stalled"}),
        (spoil_gradients, 10, {"skipped_steps"}),
        (reverse_entropy, 3, {"entropy_collapse"}),  # before anything is learnt: a policy that has learnt may decide
    ],
    ids=["learning rate x 100", "frozen weights", "NaN gradient", "negative entropy coefficient"],
)
def test_a_fault_is_found(fault: Callable[[PPOAgent], None], at: int, expected: set[str]) -> None:
    found = train(HEALTHY, 20, fault, at)
    assert found & expected, f"reported {found}"


def test_the_detector_reads_names_that_the_agent_writes() -> None:
    """A metric that is renamed there would silently blind a detector here."""
    env = OpConditional(4)
    agent = make_agent(env, HEALTHY, hidden=32)
    episodes = rollout(env, agent)
    written, read = agent.update(episodes), set()

    class Watched(dict[str, float]):
        def get(self, key: str, default: float | None = None) -> float:  # type: ignore[override]
            read.add(key)
            return dict.get(self, key, default)  # type: ignore[return-value]

        def __contains__(self, key: object) -> bool:
            read.add(str(key))
            return dict.__contains__(self, key)

    AnomalyDetector(0.5).check_all(Watched(written), 0.5)
    from_the_loop = {"episode/score"}  # tests/training/test_growth_faults.py sees it written
    assert read - from_the_loop <= set(written), f"unknown: {read - set(written)}"
    assert len(read) > 20
    assert {"kl", "clip_fraction", "explained_variance", "ratio_max"} <= set(METRICS)


def test_a_watch_sees_every_step_of_the_agents_optimizer() -> None:
    env = OpConditional(4)
    agent = make_agent(env, HEALTHY, hidden=32)
    episodes = rollout(env, agent)
    with GradientWatch(agent.optimizer, agent.network, agent.config.max_grad_norm) as watch:
        metrics = agent.update(episodes)
        assert len(watch._steps) == metrics["optimizer_steps"] > 0
        found = watch.metrics()
    norms = torch.tensor([found[f"gradient/{name}"] for name, _ in agent.network.named_parameters()])
    assert norms.square().sum().sqrt() <= agent.config.max_grad_norm * 1.001  # after clipping
    assert found["gradients_exploding"] == 0.0

"""An agent that starts from a policy: the same decisions and values, a teacher to stay close to, and less to learn.

Covers: R083
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from toy_environments import OpConditional, rollout, train
from toy_recordings import record_toy, toy_network, toy_score

from esper.agent.checkpoints import CheckpointError, inspect_checkpoint
from esper.agent.config import PPOConfig
from esper.agent.normalisers import ObservationNormaliser
from esper.agent.policies import save_policy, start_from
from esper.agent.ppo import PPOAgent
from esper.offline.cloning import CloneConfig, clone
from esper.offline.fitting import Learned, new_network
from esper.policy.distribution import FactoredPolicy
from esper.policy.network import NetworkConfig

CONFIG = PPOConfig(discount=0.0, learning_rate=2e-3, target_kl=0.05)


@pytest.fixture(scope="module")
def cloned() -> Learned:
    """Of a teacher that half knows what to grow."""
    return clone(record_toy("half knows", 200, 0.0, 0), toy_network(), CloneConfig(epochs=12, discount=0.0))


@pytest.fixture
def file(tmp_path: Path, cloned: Learned) -> Path:
    path = tmp_path / "clone.safetensors"
    save_policy(path, cloned.network, cloned.units.observations, cloned.units.values, {"learned_by": "a test"})
    return path


def agent(config: PPOConfig = CONFIG, network: NetworkConfig | None = None, seed: int = 5) -> PPOAgent:
    normaliser = ObservationNormaliser(OpConditional.features, 0)
    return PPOAgent(new_network(network or toy_network(), seed), config, seed=seed, observation_normaliser=normaliser)


def test_the_agent_begins_where_the_policy_stood(file: Path, cloned: Learned) -> None:
    ours = agent()
    start_from(ours, file)
    assert all(torch.equal(a, b) for a, b in zip(ours.network.parameters(), cloned.network.parameters(), strict=True))
    env = OpConditional(80, seed=3)
    metrics = ours.update(rollout(env, ours))
    assert metrics["first_ratio_gap"] < 1e-5
    assert metrics["explained_variance"] > -1.0  # the critic came along
    ours.update(rollout(env, ours))
    assert inspect_checkpoint(file).data["caller"] == {"learned_by": "a test"}


def test_the_inputs_of_policy_and_teacher_stay_the_same(file: Path, cloned: Learned) -> None:
    ours = agent()
    start_from(ours, file)
    env = OpConditional(80, seed=3)
    train(env, ours, 16 * 25 * 2)
    assert ours.observation_normaliser is not None
    for name, moments in cloned.units.observations.frozen.items():
        assert torch.equal(ours.observation_normaliser.frozen[name].mean, moments.mean)
    assert ours.teacher is not None
    for p, q in zip(ours.teacher.parameters(), cloned.network.parameters(), strict=True):
        assert torch.equal(p, q)
        assert not p.requires_grad
    assert not all(torch.equal(p, q) for p, q in zip(ours.network.parameters(), ours.teacher.parameters(), strict=True))


def test_a_floor_may_be_set_for_a_policy_that_had_none(file: Path) -> None:
    """It has no weights, and it is what a run needs whose start hardly ever uses a head."""
    ours = agent(network=replace(toy_network(), floor=0.02))
    start_from(ours, file)
    assert ours.network.config.floor == ours.teacher.config.floor == 0.02  # type: ignore[union-attr]
    env = OpConditional(80, seed=3)
    assert ours.update(rollout(env, ours))["first_ratio_gap"] < 1e-5


def test_the_weight_of_the_teacher_falls_to_zero() -> None:
    config = PPOConfig(teacher_kl=0.4, teacher_updates=4)
    assert [config.teacher_kl_at(update) for update in (1, 2, 3, 5, 9)] == pytest.approx([0.4, 0.3, 0.2, 0.0, 0.0])
    with pytest.raises(ValueError, match="teacher_kl"):
        PPOConfig(teacher_kl=-1.0)


def test_a_strong_teacher_holds_the_policy(file: Path) -> None:
    """The distance to the teacher after some updates, with and without its pull; the first minibatch has none."""

    def distance(teacher_kl: float) -> float:
        ours = agent(replace(CONFIG, teacher_kl=teacher_kl, teacher_updates=1000))
        start_from(ours, file)
        env = OpConditional(80, seed=3)
        metrics = train(env, ours, 16 * 25 * 4)
        assert ours.teacher is not None
        observation, masks = env.reset()
        state = ours.network.initial_state(80)
        normalised = ours.observation_normaliser(observation)  # type: ignore[misc]
        theirs: FactoredPolicy = ours.teacher(normalised, masks, state).policy
        own: FactoredPolicy = ours.network(normalised, masks, state).policy
        assert (metrics[-1]["teacher_kl"] > 0.0) == (teacher_kl > 0.0)
        return float(own.kl_from(theirs).sum(-1).mean().detach())

    assert distance(10.0) < 0.2 * distance(0.0)


def test_a_policy_for_something_else_is_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="hidden: saved 64, here 32"):
        start_from(agent(network=toy_network(32)), file)
    without = agent()
    without.observation_normaliser = None
    with pytest.raises(CheckpointError, match="normalises observations"):
        start_from(without, file)
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(CheckpointError):
        start_from(agent(), file)


def test_a_warm_start_needs_less_than_half_of_the_steps(file: Path, cloned: Learned) -> None:
    """The cold agent's score after 6,400 steps, reached by the warm one within 3,200."""

    def score(ours: PPOAgent) -> float:
        values = toy_score(replace(cloned, network=ours.network, units=_units(ours)), episodes=200)
        return sum(values) / len(values)

    cold, warm = agent(seed=1), agent(seed=1)
    start_from(warm, file)
    train(OpConditional(80, seed=1), cold, 6_400)
    train(OpConditional(80, seed=1), warm, 3_200)
    assert score(warm) >= score(cold)


def _units(ours: PPOAgent) -> object:
    from esper.offline.rows import Units

    assert ours.observation_normaliser is not None
    return Units(ours.observation_normaliser, ours.value_normaliser)

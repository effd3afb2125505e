"""The agent learns, on small tasks that each need one ability, and an agent without that ability does not.

Thresholds are what a broken agent fails; figures in the docstrings are measured (docs/agent.md).

Covers: R001, R002, R005, R018, R021, R032, R079, R106, R113
"""

import pytest
import torch
from toy_environments import (
    CartPoleWithoutVelocities,
    CueMemory,
    EndlessChain,
    MaskedMultiDiscrete,
    OpConditional,
    evaluate,
    make_agent,
    train,
)

from esper.agent.config import PPOConfig
from esper.policy.distribution import ActionSpace


def test_masked_multi_discrete():
    """Four heads of four, all right at once, 100 times: at least 95 after 16,384 steps. Untrained: below 10."""
    env = MaskedMultiDiscrete(16, seed=0, length=16)
    config = PPOConfig(discount=0.0, learning_rate=3e-3, target_kl=0.05)  # each step is a task of its own
    agent = make_agent(env, config)
    assert evaluate(MaskedMultiDiscrete(10, seed=9), agent, 10, deterministic=False) < 10
    metrics = train(env, agent, 16_384)
    assert evaluate(MaskedMultiDiscrete(20, seed=9), agent, 20) >= 95
    assert max(m["first_ratio_gap"] for m in metrics) < 1e-5


CUE = PPOConfig(discount=0.99, gae_decay=0.95, learning_rate=1e-3)


def test_a_cue_is_remembered():
    """Shown for two steps, asked ten later: solved within 20,000 steps."""
    env = CueMemory(32, seed=0)
    agent = make_agent(env, CUE)
    train(env, agent, 20_000)
    assert evaluate(CueMemory(20, seed=9), agent, 200) >= 0.95


@pytest.mark.slow
def test_a_cue_is_not_remembered_without_memory():
    """The same agent with no recurrent layer stays at chance, 0.25: the task does need memory."""
    env = CueMemory(32, seed=0)
    agent = make_agent(env, CUE, layers=0)
    train(env, agent, 30_000)
    assert evaluate(CueMemory(20, seed=9), agent, 200) <= 0.4


def op_conditional(space: ActionSpace, steps: int, seed: int = 0) -> float:
    env = OpConditional(80, seed=seed)
    config = PPOConfig(discount=0.0, learning_rate=2e-3, target_kl=0.05)
    agent = make_agent(env, config, seed, space=space, floor=0.02)
    train(env, agent, steps)
    test = OpConditional(20, seed=9)
    test.luck = 0.0
    return evaluate(test, agent, 200)


def test_heads_that_matter_under_one_op_only():
    """5 is perfect, always waiting 3.75, germinating blindly 4.06. With every head counted as used on every step, the
    luck of waiting reaches the heads that had no part in it."""
    with_relevance = op_conditional(OpConditional.space, 16_000)
    without = op_conditional(ActionSpace.uniform(4), 16_000)
    assert with_relevance >= 4.6
    assert with_relevance > without + 0.1


def test_the_value_of_an_endless_chain():
    """Reward 1 for ever is worth 1 / (1 − γ) = 50, learnt from episodes cut short after 32 steps: within 2 %. If that
    end counted as terminal, they would give (1 − γ^32) / (1 − γ) = 24 at most."""
    env = EndlessChain(8, seed=0)
    agent = make_agent(env, PPOConfig(discount=0.98, gae_decay=0.95, learning_rate=1e-3))
    values = [metrics["value_mean"] for metrics in train(env, agent, 12_000)[-8:]]
    assert sum(values) / len(values) == pytest.approx(50.0, rel=0.02)


@pytest.mark.slow
def test_cartpole_without_velocities():
    """8 environments, 51,200 steps of episodes cut short after 128: at least 450 of 500 on two seeds of three;
    without memory far below. Single seeds fall short: of seeds 0 to 7 six reach 450 (mean 484, lowest 446)."""
    config = PPOConfig(
        discount=0.99, gae_decay=0.95, learning_rate=1.5e-3, learning_rate_end=1e-4, anneal_updates=50, epochs=6
    )

    def score(seed: int, **network: object) -> float:
        env = CartPoleWithoutVelocities(8, seed, length=128)  # cut short there, with the value of what follows
        agent = make_agent(env, config, seed, **network)
        train(env, agent, 51_200, 1024)
        return evaluate(CartPoleWithoutVelocities(20, 1000 + seed), agent, 20)

    returns = [score(seed) for seed in range(3)]
    assert sorted(returns)[1] >= 450, returns
    assert score(0, layers=0) < 200


@pytest.mark.slow
def test_the_compiled_agent_learns_the_same():
    """torch.compile, dynamic shapes, graph breaks at the LSTM only: replay still agrees with acting."""
    torch._dynamo.reset()
    env = CueMemory(4, seed=0)
    agent = make_agent(env, PPOConfig(compile=True))
    plain_env = CueMemory(4, seed=0)
    plain = make_agent(plain_env, PPOConfig())
    for a, b in zip(train(env, agent, 4 * 12 * 3), train(plain_env, plain, 4 * 12 * 3), strict=True):
        assert a["first_ratio_gap"] < 1e-5
        assert a["policy_loss"] == pytest.approx(b["policy_loss"], abs=1e-4)
    for (name, p), q in zip(agent.network.named_parameters(), plain.network.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-3), name

"""Settings of the agent reach the place where they count, and the named constants have the documented values.

Covers: R008, R013, R020, R033, R035, R039, R067, R069, R073, R107
"""

import pytest
import torch
from test_ppo import random_rollout
from toy_environments import CueMemory, OpConditional, give_values, make_agent, rollout, vector_observation

from esper.agent.config import PPOConfig
from esper.agent.normalisers import ObservationNormaliser
from esper.agent.ppo import PPOAgent
from esper.policy.network import FactoredRecurrentActorCritic
from esper.training.train_config import TrainConfig


def test_defaults_are_the_documented_ones():
    config = PPOConfig()
    clips = (config.clip, config.value_clip, config.huber_delta, config.max_grad_norm, config.target_kl)
    assert clips == (0.2, 10.0, 1.0, 0.5, 0.02)
    assert config.validate_masks


def test_the_annealed_learning_rate_is_the_optimizers():
    """At its end of 0 an update changes nothing but the critic's last layer, which PopArt rescales."""
    env = CueMemory(4)
    config = PPOConfig(learning_rate=1e-2, learning_rate_end=0.0, anneal_updates=1)
    agent = make_agent(env, config, 12, hidden=16)

    def moved(now):
        before = {name: p.detach().clone() for name, p in agent.network.named_parameters()}
        now = rollout(env, agent, now)
        rate = agent.update()["learning_rate"]
        return now, rate, {n for n, p in agent.network.named_parameters() if not torch.equal(p, before[n])}

    now, rate, changed = moved(env.reset())
    assert rate == 1e-2
    assert len(changed) > 5
    _, rate, changed = moved(now)
    assert rate == 0.0
    assert changed <= {"value_head.out.weight", "value_head.out.bias"}


def test_observation_statistics_are_those_of_raw_observations():
    """Far from standardised ones: a normaliser that is fed its own output would drift towards mean 0."""
    torch.manual_seed(0)
    network = FactoredRecurrentActorCritic(CueMemory(1).network_config(hidden=16))
    normaliser = ObservationNormaliser(5, 0)
    agent = PPOAgent(network, PPOConfig(), 4, 6, 1, 1, observation_normaliser=normaliser)
    masks, seen = CueMemory(4).reset()[1], []
    never = torch.zeros(4, dtype=torch.bool)
    for _ in range(3):
        for t in range(6):
            seen.append(100.0 + 7.0 * torch.randn(4, 5))
            agent.act(vector_observation(seen[-1]), masks)
            agent.process_env_step(torch.randn(4), never | (t == 5), never)
        agent.compute_returns(vector_observation(seen[-1]))
        agent.update()
    rows, kept = torch.cat(seen).double(), normaliser.frozen["overall"]
    assert torch.allclose(kept.mean, rows.mean(0), atol=1e-4)
    assert torch.allclose(kept.std, rows.std(0, correction=0), atol=1e-4)


def test_return_statistics_are_those_of_raw_returns():
    env = CueMemory(8)
    env.scale = 50.0
    agent = make_agent(env, PPOConfig(value_momentum=None), 24, hidden=16)
    now, seen = env.reset(), []
    for _ in range(3):
        now = rollout(env, agent, now)
        seen.append(agent.rollout.returns.double().flatten())
        agent.update()
    returns, kept = torch.cat(seen), agent.value_normaliser.moments
    assert returns.mean() > 1.0
    assert kept.mean.item() == pytest.approx(returns.mean().item(), rel=1e-5)
    assert kept.std.item() == pytest.approx(returns.std(correction=0).item(), rel=1e-5)


def test_siblings_are_measured_against_each_other():
    """Of two siblings each is what the other is not: their advantages are opposite, step by step."""

    def advantages(siblings: int) -> torch.Tensor:
        env = CueMemory(4, seed=1)
        agent = make_agent(env, PPOConfig(siblings=siblings), 12, hidden=16)
        give_values(agent)
        rollout(env, agent, env.reset())
        return agent.rollout.advantage

    alone, first, second = advantages(1), *advantages(2).view(2, 2, -1).unbind(1)
    assert first.abs().max() > 0.01
    assert torch.allclose(first, -second)
    assert torch.allclose(first, alone[0::2] - alone[1::2], atol=1e-6)


def test_siblings_play_the_same_problem():
    config = TrainConfig(envs=4, ppo=PPOConfig(siblings=2))
    assert [config.numbers(update) for update in (1, 2)] == [[0, 0, 1, 1], [2, 2, 3, 3]]
    assert TrainConfig(envs=4).numbers(1) == [0, 1, 2, 3]


@pytest.mark.parametrize("head", range(4))
def test_entropy_weights_choose_the_heads_of_the_bonus(head):
    names = ("slot", "blueprint", "blend", "op")
    weights = tuple(float(h == head) for h in range(4))
    metrics = random_rollout(3, minibatches=1, epochs=1, head_entropy_weights=weights).update()
    others = [metrics[f"{name}/entropy"] for name in names if name != names[head]]
    assert metrics["entropy_bonus"] == pytest.approx(metrics[f"{names[head]}/entropy"], abs=1e-6)
    assert all(abs(metrics["entropy_bonus"] - other) > 1e-3 for other in others)


def test_masks_are_validated_where_the_setting_says_so():
    env = OpConditional(2)
    observation, masks = env.reset()
    masks.op[1] = False  # nothing is legal
    with pytest.raises(ValueError, match="environment 1"):
        make_agent(env, PPOConfig(), 4, hidden=16).act(observation, masks)
    make_agent(env, PPOConfig(validate_masks=False), 4, hidden=16).act(observation, masks)


def test_the_kl_stop_is_at_one_and_a_half_times_the_target():
    """One step, then the KL that it made decides about the second: stopped just above 1.5 × target, not just below."""
    settings = {"minibatches": 1, "epochs": 2, "learning_rate": 1e-3}
    kl = random_rollout(5, **settings, target_kl=None).update()["kl_max"]
    assert kl > 0.0
    assert random_rollout(5, **settings, target_kl=kl / 1.52).update()["stopped_by_kl"]
    assert not random_rollout(5, **settings, target_kl=kl / 1.48).update()["stopped_by_kl"]

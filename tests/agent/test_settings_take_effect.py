"""Settings of the agent reach the place where they count, and the named constants have the documented values.

Covers: R008, R013, R020, R033, R035, R039, R067, R069, R073, R107
"""

from dataclasses import replace

import pytest
import torch
from test_ppo import acted, random_rollout, update_of
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
    agent = make_agent(env, config, hidden=16)

    def moved():
        before = {name: p.detach().clone() for name, p in agent.network.named_parameters()}
        rate = agent.update(rollout(env, agent))["learning_rate"]
        return rate, {n for n, p in agent.network.named_parameters() if not torch.equal(p, before[n])}

    rate, changed = moved()
    assert rate == 1e-2
    assert len(changed) > 5
    rate, changed = moved()
    assert rate == 0.0
    assert changed <= {"value_head.out.weight", "value_head.out.bias"}


def test_observation_statistics_are_those_of_raw_observations():
    """Far from standardised ones: a normaliser that is fed its own output would drift towards mean 0."""
    torch.manual_seed(0)
    network = FactoredRecurrentActorCritic(CueMemory(1).network_config(hidden=16))
    normaliser = ObservationNormaliser(5, 0)
    agent = PPOAgent(network, PPOConfig(), observation_normaliser=normaliser)
    masks, seen = CueMemory(4).reset()[1], []
    ends, lengths = (torch.arange(6) == 5).expand(4, 6), torch.full((4,), 6)
    for _ in range(3):
        steps = [100.0 + 7.0 * torch.randn(4, 5) for _ in range(6)]
        seen += steps
        agent.update(acted(agent, [vector_observation(x) for x in steps], masks, torch.randn(4, 6), ends, lengths))
    rows, kept = torch.cat(seen).double(), normaliser.frozen["overall"]
    assert torch.allclose(kept.mean, rows.mean(0), atol=1e-4)
    assert torch.allclose(kept.std, rows.std(0, correction=0), atol=1e-4)


def test_return_statistics_are_those_of_raw_returns():
    env = CueMemory(8)
    env.scale = 50.0
    agent = make_agent(env, PPOConfig(value_momentum=None), hidden=16)
    seen = []
    for _ in range(3):
        episodes = rollout(env, agent)
        seen.append(agent.replay(episodes)[0].returns.double().flatten())
        agent.update(episodes)
    returns, kept = torch.cat(seen), agent.value_normaliser.moments
    assert returns.mean() > 1.0
    assert kept.mean.item() == pytest.approx(returns.mean().item(), rel=1e-5)
    assert kept.std.item() == pytest.approx(returns.std(correction=0).item(), rel=1e-5)


def test_siblings_are_measured_against_each_other():
    """Of two siblings each is what the other is not: their advantages are opposite, step by step."""

    def advantages(siblings: int) -> torch.Tensor:
        env = CueMemory(4, seed=1)
        agent = make_agent(env, PPOConfig(siblings=siblings), hidden=16)
        give_values(agent)
        return agent.replay(rollout(env, agent))[0].advantage

    alone, first, second = advantages(1), *advantages(2).view(2, 2, -1).unbind(1)
    assert first.abs().max() > 0.01
    assert torch.allclose(first, -second)
    assert torch.allclose(first, alone[0::2] - alone[1::2], atol=1e-6)


def test_siblings_play_the_same_problem():
    config = TrainConfig(envs=4, ppo=PPOConfig(siblings=2))
    assert [config.draw_ids(update) for update in (1, 2)] == [[0, 0, 1, 1], [2, 2, 3, 3]]
    assert TrainConfig(envs=4).draw_ids(1) == [0, 1, 2, 3]


@pytest.mark.parametrize("head", range(4))
def test_entropy_weights_choose_the_heads_of_the_bonus(head):
    names = ("slot", "blueprint", "blend", "op")
    weights = tuple(float(h == head) for h in range(4))
    metrics = update_of(random_rollout(5, minibatches=1, epochs=1, head_entropy_weights=weights))
    others = [metrics[f"{name}/entropy"] for name in names if name != names[head]]
    assert metrics["entropy_bonus"] == pytest.approx(metrics[f"{names[head]}/entropy"], abs=1e-6)
    assert all(abs(metrics["entropy_bonus"] - other) > 1e-3 for other in others)


def test_masks_are_validated_where_the_setting_says_so():
    env = OpConditional(2)
    agent = make_agent(env, PPOConfig(), hidden=16)
    episodes = rollout(env, agent)
    episodes.masks.op[1, 3] = False  # nothing is legal
    with pytest.raises(ValueError, match="environment 1 at step 3"):
        agent.replay(episodes)
    agent.replay(replace(episodes, lengths=torch.tensor([5, 3])))  # that step did not happen
    make_agent(env, PPOConfig(validate_masks=False), hidden=16).replay(episodes)


def test_the_kl_stop_is_at_one_and_a_half_times_the_target():
    """One step, then the KL that it made decides about the second: stopped just above 1.5 × target, not just below."""
    settings = {"minibatches": 1, "epochs": 2, "learning_rate": 1e-3}
    kl = update_of(random_rollout(5, **settings, target_kl=None))["kl_max"]
    assert kl > 0.0
    assert update_of(random_rollout(5, **settings, target_kl=kl / 1.52))["stopped_by_kl"]
    assert not update_of(random_rollout(5, **settings, target_kl=kl / 1.48))["stopped_by_kl"]

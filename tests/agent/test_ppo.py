"""The update against a slow, obvious reference, and the properties that a correct one has.

Covers: R001, R002, R006, R007, R008, R009, R010, R012, R013, R014, R018, R020, R022, R023, R024, R030, R033, R035,
Covers: R036, R037, R043, R051, R058, R059, R060, R067, R069, R072, R073, R074, R075, R077, R079, R088,
Covers: R011, R055, R089, R105, R106, R107, R111, R113, R128, R132, R139
"""

from dataclasses import replace

import pytest
import torch
from gae_by_loop import advantages_by_loop
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_environments import (
    CartPoleWithoutVelocities,
    CueMemory,
    MaskedMultiDiscrete,
    OpConditional,
    give_values,
    make_agent,
    open_masks,
    rollout,
    train,
    vector_observation,
)

from esper.actions import HEAD_NAMES
from esper.agent.config import LEAST_ADVANTAGE_STD, PPOConfig
from esper.agent.metrics import GRADIENT_GROUPS, METRICS
from esper.agent.normalisers import ObservationNormaliser
from esper.agent.ppo import PPOAgent
from esper.agent.update import Batch, RolloutMismatchError, _count, _gradient_norms, _losses, ppo_update, prepare_batch
from esper.env.spaces import Observation
from esper.policy.network import FactoredRecurrentActorCritic, NetworkConfig
from esper.rollout.episodes import Episodes, map_tensors, stack_steps


def test_the_norm_of_a_head_without_gradient_is_where_the_others_are() -> None:
    """Covers: R076. On the meta device, which stands for a GPU: torch gives the norm of nothing on the CPU."""
    groups = {name: [torch.nn.Parameter(torch.zeros(2, device="meta"))] for name in GRADIENT_GROUPS}
    groups["slot"][0].grad = torch.zeros(2, device="meta")
    groups["blend"] = []  # a policy without this head
    assert _gradient_norms(groups).device.type == "meta"


def weights(agent: PPOAgent) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in agent.network.parameters()])


def acted(agent: PPOAgent, observations: list[Observation], masks, reward, terminated, lengths, final=None) -> Episodes:
    """Episodes of these observations [N, …] and rewards, with the agent's own decisions at every step."""
    actor = agent.actor(0)
    actor.reset(range(len(lengths)))
    decided = [actor.act((), observation, masks) for observation in observations]
    action = torch.stack([d.action for d in decided], 1)
    return Episodes(
        observation=stack_steps(observations),
        masks=stack_steps([masks] * len(observations)),
        action=action,
        label=action,
        reward=reward,
        terminated=terminated,
        lengths=lengths,
        draw=torch.arange(len(lengths)),
        controller=torch.zeros(len(lengths), dtype=torch.int64),
        controllers=("policy",),
        final=final,
        log_prob=torch.stack([d.log_prob for d in decided], 1),
        value=torch.stack([d.value for d in decided], 1),
    )


def random_rollout(seed: int, rows: int = 3, steps: int = 9, **config) -> tuple[PPOAgent, Episodes]:
    """An agent and episodes of random rewards and lengths, some of which terminate while others are cut short."""
    env = OpConditional(rows, seed)
    agent = make_agent(env, PPOConfig(**config), seed, hidden=16, policy_gain=1.0)
    give_values(agent)
    generator = torch.Generator().manual_seed(seed)

    def look() -> Observation:
        return vector_observation(torch.randn(rows, env.features, generator=generator), env.blueprints)

    lengths = torch.randint(1, steps + 1, (rows,), generator=generator)
    lengths[0] = steps
    last = torch.arange(steps) == lengths[:, None] - 1
    terminated = last & (torch.rand((rows, 1), generator=generator) < 0.5)
    reward = torch.randn((rows, steps), generator=generator)
    masks = open_masks((rows,), 4, env.slots, env.blueprints, env.blends)
    return agent, acted(agent, [look() for _ in range(steps)], masks, reward, terminated, lengths, look())


def update_of(rolled: tuple[PPOAgent, Episodes]):
    agent, episodes = rolled
    return agent.update(episodes)


def losses(agent: PPOAgent, batch: Batch, coefficient: float):
    state = agent.network.initial_state(batch.valid.shape[0])
    return _losses(agent.network, state, batch, _count(batch), coefficient, agent.config)


def reference_loss(agent: PPOAgent, batch: Batch, coefficient: float) -> torch.Tensor:
    """PPO step by step and head by head, with torch.distributions and Python loops. No value clipping."""
    network, config = agent.network, agent.config
    categorical = torch.distributions.Categorical
    surrogates, live = {h: [] for h in range(4)}, {h: [] for h in range(4)}
    value_errors, steps = [], 0
    for n in range(batch.valid.shape[0]):
        state = network.initial_state(1)
        for t in range(batch.valid.shape[1]):
            if not batch.valid[n, t]:
                continue
            one = batch.select(torch.tensor([n]))
            observation, masks = (
                map_tensors(record, lambda x, t=t: x[:, t]) for record in (one.observation, one.policy.masks)
            )
            out = network(observation, masks, state)
            state, steps = out.state, steps + 1
            slot, blueprint, blend, op = batch.action[n, t].tolist()
            policy, old = out.policy, one.policy
            heads = {
                0: (policy.slot[0, op], slot),
                1: (policy.blueprint[0, slot], blueprint),
                2: (policy.blend[0, slot], blend),
                3: (policy.op[0], op),
            }
            uses = network.config.space.uses
            for h, (log_p, choice) in heads.items():
                if uses[op][h]:
                    new = categorical(logits=log_p).log_prob(torch.tensor(choice))
                    ratio = (new - batch.log_prob[n, t, h]).exp()
                    a = batch.advantage[n, t]
                    surrogates[h].append(torch.min(ratio * a, ratio.clamp(1 - config.clip, 1 + config.clip) * a))
            p_op = old.op[0, t].exp()
            live[3].append((1.0, categorical(logits=policy.op[0]).entropy() / torch.tensor(4.0).log()))
            for o_ in range(4):
                if uses[o_][0]:
                    h_slot = categorical(logits=policy.slot[0, o_]).entropy() / torch.tensor(4.0).log()
                    live[0].append((float(p_op[o_]), h_slot))
                for s in range(4):
                    reach = float(p_op[o_] * old.slot[0, t, o_, s].exp())
                    if uses[o_][1]:
                        h_bp = categorical(logits=policy.blueprint[0, s]).entropy() / torch.tensor(6.0).log()
                        live[1].append((reach, h_bp))
                    if uses[o_][2]:
                        h_bl = categorical(logits=policy.blend[0, s]).entropy() / torch.tensor(3.0).log()
                        live[2].append((reach, h_bl))
            error = out.value[0] - batch.returns[n, t]
            small = error.abs() <= config.huber_delta
            value_errors.append(torch.where(small, 0.5 * error**2, config.huber_delta * (error.abs() - 0.5)))
    policy_loss = sum(-sum(s) / max(len(s), 1, config.rare_head_share * steps) for s in surrogates.values() if s)
    value_loss = sum(value_errors) / steps
    entropy = [sum(w * h for w, h in live[k]) / sum(w for w, _ in live[k]) for k in range(4)]
    return policy_loss + config.value_coefficient * value_loss - coefficient * sum(entropy) / 4


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 100_000), st.sampled_from([0.0, 0.25, 1.0]))
def test_loss_and_gradient_equal_the_reference(seed, share):
    agent, episodes = random_rollout(seed, rare_head_share=share, value_clip=None)
    stored, _ = agent.replay(episodes)
    batch, _ = prepare_batch(stored, agent.value_normaliser, agent.network.value_output)

    # GAE and normalisation, from the raw rollout
    valid = stored.valid
    centred = stored.advantage - stored.advantage[valid].mean()
    expected = centred / stored.advantage[valid].std(correction=0).clamp(min=LEAST_ADVANTAGE_STD)
    assert torch.allclose(batch.advantage[valid], expected[valid], atol=1e-5)

    # the loss away from the rollout policy, so that clipping is active
    with torch.no_grad():
        for p in agent.network.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    agent.network.zero_grad()
    loss, _ = losses(agent, batch, 0.05)
    loss.backward()
    ours = [p.grad.clone() for p in agent.network.parameters()]
    agent.network.zero_grad()
    slow = reference_loss(agent, batch, 0.05)
    slow.backward()
    assert loss.item() == pytest.approx(slow.item(), abs=2e-6)
    for mine, p in zip(ours, agent.network.parameters(), strict=True):
        assert torch.allclose(mine, p.grad, atol=2e-6 + 1e-5 * p.grad.abs().max().item())


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 100_000))
def test_returns_equal_the_reference(seed):
    """Step by step: an episode that terminated ends with nothing, one that was cut short with the value of what its
    last action led to, under the memory that the policy had there."""
    agent, episodes = random_rollout(seed)
    batch, _ = agent.replay(episodes)
    following = torch.cat((batch.value[:, 1:], torch.zeros(3, 1)), dim=1)
    for row, length in enumerate(episodes.lengths.tolist()):
        state, one = agent.network.initial_state(1), episodes.select(torch.tensor([row]))
        with torch.no_grad():
            for t in range(length):
                step, masks = (map_tensors(r, lambda x, t=t: x[:, t]) for r in (one.observation, one.masks))
                state = agent.network(step, masks, state).state
            following[row, length - 1] = agent.network.value(one.final, state)
    last = torch.arange(9) == episodes.lengths[:, None] - 1
    slow = advantages_by_loop(
        episodes.reward, batch.value, following, episodes.terminated, last, episodes.valid, 0.995, 0.97
    )
    assert torch.allclose(batch.advantage, slow, atol=1e-5)
    assert torch.allclose(batch.returns, batch.advantage + batch.value)


def learn(agent: PPOAgent, batch: Batch) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    ppo_update(agent.network, agent.network, agent.optimizer, batch, agent.config, 1, generator)
    return weights(agent)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 100_000))
def test_splicing_invalid_steps_and_rows_changes_nothing(seed):
    plain, episodes = random_rollout(seed, minibatches=1, epochs=2, target_kl=None)
    batch, _ = prepare_batch(plain.replay(episodes)[0], plain.value_normaliser, plain.network.value_output)
    rescaled = [p.detach().clone() for p in plain.network.parameters()]
    expected = learn(plain, batch)

    def widen(tensor: torch.Tensor) -> torch.Tensor:
        """Two junk steps at the end of every row, and a junk row."""
        junk = tensor[:, :1].expand(-1, 2, *tensor.shape[2:])
        wide = torch.cat((tensor, junk), dim=1)
        return torch.cat((wide, wide[:1]))

    padded = map_tensors(batch, widen)
    padded.valid[:, -2:] = False
    padded.valid[-1] = False
    padded = replace(padded, advantage=torch.where(padded.valid, padded.advantage, torch.tensor(1e6)))

    again, _ = random_rollout(seed, minibatches=1, epochs=2, target_kl=None)
    with torch.no_grad():
        for p, value in zip(again.network.parameters(), rescaled, strict=True):
            p.copy_(value)
    assert torch.allclose(learn(again, padded), expected, atol=1e-6)


def test_parts_of_a_minibatch_give_the_same_update():
    whole, parts = random_rollout(3, rows=6), random_rollout(3, rows=6, chunk_rows=1)
    update_of(whole)
    update_of(parts)
    assert torch.allclose(weights(whole[0]), weights(parts[0]), atol=1e-6)


@pytest.mark.parametrize("scale", [0.1, 1000.0])
def test_the_scale_of_rewards_does_not_matter(scale):
    """From birth: what an untrained critic predicts must not be in units of its own."""

    def after(scale: float) -> torch.Tensor:
        env = CueMemory(4, seed=2)
        env.scale = scale
        agent = make_agent(env, PPOConfig(minibatches=1), seed=2)
        for _ in range(3):
            agent.update(rollout(env, agent, 96))
        head = agent.network.parameters_by_head()["op"]
        return torch.cat([p.detach().flatten() for p in head])

    assert torch.allclose(after(1.0), after(scale), atol=1e-4)


def test_every_parameter_learns_from_growth_observations():
    torch.manual_seed(0)
    network = FactoredRecurrentActorCritic(NetworkConfig(5, 4, blueprints=3, policy_gain=1.0))
    # No KL stop: the critic starts at zero, so its inner layer has a gradient from the second step on.
    agent = PPOAgent(network, PPOConfig(target_kl=None))

    def look() -> Observation:
        return Observation(
            torch.randn(4, 5),
            torch.randn(4, 3, 4),
            torch.randint(0, 4, (4, 3)),
            torch.rand(4, 3, 3),
            torch.ones(4, 3, dtype=torch.bool),
        )

    ends = (torch.arange(6) == 5).expand(4, 6)
    lengths, masks = torch.full((4,), 6), open_masks((4,), 4, 3, 3, 3)
    episodes = acted(agent, [look() for _ in range(6)], masks, torch.randn(4, 6), ends, lengths)
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    metrics = agent.update(episodes)
    assert [name for name, p in network.named_parameters() if torch.equal(p, before[name])] == []
    assert all(metrics[f"{name}/gradient_norm"] > 0 for name in HEAD_NAMES)
    assert metrics["op/live_fraction"] == 1.0
    assert metrics["blueprint/live_fraction"] < metrics["slot/live_fraction"] < 1.0


def test_replay_agrees_with_acting_and_tampering_is_noticed():
    env = OpConditional(16, 0)
    agent = make_agent(env, PPOConfig())
    give_values(agent)
    assert agent.update(rollout(env, agent))["first_ratio_gap"] < 1e-5

    def tampered(change) -> None:
        episodes = rollout(env, agent)
        change(episodes)
        with pytest.raises(RolloutMismatchError, match="before the first step"):
            agent.update(episodes)

    tampered(lambda episodes: episodes.masks.op[:, :, 3].fill_(False))  # masks lost
    tampered(lambda episodes: episodes.observation.overall.mul_(1.1))  # normaliser drifted
    tampered(lambda episodes: episodes.observation.overall[:, :2].zero_())  # memory of something else
    tampered(lambda episodes: episodes.value.add_(50.0))  # values of other units


def test_the_kl_stop_comes_before_the_step():
    agent, episodes = random_rollout(5, minibatches=1, epochs=10, target_kl=1e-6, learning_rate=1e-2)
    before = weights(agent)
    metrics = agent.update(episodes)
    assert metrics["stopped_by_kl"]
    assert (metrics["epochs"], metrics["minibatches"], metrics["optimizer_steps"]) == (2, 2, 1)
    assert not torch.equal(before, weights(agent))
    free = random_rollout(5, minibatches=1, epochs=10, target_kl=None, learning_rate=1e-2)
    assert update_of(free)["optimizer_steps"] == 10
    assert metrics["kl_max"] > 1.5e-6
    assert metrics["kl_max"] == pytest.approx(metrics["approximate_kl"] * 2, rel=3.0)  # one exact, one sampled


def test_a_gradient_that_is_not_finite_is_skipped():
    agent, episodes = random_rollout(6)
    agent.network.value_output.weight.register_hook(lambda grad: grad * torch.nan)
    before = weights(agent)
    metrics = agent.update(episodes)
    assert metrics["skipped"] == metrics["minibatches"] == 12
    assert metrics["optimizer_steps"] == 0
    # only PopArt has touched the critic's last layer
    moved = (before != weights(agent)).sum().item()
    assert moved <= agent.network.value_output.weight.numel() + 1


def test_rewards_that_are_not_finite_are_refused_with_their_place():
    env = CueMemory(2)
    agent = make_agent(env, PPOConfig())
    episodes = rollout(env, agent)
    episodes.reward[1, 2] = torch.nan
    with pytest.raises(ValueError, match="environment 1, step 2"):
        agent.update(episodes)


def test_truncation_goes_on_from_the_state_it_led_to():
    """One step that is cut short: worth its reward and half of the value of what followed, under the memory that the
    policy had after the step, not an empty one."""
    env = CueMemory(2, length=1)
    agent = make_agent(env, PPOConfig(discount=0.5, gae_decay=0.0))
    give_values(agent)
    episodes = rollout(env, agent)
    final = vector_observation(torch.randn(2, env.features))
    episodes = replace(episodes, final=final, terminated=torch.zeros(2, 1, dtype=torch.bool), reward=torch.ones(2, 1))
    first, masks = (map_tensors(record, lambda x: x[:, 0]) for record in (episodes.observation, episodes.masks))
    with torch.no_grad():
        after = agent.network(first, masks, agent.network.initial_state(2)).state
        expected = agent.network.value(final, after)
        assert not torch.allclose(expected, agent.network.value(final, agent.network.initial_state(2)))
    assert torch.allclose(agent.replay(episodes)[0].returns[:, 0], 1 + 0.5 * expected, atol=1e-6)


def test_entropy_bonus_raises_entropy():
    """Alone in the loss: advantages are 0 and the value loss has no weight, so nothing else moves the policy."""
    settings = {"value_coefficient": 0.0, "entropy_coefficient": 1.0, "target_kl": None, "learning_rate": 1e-2}
    agent, episodes = random_rollout(2, **settings)
    batch, _ = agent.replay(episodes)
    batch = replace(batch, advantage=torch.zeros_like(batch.advantage))

    def entropy() -> float:
        with torch.no_grad():
            _, part = losses(agent, batch, 0.0)
        return part.entropy_bonus.item()  # the bonus: 1 is a uniform policy

    before = entropy()
    learn(agent, batch)
    assert before + 0.05 < entropy() <= 1.0


def test_the_bonus_does_not_grow_with_the_number_of_heads():
    for env in (CueMemory(4), OpConditional(4), MaskedMultiDiscrete(4)):
        agent = make_agent(env, PPOConfig())
        metrics = agent.update(rollout(env, agent))
        assert metrics["entropy_bonus"] == pytest.approx(1.0, abs=0.01)  # near-uniform at birth: 1 for each


def test_annealing_by_hand():
    """The coefficient follows from the update's number alone: no mask is read, nothing waits for the device."""
    config = PPOConfig(entropy_coefficient=0.1, entropy_coefficient_end=0.02, anneal_updates=4)
    assert [config.entropy_coefficient_at(u) for u in (1, 3, 5, 9)] == pytest.approx([0.1, 0.06, 0.02, 0.02])
    assert PPOConfig(entropy_coefficient=0.1).entropy_coefficient_at(100) == 0.1
    slower, episodes = random_rollout(1, learning_rate=1e-2, learning_rate_end=1e-4, anneal_updates=2)
    assert update_of((slower, episodes))["learning_rate"] == 1e-2
    assert slower.config.learning_rate_at(2) == pytest.approx((1e-2 + 1e-4) / 2)
    assert slower.config.learning_rate_at(7) == pytest.approx(1e-4)


def test_optimizer_decays_the_critic_only():
    agent = make_agent(CueMemory(2), PPOConfig(weight_decay=0.1))
    rest, critic = agent.optimizer.param_groups
    assert (rest["weight_decay"], critic["weight_decay"]) == (0.0, 0.1)
    assert {id(p) for p in critic["params"]} == {id(p) for p in agent.network.value_head.parameters()}
    assert rest["fused"]
    assert rest["eps"] == 1e-5


def test_value_clipping_takes_the_worse_of_two():
    agent, episodes = random_rollout(8, value_clip=0.1, huber_delta=None)
    batch, _ = prepare_batch(agent.replay(episodes)[0], agent.value_normaliser, agent.network.value_output)
    with torch.no_grad():
        agent.network.value_output.bias.add_(1.0)  # all values moved by 1, ten times the range
        _, part = losses(agent, batch, 0.0)
        moved = 0.5 * (batch.value + 1.0 - batch.returns) ** 2
        near = 0.5 * (batch.value + 0.1 - batch.returns) ** 2
        expected = torch.maximum(moved, near)[batch.valid].mean()
    assert part.value_loss.item() == pytest.approx(expected.item(), abs=1e-4)


def test_every_logged_name_is_in_the_glossary_and_comes_in_one_transfer(monkeypatch):
    env = OpConditional(4)
    agent = make_agent(env, PPOConfig())
    episodes = rollout(env, agent)
    transfers = []
    original = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: transfers.append(self.numel()) or original(self))
    metrics = agent.update(episodes)
    assert len(transfers) == 1
    names = set()
    for name, value in metrics.items():
        first, _, rest = name.partition("/")
        names.add(f"head/{rest}" if first in HEAD_NAMES else name)
        assert isinstance(value, float)
    assert names == set(METRICS)
    assert metrics["gradient_norm"] > 0
    assert metrics["advantage_std"] > 0
    assert metrics["lstm/finite"] == 1.0
    assert 1e-6 < metrics["lstm/hidden_rms"] < 10.0


def test_a_minibatch_in_which_a_head_has_no_step_is_no_zero_among_its_numbers():
    """Covers: R112. Without a step of learning every ratio is 1 and every entropy that of the rollout, by hand."""
    agent, episodes = random_rollout(0, rows=8, learning_rate=0.0, minibatches=8, epochs=1)
    batch, _ = agent.replay(episodes)
    used = batch.policy.relevant(batch.action) & batch.valid[..., None]
    without = ~used.any(1)  # [rows, heads]: a minibatch is one row
    assert without[:, 1:3].any()
    assert used.any((0, 1)).all()
    live = batch.policy.live_share()[batch.valid].sum(0)
    entropy = batch.policy.live_entropy(batch.policy)[batch.valid].sum(0) / live
    metrics = agent.update(episodes)
    for index, head in enumerate(HEAD_NAMES):
        assert metrics[f"{head}/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        assert metrics[f"{head}/entropy"] == pytest.approx(entropy[index].item(), abs=1e-5)


def test_observation_normaliser_is_frozen_within_a_rollout():
    env = CartPoleWithoutVelocities(4)
    torch.manual_seed(0)
    network = FactoredRecurrentActorCritic(env.network_config())
    normaliser = ObservationNormaliser(env.features, 0)
    agent = PPOAgent(network, PPOConfig(), observation_normaliser=normaliser)
    for _ in range(3):
        mean = normaliser.frozen["overall"].mean.clone()
        episodes = rollout(env, agent)
        assert torch.equal(normaliser.frozen["overall"].mean, mean)
        metrics = agent.update(episodes)  # takes them in, and learns from what the policy saw
        assert not torch.equal(normaliser.frozen["overall"].mean, mean)
        assert metrics["first_ratio_gap"] < 1e-5


def test_a_policy_without_memory_is_shuffled_step_by_step():
    env = OpConditional(4)
    agent = make_agent(env, PPOConfig(epochs=10, minibatches=8, target_kl=None), layers=0)
    metrics = agent.update(rollout(env, agent))
    assert metrics["optimizer_steps"] == 80
    assert "lstm/finite" not in metrics
    assert metrics["first_ratio_gap"] < 1e-5


def test_several_epochs_never_see_a_stale_state():
    """With a learning rate of 0 every epoch of a recurrent policy must reproduce the rollout exactly."""
    env = CueMemory(4)
    agent = make_agent(env, PPOConfig(epochs=3, learning_rate=0.0))
    give_values(agent)
    agent.update(rollout(env, agent))
    metrics = agent.update(rollout(env, agent))
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["kl_max"] < 1e-8
    assert metrics["effective_sample_size"] == pytest.approx(1.0, abs=1e-6)


def test_seeds_decide_everything():
    def final(seed: int) -> torch.Tensor:
        env = CueMemory(4, seed=seed)
        agent = make_agent(env, PPOConfig(), seed=seed)
        train(env, agent, 4 * 12 * 2)
        return weights(agent)

    assert torch.equal(final(1), final(1))
    assert not torch.equal(final(1), final(2))

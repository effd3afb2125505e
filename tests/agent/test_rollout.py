"""Playing and the record of it: what goes in comes out, what does not fit is refused, tensors are made once.

Covers: R025, R038, R047, R048, R061, R063, R078, R080, R096, R097, R098, R099, R100, R101, R147
"""

from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from toy_environments import CartPoleWithoutVelocities, CueMemory, MaskedMultiDiscrete, make_agent, rollout

from esper.agent.actor import PolicyActor
from esper.agent.config import PPOConfig
from esper.policy.network import FactoredRecurrentActorCritic, NetworkConfig
from esper.rollout.episodes import join, map_tensors, minibatches
from esper.rollout.play import StoppedError, play


def played(environments: int = 3, seed: int = 1, **config):
    env = CueMemory(environments, seed=1)
    agent = make_agent(env, PPOConfig(**config))
    return agent, play(env, agent.actor(seed), range(environments))


def test_every_row_is_one_episode():
    """[N, T, …], from its first step; the memory before it is empty, so nothing of it is stored (R038)."""
    agent, episodes = played()
    assert episodes.reward.shape == episodes.valid.shape == (3, 12)
    assert episodes.action.shape == episodes.log_prob.shape == (3, 12, 4)
    assert episodes.lengths.tolist() == [12, 12, 12]
    assert episodes.terminated.sum(1).tolist() == [1, 1, 1]
    assert torch.equal(episodes.last, episodes.terminated)
    assert (episodes.steps, len(episodes), episodes.controllers) == (36, 3, ("policy",))
    assert episodes.draw.tolist() == [0, 1, 2]
    assert episodes.label is episodes.action
    batch, memory = agent.replay(episodes)
    assert batch.returns.shape == batch.advantage.shape == (3, 12)
    assert memory.hidden.shape == (1, 3, 64)  # the network's [layers, rows, hidden]


def test_an_episode_that_is_over_stands_still():
    env = CartPoleWithoutVelocities(6, seed=0)
    agent = make_agent(env, PPOConfig())
    episodes = play(env, agent.actor(0), range(6))
    assert len(set(episodes.lengths.tolist())) > 1
    assert episodes.reward.shape[1] == episodes.lengths.max()
    assert torch.equal(episodes.returns(), episodes.lengths.float())
    for row, length in enumerate(episodes.lengths.tolist()):
        assert episodes.terminated[row, length - 1]
        beyond = episodes.observation.overall[row, length:]
        assert torch.equal(beyond, episodes.final.overall[row].expand_as(beyond))


def test_the_seed_decides_what_is_drawn():
    first, again, other = (played(seed=seed)[1].action for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_most_probable_action_is_the_mode_of_the_replay():
    agent, _ = played()
    episodes = play(CueMemory(3, seed=2), agent.actor(), range(3))
    assert episodes.log_prob is None
    with torch.no_grad():
        out = agent.network(episodes.observation, episodes.masks, agent.network.initial_state(3))
    assert torch.equal(out.policy.mode(), episodes.action)
    with pytest.raises(ValueError, match="without log-probabilities and values: let a PolicyActor with a seed play"):
        agent.update(episodes)


def test_memory_is_carried_from_step_to_step_and_forgotten_between_episodes():
    env = CueMemory(3, seed=1)
    actor = make_agent(env, PPOConfig()).actor(0)
    play(env, actor, range(3))
    assert (actor.state.hidden != 0).any()
    actor.reset(range(3))
    assert (actor.state.hidden == 0).all()
    assert actor.state.hidden.shape == (1, 3, 64)


def test_episodes_that_last_too_long_are_refused():
    env = CueMemory(3)
    actor = make_agent(env, PPOConfig()).actor(0)
    assert play(env, actor, range(3), longest=12).steps == 36
    with pytest.raises(ValueError, match="lasts longer than the 11 steps"):
        play(env, actor, range(3), longest=11)


def test_a_rollout_can_be_stopped():
    env = CueMemory(3)
    actor = make_agent(env, PPOConfig()).actor(0)
    with pytest.raises(StoppedError):
        play(env, actor, range(3), stop=lambda: env.time == 4)
    assert env.time == 4


def test_it_must_fit_the_network():
    """More slots are fine, they are a set; blueprints are limited by the embedding. Other widths fail while acting."""
    env = MaskedMultiDiscrete(2, length=3)
    agent = make_agent(env, PPOConfig())
    episodes = rollout(env, agent)
    narrow = FactoredRecurrentActorCritic(NetworkConfig(16, 3, blueprints=3))
    agent.network = narrow
    with pytest.raises(ValueError, match="4 blueprints exceed the network's embedding capacity of 3"):
        agent.update(episodes)
    wide = FactoredRecurrentActorCritic(CueMemory(1).network_config(hidden=32))
    actor = PolicyActor(FactoredRecurrentActorCritic(CueMemory(1).network_config()))
    actor.reset(range(2))
    actor.network = wide
    with pytest.raises(RuntimeError):
        actor.act((), *CueMemory(2).reset())


def test_an_episode_that_just_stops_is_refused():
    agent, episodes = played()
    cut = replace(episodes, terminated=torch.zeros_like(episodes.terminated))
    agent.replay(cut)  # what followed is there
    with pytest.raises(ValueError, match="episode 0 was cut short at step 11: it needs the observation after it"):
        agent.replay(replace(cut, final=None))
    agent.replay(replace(episodes, final=None))  # nothing follows, so nothing is missing


def test_records_are_immutable():
    _, episodes = played()
    with pytest.raises(FrozenInstanceError):
        episodes.reward = None


def test_an_update_leaves_the_episodes_as_they_are():
    """They are the caller's: the agent keeps nothing of them, and another update may use them."""
    agent, episodes = played()
    before = {name: tensor.clone() for name, tensor in episodes.tensors().items()}
    agent.update(episodes)
    assert all(torch.equal(tensor, before[name]) for name, tensor in episodes.tensors().items())


def test_long_rollouts_are_plain_memory():
    """3,000 steps: every tensor is one block, indexed directly."""
    env = CueMemory(1, length=3_000)
    agent = make_agent(env, PPOConfig(), hidden=8)
    episodes = rollout(env, agent)
    assert episodes.reward.shape == (1, 3_000)
    assert all(tensor.is_contiguous() for tensor in episodes.tensors().values())
    batch, _ = agent.replay(episodes)
    assert batch.advantage.shape == (1, 3_000)


def test_nothing_is_moved_that_is_there():
    _, episodes = played()
    assert episodes.to("cpu").reward.data_ptr() == episodes.reward.data_ptr()


def test_minibatches_are_one_permutation():
    generator = torch.Generator().manual_seed(0)
    parts = list(minibatches(10, 3, generator))
    assert [len(p) for p in parts] == [4, 3, 3]
    assert sorted(torch.cat(parts).tolist()) == list(range(10))
    assert [len(p) for p in minibatches(2, 5, generator)] == [1, 1]


def test_selection_and_joining_keep_rows_together():
    agent, episodes = played()
    chosen = episodes.select(torch.tensor([2, 0]))
    assert torch.equal(chosen.action, episodes.action[[2, 0]])
    assert chosen.draw.tolist() == [2, 0]
    env = CueMemory(2, length=5)
    short = play(env, agent.actor(0), (7, 8))
    both = join([episodes, short])
    assert both.lengths.tolist() == [12, 12, 12, 5, 5]
    assert both.draw.tolist() == [0, 1, 2, 7, 8]
    assert torch.equal(both.log_prob[3:, :5], short.log_prob)
    assert torch.equal(both.final.overall[3:], short.final.overall)
    assert not both.valid[3:, 5:].any()
    assert join([episodes, replace(short, value=None, final=None)]).value is None


def test_selection_from_a_batch():
    agent, episodes = played()
    batch, _ = agent.replay(episodes)
    chosen = batch.select(torch.tensor([2, 0]))
    assert torch.equal(chosen.action, batch.action[[2, 0]])
    assert torch.equal(chosen.policy.op, batch.policy.op[[2, 0]])
    assert chosen.policy.uses is batch.policy.uses  # a table of the heads, not of the rows
    assert [part.valid.shape[0] for part in batch.chunks(2)] == [2, 1]
    single = batch.single_steps()
    assert single.action.shape == (36, 1, 4)
    assert torch.equal(single.action[:12, 0], batch.action[0])


def test_records_map_tensor_by_tensor():
    _, episodes = played()
    doubled = map_tensors(episodes, lambda tensor: torch.cat((tensor, tensor)))
    assert len(doubled) == 6
    assert doubled.controllers == episodes.controllers

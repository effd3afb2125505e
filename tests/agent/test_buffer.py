"""The rollout buffer: what goes in comes out, what does not fit is refused, memory is reused.

Covers: R025, R038, R047, R048, R061, R063, R078, R080, R096, R097, R098, R099, R100, R101, R147
"""

from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from toy_environments import CueMemory, make_agent, rollout

from esper.agent.buffer import RolloutBuffer, minibatches
from esper.agent.config import PPOConfig
from esper.policy.network import FactoredRecurrentActorCritic, NetworkConfig


def filled(steps: int = 30):
    env = CueMemory(3, seed=1)
    agent = make_agent(env, PPOConfig(), steps)
    rollout(env, agent, env.reset())
    return agent


def test_rows_hold_several_episodes_and_the_state_before_the_first_step():
    agent = filled(30)  # episodes of 12 steps
    batch = agent._batch
    assert batch.start[0].nonzero().flatten().tolist() == [0, 12, 24]
    assert batch.several_episodes
    assert (batch.state.hidden == 0).all()
    assert batch.state.hidden.shape == (1, 3, 64)  # the network's [layers, rows, hidden]
    assert batch.returns.shape == batch.advantage.shape == (3, 30)
    agent.update()
    env = CueMemory(3, seed=1)
    rollout(env, agent, env.reset())
    assert (agent._batch.state.hidden != 0).any()  # the second rollout continued where the first one stopped


def test_reset_clears_counters_only():
    agent = filled()
    places = {name: tensor.data_ptr() for name, tensor in agent.buffer._store.items()}
    agent.update()
    assert agent.buffer.length == 0
    assert {name: tensor.data_ptr() for name, tensor in agent.buffer._store.items()} == places


def test_overflow_is_refused():
    agent = filled(5)
    env = CueMemory(3)
    with pytest.raises(RuntimeError, match="full"):
        agent.act(*env.reset())


def test_it_must_fit_the_network():
    vector = FactoredRecurrentActorCritic(CueMemory(1).network_config())
    with pytest.raises(ValueError, match="2 slots and 1 blueprints, the network's heads have 1 and 1"):
        RolloutBuffer(vector, 3, 5, slots=2, blueprints=1)
    slots = FactoredRecurrentActorCritic(NetworkConfig(4, 3, blueprints=6))
    with pytest.raises(ValueError, match="capacity of 6"):
        RolloutBuffer(slots, 3, 5, slots=2, blueprints=7)


def test_wrong_shapes_are_named():
    env = CueMemory(3)
    agent = make_agent(env, PPOConfig(), 5)
    agent.act(*env.reset())
    agent._decision = replace(agent._decision, log_prob=torch.zeros(3, 5))
    flags = torch.zeros(3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"log_prob is \(3, 5\), the buffer was made for \(3, 4\)"):
        agent.process_env_step(torch.zeros(3), flags, flags)
    wide = make_agent(env, PPOConfig(), 5, hidden=32)
    agent.act(*env.reset())
    agent._decision = replace(agent._decision, before=wide.state)
    with pytest.raises(ValueError, match="recurrent state"):
        agent.process_env_step(torch.zeros(3), flags, flags)


def test_a_row_that_just_stops_is_refused():
    env = CueMemory(2)
    agent = make_agent(env, PPOConfig(), 4)
    observation, masks = env.reset()
    never = torch.zeros(2, dtype=torch.bool)
    for t in range(4):
        agent.act(observation, masks)
        agent.process_env_step(torch.zeros(2), never, never, valid=torch.tensor([True, t < 2]))
    with pytest.raises(ValueError, match="environment 1 stops being valid after step 1"):
        agent.compute_returns(observation)


def test_steps_are_immutable_records():
    agent = filled()
    with pytest.raises(FrozenInstanceError):
        agent._batch.reward = None


def test_long_rollouts_are_plain_memory():
    env = CueMemory(1)
    network = FactoredRecurrentActorCritic(env.network_config(hidden=8))
    buffer = RolloutBuffer(network, 1, 12_000, 1, 1)
    assert buffer._store["reward"].shape == (1, 12_000)


def test_minibatches_are_one_permutation():
    generator = torch.Generator().manual_seed(0)
    parts = list(minibatches(10, 3, generator))
    assert [len(p) for p in parts] == [4, 3, 3]
    assert sorted(torch.cat(parts).tolist()) == list(range(10))
    assert [len(p) for p in minibatches(2, 5, generator)] == [1, 1]


def test_selection_keeps_rows_and_states_together():
    batch = filled()._batch
    marked = replace(batch, state=replace(batch.state, hidden=batch.state.hidden + torch.arange(3.0)[None, :, None]))
    chosen = marked.select(torch.tensor([2, 0]))
    assert torch.equal(chosen.action, batch.action[[2, 0]])
    assert chosen.state.hidden[0, :, 0].tolist() == [2.0, 0.0]
    assert [part.valid.shape[0] for part in batch.parts(2)] == [2, 1]
    single = batch.single_steps()
    assert single.action.shape == (90, 1, 4)
    assert torch.equal(single.action[:30, 0], batch.action[0])

"""Checkpoints: exact continuation, no code execution, upgrades, and messages that say what is wrong.

Covers: R010, R015, R027, R042, R054, R057, R068, R076, R081, R126
"""

import json
import os
import pickle
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from toy_environments import CartPoleWithoutVelocities, CueMemory, make_agent, rollout

from esper import files
from esper.agent.checkpoints import (
    CHECKPOINT_VERSION,
    CheckpointError,
    check_same_network,
    config_data,
    config_from_data,
    inspect_checkpoint,
    load_checkpoint,
    save_checkpoint,
    upgrade_checkpoint,
)
from esper.agent.config import PPOConfig
from esper.agent.normalisers import ObservationNormaliser
from esper.agent.policies import load_policy
from esper.agent.ppo import PPOAgent
from esper.policy.network import FactoredRecurrentActorCritic, NetworkConfig
from esper.rollout.episodes import Episodes


def cartpole_agent(seed: int) -> PPOAgent:
    env = CartPoleWithoutVelocities(4, seed)
    torch.manual_seed(seed)
    network = FactoredRecurrentActorCritic(env.network_config(hidden=16))
    return PPOAgent(network, PPOConfig(), seed=seed, observation_normaliser=ObservationNormaliser(2, 0))


def run(env, agent: PPOAgent, updates: int) -> Episodes:
    for _ in range(updates):
        episodes = rollout(env, agent)
        agent.update(episodes)
    return episodes


def test_save_load_continue_equals_never_having_stopped(tmp_path):
    path = tmp_path / "agent.safetensors"
    env, agent = CartPoleWithoutVelocities(4, 1), cartpole_agent(1)
    run(env, agent, 3)
    agent.save(path, {"episode": 3})
    world = env.generator.get_state()

    last_a = run(env, agent, 3)
    unbroken = agent.state_dict()

    resumed = cartpole_agent(99)  # other weights, other random numbers: all must come from the file
    assert resumed.load(path) == {"episode": 3}
    again = CartPoleWithoutVelocities(4, 7)
    again.generator.set_state(world)
    last_b = run(again, resumed, 3)
    assert torch.equal(last_a.action, last_b.action)
    continued = resumed.state_dict()
    assert continued.keys() == unbroken.keys()
    different = [name for name in unbroken if not torch.equal(unbroken[name], continued[name])]
    assert different == []  # bit for bit
    assert resumed.update_count == 6


def test_an_actor_needs_only_the_file(tmp_path):
    agent = cartpole_agent(2)
    env = CartPoleWithoutVelocities(4, 2)
    run(env, agent, 1)
    agent.save(tmp_path / "a.safetensors")
    network, normaliser = load_policy(tmp_path / "a.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), agent.network.parameters(), strict=True))
    assert normaliser is not None
    assert torch.equal(normaliser.frozen["overall"].mean, agent.observation_normaliser.frozen["overall"].mean)


class Hostile:
    """Unpickling this runs a command."""

    def __init__(self, target: str) -> None:
        self.target = target

    def __reduce__(self):
        return os.mkdir, (self.target,)


@pytest.mark.parametrize(
    "dump", [lambda o, p: p.write_bytes(pickle.dumps(o)), lambda o, p: torch.save({"version": 1, "network": o}, p)]
)
def test_a_hostile_file_does_not_run(tmp_path, dump):
    target, path = tmp_path / "owned", tmp_path / "agent.safetensors"
    dump(Hostile(str(target)), path)
    agent = make_agent(CueMemory(2), PPOConfig())
    for read in (load_checkpoint, inspect_checkpoint, upgrade_checkpoint, load_policy, agent.load):
        with pytest.raises(CheckpointError, match="was not loaded"):
            read(path)
    assert not target.exists()


def test_other_files_are_explained(tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        load_checkpoint(tmp_path / "nothing")
    save_file({"x": torch.zeros(1)}, tmp_path / "foreign")
    with pytest.raises(CheckpointError, match="not one of Esper's"):
        load_checkpoint(tmp_path / "foreign")
    torch.save({"weights": torch.zeros(1)}, tmp_path / "torch")
    with pytest.raises(CheckpointError, match="not a checkpoint of Esper"):
        load_checkpoint(tmp_path / "torch")
    save_file({"x": torch.zeros(1)}, tmp_path / "bad", metadata={"esper": "{"})
    with pytest.raises(CheckpointError, match="damaged header"):
        load_checkpoint(tmp_path / "bad")
    whole = tmp_path / "whole"
    save_checkpoint(whole, {"x": torch.zeros(100)}, {})
    whole.write_bytes(whole.read_bytes()[:-50])
    with pytest.raises(CheckpointError):
        load_checkpoint(whole)
    header = json.dumps({"version": CHECKPOINT_VERSION + 1, "data": {}})
    save_file({"x": torch.zeros(1)}, tmp_path / "future", metadata={"esper": header})
    with pytest.raises(CheckpointError, match="newer"):
        load_checkpoint(tmp_path / "future")


def test_a_crash_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "agent.safetensors"
    save_checkpoint(path, {"x": torch.ones(3)}, {"n": 1})

    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "fsync", crash)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(path, {"x": torch.zeros(3)}, {"n": 2})
    monkeypatch.undo()
    assert load_checkpoint(path).data == {"n": 1}
    assert [f.name for f in tmp_path.iterdir()] == [path.name]


def test_mismatches_name_every_difference():
    saved = config_data(NetworkConfig(10, 6, layout="v1"))
    check_same_network(saved, NetworkConfig(10, 6, layout="v1"))
    with pytest.raises(CheckpointError) as caught:
        check_same_network(saved, NetworkConfig(12, 6, hidden=64, layout="v2"))
    for part in ("overall_features: saved 10, here 12", "hidden: saved 128, here 64", "layout: saved 'v1', here 'v2'"):
        assert part in str(caught.value)
    assert config_from_data(json.loads(json.dumps(saved))) == NetworkConfig(10, 6, layout="v1")
    del saved["hidden"]
    with pytest.raises(CheckpointError, match=r"missing \['hidden'\]"):
        check_same_network(saved, NetworkConfig(10, 6))


def test_the_memory_of_environments_in_older_checkpoints_is_ignored(tmp_path):
    """Rollouts could once stop in the middle of an episode; the agent that goes on begins new ones."""
    agent = make_agent(CueMemory(2), PPOConfig())
    memory = {"recurrent/hidden": torch.ones(1, 2, 64), "recurrent/cell": torch.ones(1, 2, 64)}
    starts = {"start": torch.zeros(2, dtype=torch.bool)}
    save_checkpoint(
        tmp_path / "a", agent.state_dict() | memory | starts, {"network": config_data(agent.network.config)}
    )
    other = make_agent(CueMemory(3), PPOConfig(), seed=5)
    other.load(tmp_path / "a")
    assert torch.equal(other.state_dict()["network/op_head.out.bias"], agent.network.op_head.out.bias)


def test_an_agent_with_other_inputs_is_explained(tmp_path):
    make_agent(CueMemory(2), PPOConfig()).save(tmp_path / "a")
    other = make_agent(CueMemory(2), PPOConfig())
    other.observation_normaliser = ObservationNormaliser(5, 0)
    with pytest.raises(ValueError, match="no observation normaliser"):
        other.load(tmp_path / "a")


def test_version_2_is_read_and_upgraded(tmp_path):
    """It differs from version 3 in the digest alone."""
    path, agent = tmp_path / "a.safetensors", make_agent(CueMemory(2), PPOConfig())
    header = json.dumps({"version": 2, "data": {"network": config_data(agent.network.config)}})
    save_file(agent.state_dict(), path, metadata={"esper": header})
    make_agent(CueMemory(2), PPOConfig(), seed=5).load(path)
    assert upgrade_checkpoint(path, tmp_path / "new.safetensors") == (2, tmp_path / "new.safetensors")
    assert inspect_checkpoint(path).version == 2
    assert upgrade_checkpoint(path) == (2, path)  # in place
    for upgraded in (path, tmp_path / "new.safetensors"):
        assert inspect_checkpoint(upgraded).version == CHECKPOINT_VERSION
        other = make_agent(CueMemory(2), PPOConfig(), seed=5)
        other.load(upgraded)
        ours, theirs = agent.state_dict(), other.state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_version_1_is_refused_in_one_line(tmp_path):
    """Its files are dictionaries of torch.save; a header that claims the version is refused as well."""
    torch.save({"version": 1, "network": {}, "optimizer": {}, "config": {}, "update_count": 1}, tmp_path / "old.pt")
    for read in (load_checkpoint, inspect_checkpoint, upgrade_checkpoint):
        with pytest.raises(CheckpointError, match="is not a checkpoint of Esper; it was not loaded") as caught:
            read(tmp_path / "old.pt")
        assert "\n" not in str(caught.value)
    save_file({"x": torch.zeros(1)}, tmp_path / "a", metadata={"esper": json.dumps({"version": 1, "data": {}})})
    with pytest.raises(CheckpointError, match="a checkpoint of version 1, older than this Esper reads"):
        load_checkpoint(tmp_path / "a")


def test_a_policy_of_three_slots_runs_with_others(tmp_path):
    from test_slots import grow_step, slots_agent

    agent = slots_agent()
    agent.save(tmp_path / "a")
    network, _ = load_policy(tmp_path / "a")
    assert replace(network.config) == agent.network.config
    for slots in (1, 5, 12):
        observation, masks = grow_step(2, slots)
        out = network(observation, masks, network.initial_state(2))
        action, _ = out.policy.sample(torch.Generator().manual_seed(0))
        assert (action[:, 0] < slots).all()

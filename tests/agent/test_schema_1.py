"""What was made before observations had the rent goes on as it was: policies, agents, recordings.

Covers: R149
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from esper.agent import schema_1
from esper.agent.checkpoints import config_data, load_checkpoint, save_checkpoint
from esper.agent.normalisers import ObservationNormaliser, ValueNormaliser
from esper.agent.policies import (
    LearnedController,
    growth_network_config,
    load_policy_tensors,
    save_policy,
)
from esper.env.observation import OVERALL_FIELDS
from esper.env.spaces import ActionMasks, Observation
from esper.policy.network import FactoredRecurrentActorCritic
from esper.tasks.family import get_family
from esper.training.evaluation import Job
from esper.training.loop import make_agent
from esper.training.train_config import TrainConfig

OLD_POLICY = Path(__file__).with_name("schema_1.safetensors")
"""What shipped as `small-dense` in version 0.1."""


@pytest.fixture(scope="module")
def seen() -> tuple[Observation, ActionMasks]:
    """Two episodes that random decisions made: [N, T, …]."""
    episodes, _ = Job("random", get_family("mixed/vector"), "random", (0, 1)).play()
    return episodes.observation, episodes.masks


@pytest.mark.parametrize("rent", [0.0, 5.0, 20.0])
def test_a_policy_of_schema_1_decides_as_before_at_any_rent(rent: float, seen: tuple[Observation, ActionMasks]) -> None:
    """Beside a network of 29 fields with the file's own tensors, which is what older versions built."""
    observation, masks = seen
    raw = load_file(OLD_POLICY)
    now = LearnedController.load(OLD_POLICY)
    then = FactoredRecurrentActorCritic(
        replace(now.network.config, overall_features=29, layout="growth observation 1")
    ).eval()
    units = ObservationNormaliser(29, observation.slots.shape[-1])
    load_policy_tensors(raw, then, units)
    assert now.normaliser is not None
    shown = observation.overall.clone()
    shown[..., -1] = math.log1p(rent) / math.log(21.0)
    state = then.initial_state(len(shown))
    with torch.no_grad():
        old = then(units(replace(observation, overall=shown[..., :29])), masks, state)
        new = now.network(now.normaliser(replace(observation, overall=shown)), masks, state)
    assert torch.equal(old.policy.mode(), new.policy.mode())
    assert torch.allclose(old.value, new.value, atol=1e-5)
    assert not now.reads_rent


def test_an_agent_of_schema_1_goes_on_with_its_optimizer(tmp_path: Path) -> None:
    agent = make_agent(TrainConfig())
    path = tmp_path / "old.safetensors"
    agent.save(path)
    whole = load_checkpoint(path)
    cut = {}
    for name, tensor in whole.tensors.items():
        at = tensor.shape == whole.tensors[schema_1.READS].shape
        tensor = torch.cat((tensor[:, :29], tensor[:, 30:]), 1) if at else tensor
        cut[name] = tensor[:-1] if name in ("observations/overall/mean", "observations/overall/variance") else tensor
    assert sum(cut[name].shape != tensor.shape for name, tensor in whole.tensors.items()) == 5
    network = {**whole.data["network"], "overall_features": 29, "layout": "growth observation 1"}
    save_checkpoint(path, cut, {**whole.data, "network": network})
    agent.load(path)
    assert not agent.network.features.first.linear.weight[:, schema_1.RENT].any()


def policy_file(path: Path, variance: float) -> Path:
    network = FactoredRecurrentActorCritic(growth_network_config())
    units = ObservationNormaliser(network.config.overall_features, network.config.slot_features)
    units.frozen["overall"].variance[schema_1.RENT] = variance
    save_policy(path, network, units, ValueNormaliser(), {})
    return path


def test_a_policy_that_saw_one_rent_does_not_read_others(tmp_path: Path) -> None:
    assert LearnedController.load(policy_file(tmp_path / "varied.safetensors", 0.1)).reads_rent
    assert not LearnedController.load(policy_file(tmp_path / "fixed.safetensors", 0.0)).reads_rent


def test_what_a_field_of_a_recording_gets() -> None:
    overall = schema_1.overall_with_rent(torch.zeros(2, 3, 29))
    assert overall.shape == (2, 3, len(OVERALL_FIELDS))
    assert overall[..., -1].unique().tolist() == pytest.approx([math.log(6) / math.log(21)])


def test_only_schema_1_is_taken_for_old() -> None:
    now = config_data(growth_network_config())
    assert not schema_1.is_old(now)
    assert schema_1.is_old({**now, "layout": "growth observation 1", "overall_features": 29})
    assert not schema_1.is_old({**now, "layout": "growth observation 1"})  # it contradicts itself: checked as it is

"""The network: shapes, slots as a set, explicit state, whole rows equal to a step-by-step loop, initialisation.

Covers: R002, R003, R032, R040, R041, R044, R047, R056, R084, R090, R091, R095, R113, R127, R129, R130, R154
"""

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.actions import HEAD_NAMES
from esper.env.spaces import ActionMasks, Observation
from esper.policy.network import FactoredRecurrentActorCritic, NetworkConfig, RecurrentState

CONFIG = NetworkConfig(overall_features=10, slot_features=6, blueprints=8, policy_gain=1.0)


@pytest.fixture(scope="module")
def network() -> FactoredRecurrentActorCritic:
    torch.manual_seed(0)
    made = FactoredRecurrentActorCritic(CONFIG)
    torch.nn.init.orthogonal_(made.value_output.weight)  # starts at zero, where every comparison of values would hold
    return made


def random_input(lead: tuple[int, ...], slots: int = 3, blueprints: int = 8) -> tuple[Observation, ActionMasks]:
    observation = Observation(
        overall=torch.randn(*lead, 10),
        slots=torch.randn(*lead, slots, 6),
        blueprints=torch.randint(0, blueprints + 1, (*lead, slots)),
        costs=torch.rand(*lead, slots, blueprints),
        present=torch.ones(*lead, slots, dtype=torch.bool),
    )
    shapes = ((4,), (4, slots), (slots, blueprints), (slots, 3))
    return observation, ActionMasks(*(torch.ones(*lead, *shape, dtype=torch.bool) for shape in shapes))


def at(observation: Observation, index) -> Observation:
    o = observation
    return Observation(o.overall[index], o.slots[index], o.blueprints[index], o.costs[index], o.present[index])


def masks_at(masks: ActionMasks, index) -> ActionMasks:
    return ActionMasks(masks.op[index], masks.slot[index], masks.blueprint[index], masks.blend[index])


def test_it_is_small():
    count = sum(p.numel() for p in FactoredRecurrentActorCritic(NetworkConfig(24, 16)).parameters())
    assert 150_000 < count < 260_000


@pytest.mark.parametrize(("slots", "blueprints"), [(1, 8), (3, 2), (5, 8), (12, 1)])
def test_one_network_serves_any_number_of_slots_and_blueprints(network, slots, blueprints):
    observation, masks = random_input((4,), slots, blueprints)
    out = network(observation, masks, network.initial_state(4))
    assert out.policy.slot.shape == (4, 4, slots)
    assert out.policy.blueprint.shape == (4, slots, blueprints)
    assert out.value.shape == (4,)
    assert out.state.hidden.shape == (1, 4, CONFIG.hidden)


def test_slots_are_a_set(network):
    observation, masks = random_input((2,), 4)
    order = torch.tensor([2, 0, 3, 1])
    o = observation
    shuffled = Observation(o.overall, o.slots[:, order], o.blueprints[:, order], o.costs[:, order], o.present[:, order])
    a = network(o, masks, network.initial_state(2))
    b = network(shuffled, masks, network.initial_state(2))
    assert torch.allclose(a.value, b.value, atol=1e-5)
    assert torch.allclose(a.policy.op, b.policy.op, atol=1e-5)
    assert torch.allclose(a.policy.slot[..., order], b.policy.slot, atol=1e-5)
    assert torch.allclose(a.policy.blueprint[:, order], b.policy.blueprint, atol=1e-5)


def test_padded_slots_change_nothing(network):
    observation, masks = random_input((2,), 3)
    padded, wide = random_input((2,), 5)
    for short, long in (
        (observation.slots, padded.slots),
        (observation.blueprints, padded.blueprints),
        (observation.costs, padded.costs),
        (masks.blueprint, wide.blueprint),
    ):
        long[:, :3] = short
    padded = replace(padded, overall=observation.overall)
    padded.present[:, 3:] = False
    wide.slot[..., 3:] = False
    a = network(observation, masks, network.initial_state(2))
    b = network(padded, wide, network.initial_state(2))
    assert torch.allclose(a.value, b.value, atol=1e-6)
    assert torch.allclose(a.policy.slot, b.policy.slot[..., :3], atol=1e-6)


def test_a_model_without_slots_is_not_a_nan(network):
    observation, masks = random_input((2,), 1)
    observation.present[:] = False
    out = network(observation, masks, network.initial_state(2))
    assert out.value.isfinite().all()
    assert out.policy.op.isfinite().all()


def test_value_does_not_depend_on_masks_and_bootstrapping_disturbs_nothing(network):
    observation, masks = random_input((3,))
    state = RecurrentState(torch.randn(1, 3, CONFIG.hidden), torch.randn(1, 3, CONFIG.hidden))
    before = (state.hidden.clone(), state.cell.clone())
    closed = replace(masks, op=torch.tensor([True, False, False, False]).expand(3, 4))
    value = network.value(observation, state)
    assert torch.equal(network(observation, masks, state).value, network(observation, closed, state).value)
    assert torch.allclose(value, network(observation, masks, state).value, atol=1e-6)
    assert torch.equal(state.hidden, before[0])
    assert torch.equal(state.cell, before[1])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 9))
def test_whole_rows_equal_stepping(network, seed, rows, steps):
    """The obvious form: one step at a time, the state handed on."""
    torch.manual_seed(seed)
    observation, masks = random_input((rows, steps))
    state = RecurrentState(torch.randn(1, rows, CONFIG.hidden), torch.randn(1, rows, CONFIG.hidden))
    with torch.no_grad():
        whole = network(observation, masks, state)
        for t in range(steps):
            out = network(at(observation, (slice(None), t)), masks_at(masks, (slice(None), t)), state)
            state = out.state
            assert torch.allclose(whole.value[:, t], out.value, atol=1e-5)
            assert torch.allclose(whole.policy.op[:, t], out.policy.op, atol=1e-5)
    assert torch.allclose(whole.state.hidden, state.hidden, atol=1e-5)
    assert state.hidden.shape == (1, rows, CONFIG.hidden)


def test_every_parameter_receives_gradient(network):
    network.zero_grad(set_to_none=True)
    observation, masks = random_input((8, 6))
    observation.blueprints[0, 0] = torch.tensor([0, 1, 2])
    out = network(observation, masks, network.initial_state(8))
    action, _ = out.policy.sample(torch.Generator().manual_seed(0))
    (out.policy.log_prob(action).sum() + out.policy.entropy().sum() + out.value.sum()).backward()
    without = [n for n, p in network.named_parameters() if p.grad is None or p.grad.abs().max() == 0]
    assert without == []


def test_parameters_by_head_holds_each_parameter_once(network):
    groups = network.parameters_by_head()
    assert list(groups) == [*HEAD_NAMES, "value", "trunk"]
    flat = [id(p) for group in groups.values() for p in group]
    assert sorted(flat) == sorted(id(p) for p in network.parameters())


def test_initialisation():
    torch.manual_seed(1)
    net = FactoredRecurrentActorCritic(NetworkConfig(10, 6))
    hidden = net.config.hidden
    assert net.lstm is not None
    assert (net.lstm.bias_ih_l0[hidden : 2 * hidden] == 1).all()  # the forget gate's slice
    assert net.lstm.bias_ih_l0.sum() == hidden
    assert (net.lstm.bias_hh_l0 == 0).all()
    observation, masks = random_input((16,), blueprints=8)
    out = net(observation, masks, net.initial_state(16))
    uniform = torch.full_like(out.policy.op, 1 / 4)
    assert torch.allclose(out.policy.op.exp(), uniform, atol=0.02)  # policy gain 0.01
    assert (net.value_output.weight == 0.0).all()  # no first guess, whatever the units of the rewards


def test_no_layers_is_a_policy_without_memory():
    net = FactoredRecurrentActorCritic(replace(CONFIG, layers=0))
    observation, masks = random_input((2,))
    out = net(observation, masks, net.initial_state(2))
    assert not net.recurrent
    assert out.state.hidden.shape == (0, 2, CONFIG.hidden)


def test_configurations_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="slot_features"):
        NetworkConfig(overall_features=4)
    with pytest.raises(ValueError, match="layers"):
        NetworkConfig(overall_features=4, slot_features=1, feature_layers=0)
    with pytest.raises(ValueError, match="encoder must be 'slots' or 'vector', not 'vectors'"):
        NetworkConfig(overall_features=4, slot_features=1, encoder="vectors")
    with pytest.raises(ValueError, match="floor must be a number from 0 to 1, not"):
        NetworkConfig(overall_features=4, slot_features=1, floor=1.5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, -0.5, True, "1"])
@pytest.mark.parametrize("name", [field.name for field in fields(NetworkConfig) if field.type in ("int", "float")])
def test_numbers_that_make_no_sense_are_refused_in_one_line(name, value):
    with pytest.raises(ValueError, match=rf"^{name} must be .*, not {value!r}$"):
        NetworkConfig(**{"overall_features": 4, "slot_features": 1, name: value})


@pytest.mark.parametrize("name", ["overall_features", "blueprints", "blends", "slots", "hidden", "slot_width"])
def test_widths_of_nothing_are_refused(name):
    with pytest.raises(ValueError, match=f"^{name} must be a whole number of at least 1, not 0$"):
        NetworkConfig(**{"overall_features": 4, "slot_features": 1, name: 0})


@pytest.mark.slow
def test_compiled_network_gives_equal_results_and_breaks_only_at_the_lstm(network):
    observation, masks = random_input((4, 5))
    state = network.initial_state(4)
    explanation = torch._dynamo.explain(network)(observation, masks, state)
    reasons = [str(reason.reason) for reason in explanation.break_reasons]
    assert all("LSTM" in reason or "RNN" in reason for reason in reasons), reasons
    assert explanation.graph_break_count <= 1
    torch._dynamo.reset()
    compiled = torch.compile(network, mode="default", fullgraph=False, dynamic=True)
    for lead in ((4, 5), (3, 5), (4,)):
        observation, masks = random_input(lead)
        state = network.initial_state(lead[0])
        plain, fast = network(observation, masks, state), compiled(observation, masks, state)
        assert torch.allclose(plain.value, fast.value, atol=1e-5)
        assert torch.allclose(plain.policy.slot, fast.policy.slot, atol=1e-5)
    network.zero_grad(set_to_none=True)
    observation, masks = random_input((4, 5))
    out = compiled(observation, masks, network.initial_state(4))
    action, _ = out.policy.sample(torch.Generator().manual_seed(0))
    (out.policy.log_prob(action).sum() + out.policy.entropy().sum() + out.value.sum()).backward()
    assert [n for n, p in network.named_parameters() if p.grad is None or p.grad.abs().max() == 0] == []

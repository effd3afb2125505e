"""The formulas of cloning and of implicit Q-learning, against numbers worked by hand and against brute force.

Covers: R083, R085
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from toy_recordings import TOY, record_toy, toy_mixture, toy_network

from esper.actions import HEAD_NAMES
from esper.agent.normalisers import ObservationNormaliser, ValueNormaliser
from esper.env.spaces import ActionMasks
from esper.offline.agreement import HeadAgreement, agreement_with_teacher
from esper.offline.cloning import CloneConfig, balanced, class_weights, counted
from esper.offline.critic import ActionValues, FactoredCritic, Twin
from esper.offline.diversity import diversity, effective_number
from esper.offline.fitting import (
    BrokenLearningError,
    FitConfig,
    fit,
    imitation_losses,
    mean_where,
    new_network,
    newest_share,
    silent,
)
from esper.offline.iql import IQLConfig, advantage_weights, bellman_target, expectile_loss
from esper.offline.recording import RecordingError
from esper.offline.rows import EpisodeRows, Units, discounted_returns, prepare_rows, split, units_of
from esper.policy.distribution import GROWTH_ACTIONS, FactoredLogits
from esper.rollout.episodes import Episodes


def close(a: torch.Tensor, b: list[float] | list[list[float]]) -> None:
    assert torch.allclose(a.float(), torch.tensor(b, dtype=torch.float32), atol=1e-4), a


def test_class_weights_by_hand() -> None:
    """Eight waits and two prunings: shares 0.8 and 0.2.

    Square roots: 1.118 and 2.236, mean over the steps 0.8·1.118 + 0.2·2.236 = 1.342, so 5/6 and 5/3.
    Full balance: 1.25 and 5, mean 2, so 0.625 and 2.5: both classes weigh 5 in sum.
    """
    counts = torch.tensor([8, 0, 2, 0])
    close(class_weights(counts, 0.0), [1, 0, 1, 0])
    close(class_weights(counts, 0.5), [5 / 6, 0, 5 / 3, 0])
    close(class_weights(counts, 1.0), [0.625, 0, 2.5, 0])
    close(class_weights(torch.zeros(3, dtype=torch.int64), 0.5), [0, 0, 0])


@given(counts=st.lists(st.integers(0, 1000), min_size=1, max_size=8), balance=st.floats(0, 1))
def test_class_weights_have_mean_one_over_the_steps(counts: list[int], balance: float) -> None:
    tensor = torch.tensor(counts)
    weights = class_weights(tensor, balance)
    assert bool((weights[tensor == 0] == 0).all())
    if sum(counts):
        assert float((weights * tensor).sum() / tensor.sum()) == pytest.approx(1.0, rel=1e-4)


def test_expectile_loss_by_hand() -> None:
    """τ = 0.8: a value that is 2 too low costs 0.8·4, one that is 3 too high 0.2·9."""
    close(expectile_loss(torch.tensor([2.0, -3.0, 0.0]), 0.8), [3.2, 1.8, 0.0])
    close(expectile_loss(torch.tensor([2.0, -3.0]), 0.5), [2.0, 4.5])


def test_the_expectile_of_two_outcomes() -> None:
    """Q is 0 or 1, equally often. The τ-expectile m solves τ(1 − m) = (1 − τ)m: it is τ itself."""
    value = torch.zeros((), requires_grad=True)
    for _ in range(400):
        loss = expectile_loss(torch.tensor([0.0, 1.0]) - value, 0.7).mean()
        (gradient,) = torch.autograd.grad(loss, value)
        value = (value - 0.3 * gradient).detach().requires_grad_()
    assert value.item() == pytest.approx(0.7, abs=1e-3)


def test_advantage_weights_by_hand() -> None:
    """Spread 2, temperature 0.5: an advantage of 1 is one unit, e¹; far ones stop at 20."""
    weights = advantage_weights(torch.tensor([[0.0, 1.0, -1.0, 100.0]]), torch.tensor(2.0), 0.5)
    close(weights, [[1.0, math.e, 1 / math.e, 20.0]])


def units(mean: float, std: float) -> Units:
    values = ValueNormaliser()
    values.moments.mean = torch.tensor([mean], dtype=torch.float64)
    values.moments.variance = torch.tensor([std**2], dtype=torch.float64)
    return Units(ObservationNormaliser(1, 0), values)


def test_bellman_targets_by_hand() -> None:
    """Returns have mean 10 and std 2. First row: r = 1, V' = 1.5 → 13 points, so 1 + 0.5·13 = 7.5 → −1.25; its last
    step ends: 3 points → −3.5. Second row: cut short after one step, so nobody knows what would have followed."""
    episodes = record_toy("waits", 2, 0.0, 0)
    rows = replace(
        prepare_rows(episodes, units(10, 2), 0.5, action="action"),
        reward=torch.tensor([[1.0, 3.0, 9.0], [4.0, 9.0, 9.0]]),
        terminated=torch.tensor([[False, True, False], [False, False, False]]),
        valid=torch.tensor([[True, True, False], [True, False, False]]),
    )
    value = torch.tensor([[0.0, 1.5, 7.0], [0.0, 7.0, 7.0]])
    target, known = bellman_target(rows, value, units(10, 2), 0.5)
    close(target[0, :2], [-1.25, -3.5])
    assert known.tolist() == [[True, True, False], [False, False, False]]


def test_discounted_returns_by_hand() -> None:
    episodes = replace(
        record_toy("waits", 1, 0.0, 0),
        reward=torch.tensor([[1.0, 2.0, 4.0, 100.0, 100.0]]),
        lengths=torch.tensor([3]),
    )
    close(discounted_returns(episodes, 0.5), [[3.0, 4.0, 4.0, 0.0, 0.0]])


def test_means_ignore_what_padding_holds() -> None:
    x = torch.tensor([1.0, float("nan"), 3.0])
    assert float(mean_where(x, torch.tensor([True, False, True]))) == 2.0
    assert float(mean_where(x, torch.tensor([False, False, False]))) == 0.0


# -- Q over factored actions --------------------------------------------------------------------------------------


def some_values(seed: int, slots: int = 3, blueprints: int = 4, blends: int = 2) -> ActionValues:
    g = torch.Generator().manual_seed(seed)
    ops = GROWTH_ACTIONS.ops
    shapes = {"op": (1, 1, ops), "slot": (1, 1, ops, slots), "blueprint": (1, 1, slots, blueprints)}
    shapes |= {"blend": (1, 1, slots, blends)}
    parts = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
    masks = {name: torch.rand(shape, generator=g) < 0.7 for name, shape in shapes.items()}
    masks["op"][..., 0] = True
    masks["blueprint"][..., 0] = masks["blend"][..., 0] = masks["slot"][..., 0] = True
    return ActionValues(
        torch.randn(1, 1, generator=g), FactoredLogits(**parts), ActionMasks(**masks), GROWTH_ACTIONS.table()
    )


def every_action(values: ActionValues) -> dict[tuple[int, ...], float]:
    """All different legal decisions and their Q, from the definition."""
    p, m, found = values.parts, values.masks, {}
    sizes = (p.slot.shape[-1], p.blueprint.shape[-1], p.blend.shape[-1], p.op.shape[-1])
    for slot, blueprint, blend, op in itertools.product(*map(range, sizes)):
        uses = GROWTH_ACTIONS.uses[op]
        if not m.op[0, 0, op] or (uses[0] and not m.slot[0, 0, op, slot]):
            continue
        if uses[1] and not (m.blueprint[0, 0, slot, blueprint] and m.blend[0, 0, slot, blend]):
            continue
        q = float(values.base + p.op[0, 0, op])
        q += float(p.slot[0, 0, op, slot]) if uses[0] else 0.0
        q += float(p.blueprint[0, 0, slot, blueprint] + p.blend[0, 0, slot, blend]) if uses[1] else 0.0
        used = tuple(c if u else 0 for c, u in zip((slot, blueprint, blend, op), uses, strict=True))
        found[used] = q
    return found


@given(seed=st.integers(0, 10_000))
def test_action_values_and_their_soft_maximum_against_enumeration(seed: int) -> None:
    values = some_values(seed)
    table = every_action(values)
    for action, q in table.items():
        assert float(values.of(torch.tensor([[action]]))) == pytest.approx(q, abs=1e-4)
    expected = math.log(sum(math.exp(q) for q in table.values()))
    assert float(values.soft_maximum()) == pytest.approx(expected, abs=1e-4)


def toy_rows(noise: float = 0.3) -> EpisodeRows:
    episodes = toy_mixture(4, noise, 0)
    network = new_network(toy_network(32), 0)
    return prepare_rows(episodes, units_of(episodes, network, 0.9), 0.9, action="action")


def test_the_smaller_of_two_slow_critics_counts() -> None:
    torch.manual_seed(0)
    twin, rows = Twin(FactoredCritic(toy_network(32)), FactoredCritic(toy_network(32))), toy_rows()
    state = twin.first.initial_state(len(rows))
    both = [c.action_values(rows.observation, rows.masks, state).of(rows.action) for c in twin.live]
    before = twin.smaller(rows)
    assert torch.allclose(before, torch.minimum(*both), atol=1e-5)  # the LSTM rounds otherwise without gradients
    assert bool((both[0] < both[1]).any())
    assert bool((both[0] > both[1]).any())
    with torch.no_grad():
        for critic in twin.live:
            critic.value_head.out.bias += 1.0
    assert torch.equal(twin.smaller(rows), before), "the copies move only when they follow"
    twin.follow(0.25)
    close(twin.smaller(rows) - before, torch.full_like(before, 0.25).tolist())
    assert all(p.grad is None and not p.requires_grad for p in twin.slow_first.parameters())


def test_every_part_of_q_learns() -> None:
    critic, rows = FactoredCritic(toy_network(32)), toy_rows()
    torch.nn.init.orthogonal_(critic.value_output.weight)  # starts at zero: what is before it waits for a first step
    judged = critic.action_values(rows.observation, rows.masks, critic.initial_state(len(rows)))
    (judged.of(rows.action).sum() + judged.soft_maximum().sum()).backward()
    without = [name for name, p in critic.named_parameters() if p.grad is None or not bool(p.grad.any())]
    assert without == []


# -- imitation ----------------------------------------------------------------------------------------------------


def test_the_imitation_loss_counts_a_head_where_it_is_used_only() -> None:
    """A fresh policy is nearly uniform: log 4 for the op, and where something germinates log 4 (slot), log 6, log 3."""
    network, rows = new_network(toy_network(32), 0), toy_rows()
    decisions, _ = imitation_losses(network, rows)
    assert decisions.item() == pytest.approx(sum(map(math.log, (4, 4, 6, 3))), abs=0.1)
    waiting = replace(rows, action=torch.zeros_like(rows.action))
    assert float(imitation_losses(network, waiting)[0].detach()) == pytest.approx(math.log(4), abs=0.1)
    twice = replace(rows, weight=2.0 * rows.weight)
    assert imitation_losses(network, twice)[0].item() == pytest.approx(2.0 * decisions.item(), rel=1e-5)


def test_what_padding_holds_teaches_nothing() -> None:
    network, rows = new_network(toy_network(32), 0), toy_rows()
    half = replace(rows, valid=rows.valid & (torch.arange(5) < 3))
    wild = replace(half, value=torch.where(half.valid, half.value, torch.full_like(half.value, torch.nan)))
    for a, b in zip(imitation_losses(network, half), imitation_losses(network, wild), strict=True):
        assert a.item() == b.item()


def test_counts_and_weights_follow_the_choices() -> None:
    rows = toy_rows()
    counts = counted(rows, GROWTH_ACTIONS.table())
    assert [len(c) for c in counts] == [4, 6, 3, 4]
    assert int(counts[3].sum()) == int(rows.valid.sum())
    assert int(counts[0].sum()) == int((rows.action[..., 3] > 0).sum())
    assert int(counts[1].sum()) == int((rows.action[..., 3] == 1).sum())
    weights = [torch.arange(len(c), dtype=torch.float32) for c in counts]
    assert torch.equal(balanced(rows, weights).weight, rows.action.float())


def test_the_best_average_is_kept() -> None:
    """One parameter pushed from 0 towards 1 by plain descent; it is judged best near 0.3, and that is what is left."""

    class Point(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.at = nn.Parameter(torch.zeros(()))

    point, seen = Point(), []
    best = fit(
        "point",
        point,
        toy_rows(),
        lambda part: (point.at - 1.0).square(),
        lambda: (point.at - 0.3).abs(),
        FitConfig(epochs=300, batch_episodes=12, learning_rate=0.02, seed=0),
        lambda what, done, of, loss: seen.append(loss),
    )
    assert len(seen) == 300
    assert seen[best - 1] == min(seen)
    assert point.at.item() == pytest.approx(0.3, abs=0.02)


def test_the_average_forgets_the_first_weights_at_once() -> None:
    assert [newest_share(step) for step in (1, 11, 91, 991, 5000)] == pytest.approx([1.0, 0.5, 0.1, 0.01, 0.01])


def test_agreement_by_hand() -> None:
    head = HeadAgreement(((8, 2), (1, 1)))
    assert (head.count, head.accuracy, head.balanced_accuracy) == (12, 0.75, (0.8 + 0.5) / 2)
    assert HeadAgreement(((0, 0), (0, 0))).accuracy is None
    network, rows = new_network(toy_network(32), 0), toy_rows()
    with torch.inference_mode():
        own = network(rows.observation, rows.masks, network.initial_state(len(rows))).policy.mode()
    found = agreement_with_teacher(network, replace(rows, action=own))
    assert found.decisions == 1.0
    assert all(head.accuracy in (None, 1.0) for head in found.heads.values())
    assert tuple(found.heads) == HEAD_NAMES
    other = own.clone()
    other[..., 3] = (own[..., 3] + 1) % 4
    assert agreement_with_teacher(network, replace(rows, action=other)).heads["op"].accuracy == 0.0


# -- splits and diversity -----------------------------------------------------------------------------------------


def test_a_problem_is_on_one_side_only() -> None:
    """Two controllers played the same problems, one of them twice: never here to learn from and there to judge by."""
    once = toy_mixture(20, 0.2, 0)
    shared = replace(once, draw=once.draw % 1_000_000)  # 20 problems, each played by all three
    parts = split(shared, seed=0)
    sides = [set(part.draw.tolist()) for part in parts]
    assert sides[0].isdisjoint(sides[1])
    assert sides[0].isdisjoint(sides[2])
    assert sides[1].isdisjoint(sides[2])
    assert [len(side) for side in sides] == [14, 3, 3]
    assert sum(map(len, parts)) == 60
    with pytest.raises(RecordingError, match="3 recorded problems are too few"):
        split(record_toy("waits", 3, 0.0, 0), seed=0)


def test_effective_numbers_by_hand() -> None:
    assert effective_number(torch.tensor([[1], [1], [1]])) == pytest.approx(1.0)
    assert effective_number(torch.tensor([[0], [1], [2], [3]])) == pytest.approx(4.0)


def test_diversity_tells_a_single_teacher_from_a_mixture() -> None:
    def most(episodes: Episodes) -> tuple[float, float]:
        groups = diversity(episodes, clusters=4)
        assert sum(group.steps for group in groups) == episodes.steps
        return max(group.decisions for group in groups), max(group.explored for group in groups)

    assert most(record_toy("waits", 20, 0.0, 0)) == (pytest.approx(1.0), 0.0)
    decisions, explored = most(record_toy("waits", 20, 0.5, 0))
    assert decisions > 3
    assert 0.3 < explored < 0.7


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CloneConfig(balance=1.5), "balance"),
        (lambda: IQLConfig(expectile=1.0), "expectile"),
        (lambda: IQLConfig(temperature=0.0), "temperature"),
        (lambda: IQLConfig(conservative=-1.0), "conservative"),
        (lambda: IQLConfig(temperature=math.nan), "temperature"),
        (lambda: IQLConfig(conservative=math.inf), "conservative"),
        (lambda: FitConfig(epochs=0), "epochs must be a whole number of at least 1, not 0"),
    ],
)
def test_settings_that_make_no_sense(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_learning_that_breaks_gives_no_weights() -> None:
    """By its weights, or by a held-out loss that never is a number; a share of errors does not show the former."""
    module, rows = fitted()
    pace = FitConfig(epochs=1, batch_episodes=4, learning_rate=1e-3)
    with pytest.raises(BrokenLearningError, match="weights of the policy became NaN or infinite in epoch 1"):
        fit(
            "policy", module, rows, lambda part: module.weight.sum() * math.nan, lambda: torch.tensor(0.5), pace, silent
        )
    module, rows = fitted()
    with pytest.raises(BrokenLearningError, match="nothing was learnt of the policy"):
        fit("policy", module, rows, lambda part: module.weight.sum(), lambda: torch.tensor(math.nan), pace, silent)


def fitted() -> tuple[nn.Linear, EpisodeRows]:
    episodes = record_toy("waits", 4, 0.0, 0)
    units = units_of(episodes, new_network(toy_network(16), 0), 0.9)
    return nn.Linear(2, 1), prepare_rows(episodes, units, 0.9, action="label")


def test_the_toy_schema_is_the_toy_environment() -> None:
    from toy_environments import OpConditional

    assert TOY.overall_features == OpConditional.features

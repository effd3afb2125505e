"""The stacked engine in float32 from the eager engine's states, and what networks of a stack must not share.

Covers: R143
"""

from __future__ import annotations

import pytest
import torch
from side_by_side import DEVICES, EVERYTHING, OPEN, RandomPlay, Small, columns_of, pack, seed_tensors, with_nan
from torch import Tensor, nn

from esper.engine.governor import FAULTS, Fault
from esper.engine.learner import Learner
from esper.engine.stacked.adamw import Moments
from esper.engine.stacked.parameters import Table
from esper.engine.stacked.stack import Stack
from esper.env.growth_env import GrowthEnv
from esper.env.stacked_env import StackedEnv
from esper.env.steps import EnvStep

DRAWS = range(24)
VAL = 32
Tensors = dict[str, Tensor]


# -- float32 ----------------------------------------------------------------------------------------------------------


def pack_moments(
    table: Table, row: int, parameters: tuple[Tensors, Tensors, Tensors], steps: int, kept: Moments
) -> None:
    """`parameters`: weights and both of Adam's averages, by name."""
    for tensors, into in zip(parameters, (kept.weights, kept.first, kept.second), strict=True):
        pack(table, row, tensors, into)
    kept.steps[row] = steps


def trained_state(learner: Learner, module: nn.Module) -> tuple[tuple[Tensors, Tensors, Tensors], int]:
    """Weights and averages of a module by name, and the steps that it has made."""
    named, state = dict(module.named_parameters()), learner.optimizer.optimizer.state
    first, second = (
        {name: state[p][key] if p in state else torch.zeros_like(p) for name, p in named.items()}
        for key in ("exp_avg", "exp_avg_sq")
    )
    steps = max((int(state[p]["step"]) for p in named.values() if p in state), default=0)
    return (dict(named), first, second), steps


def load(stack: Stack, row: int, learner: Learner) -> None:
    """Give a network of a stack the weights, moments and statistics of a learner."""
    pack_moments(stack.hosts.table, row, *trained_state(learner, learner.model.host), stack.host)
    norms = [m for m in learner.model.host.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
    for norm, running in zip(norms, stack.running, strict=True):
        running.mean[row, : norm.num_features] = norm.running_mean.to(stack.device)
        running.variance[row, : norm.num_features] = norm.running_var.to(stack.device)
    for slot in learner.model.slots:
        if slot.seed is None:
            continue
        parts, steps = trained_state(learner, slot.seed)
        gated = slot.seed.blend == "gated"
        bodies, gates = zip(*(seed_tensors(tensors, gated) for tensors in parts), strict=True)
        pack_moments(stack.tables[slot.index][slot.seed.blueprint], row, bodies, steps, stack.seeds[slot.index])
        if gated:
            pack_moments(stack.gate_tables[slot.index], row, gates, steps, stack.gates[slot.index])
        private = slot.shadow_buffers  # mean, variance and a count of each norm
        for stage, norm in enumerate(norms if private else []):
            mean, variance = private[3 * stage : 3 * stage + 2]
            stack.private[stage].mean[row, slot.index, : norm.num_features] = mean.to(stack.device)
            stack.private[stage].variance[row, slot.index, : norm.num_features] = variance.to(stack.device)


def close(a: Tensor, b: Tensor, relative: float, absolute: float | None = None) -> bool:
    """By default as close in absolute terms; NaN is NaN."""
    absolute = relative if absolute is None else absolute
    return torch.allclose(a, b.cpu(), rtol=relative, atol=absolute, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
def test_an_epoch_from_the_same_state_gives_the_same_in_float32(device: str) -> None:
    """Losses to 1e-4, accuracies to one example, contrasts to one on each side.

    In hosts with a batch norm, what is measured after the updates may differ by more: the bias of a seed before a norm
    has a gradient of nothing but rounding, which Adam turns into steps of its own; they show in the running mean. There
    an evaluation of the same weights is compared instead.
    """
    family = Small(EVERYTHING, updates=lambda number: 3, val=VAL, horizon=8)
    plain = GrowthEnv(family, len(DRAWS), rules=OPEN)
    stacked = StackedEnv(family, len(DRAWS), rules=OPEN, device=device)
    (_, masks), _ = plain.reset(DRAWS), stacked.reset(DRAWS)
    layouts, example = [str(draw.facts["layout"]) for draw in plain.draws], 100.0 / VAL + 1e-6
    play, without_norm = RandomPlay(layouts, seed=3), torch.tensor([not name.startswith("conv") for name in layouts])
    while not plain.over:
        actions = play(masks)
        steps = plain.step(actions), stacked.step(actions)
        masks = steps[0].masks
        a, b = (step.facts.epoch for step in steps if step.facts is not None)
        assert torch.equal(a.stage, b.stage.cpu())  # gates that read no measurement
        assert close(a.train_loss, b.train_loss, 1e-4)
        rows = without_norm
        assert close(a.loss[rows], b.loss.cpu()[rows], 1e-4)
        assert close(a.loss, b.loss, 5e-2)
        assert close(a.accuracy[rows], b.accuracy.cpu()[rows], 0.0, example)
        for mine, theirs in ((a.shadow, b.shadow.cpu()), (a.contribution, b.contribution.cpu())):
            assert close(mine[rows][..., 0], theirs[rows][..., 0], 0.0, 2 * example)
            assert close(mine[rows][..., 1], theirs[rows][..., 1], 2e-4)
        for stack, places in zip(stacked.engine.stacks, stacked.engine.places, strict=True):
            for row, place in enumerate(places.tolist()):
                load(stack, row, plain.learners[place])
        accuracy, loss = stacked.engine.evaluate_test()
        tests = plain.evaluate_test()
        assert close(torch.tensor([test.loss for test in tests]).double(), loss, 1e-4)
        assert close(torch.tensor([test.accuracy for test in tests]).double(), accuracy, 0.0, example)


# -- nothing is shared ------------------------------------------------------------------------------------------------


def same_rows(a: EnvStep, b: EnvStep, rows: Tensor) -> None:
    """Bit for bit."""
    for (name, mine), (_, theirs) in zip(columns_of(a.facts), columns_of(b.facts), strict=True):
        x, y = mine[rows], theirs[rows]
        same = x.isnan() & y.isnan() | (x == y) if x.is_floating_point() else x == y
        assert bool(same.all()), name


@pytest.mark.parametrize("device", DEVICES)
def test_a_network_that_breaks_leaves_its_neighbours_bit_identical(device: str) -> None:
    """Up to the epoch in which it is undone. Then it leaves the stack, and the others' products have other shapes."""
    broken = (4, 13, 21)
    sound = Small(EVERYTHING, horizon=8)
    ill = Small(EVERYTHING, horizon=8, change=lambda number, draw: with_nan(draw) if number in broken else draw)
    envs = [StackedEnv(family, len(DRAWS), rules=OPEN, device=device) for family in (sound, ill)]
    masks, _ = (env.reset(DRAWS)[1] for env in envs)
    play = RandomPlay([str(sound.draw(number).facts["layout"]) for number in DRAWS])
    stacks = [set(places.tolist()) for places in envs[0].engine.places]
    neighbours, faults, epochs = set(DRAWS) - set(broken), {}, []
    while not envs[0].over:
        actions = play(masks.to(torch.device("cpu")))
        a, b = (env.step(actions) for env in envs)
        assert b.facts is not None
        same_rows(a, b, torch.tensor(sorted(neighbours)))
        found = b.facts.epoch.fault.tolist()
        for number in [number for number in broken if found[number] >= 0]:
            faults[number] = FAULTS[found[number]]
            epochs.append(int(envs[1].world.epoch[number]))
            assert bool(b.facts.epoch.loss[number].isfinite()), "the epoch was not undone"
            neighbours -= next(stack for stack in stacks if number in stack)
        masks = a.masks
    assert faults == dict.fromkeys(broken, Fault.NON_FINITE)
    assert min(epochs) > 2, "too early to show anything"
    assert all(bool(stack.host.weights.isfinite().all()) for stack in envs[1].engine.stacks)


@pytest.mark.parametrize("device", DEVICES)
def test_what_a_network_does_changes_no_other_network(device: str) -> None:
    """In float64, to rounding: who is stacked with it decides the shapes of products, and so their last bits."""
    watched = torch.arange(0, len(DRAWS), 3)
    family = Small(EVERYTHING, horizon=8)
    envs = [StackedEnv(family, len(DRAWS), rules=OPEN, device=device, dtype=torch.float64) for _ in range(2)]
    masks = [env.reset(DRAWS)[1].to(torch.device("cpu")) for env in envs]
    layouts = [str(EVERYTHING.draw(number).facts["layout"]) for number in DRAWS]
    plays = [RandomPlay(layouts, seed) for seed in (0, 1)]
    while not envs[0].over:
        actions = [play(mask) for play, mask in zip(plays, masks, strict=True)]
        actions[1][watched] = actions[0][watched]
        steps = [env.step(chosen) for env, chosen in zip(envs, actions, strict=True)]
        masks = [step.masks.to(torch.device("cpu")) for step in steps]
        for (name, a), (_, b) in zip(*(columns_of(step.facts) for step in steps), strict=True):
            found = torch.allclose(a[watched].double(), b[watched].double(), rtol=1e-9, atol=1e-9, equal_nan=True)
            assert found, name


# -- what stays -------------------------------------------------------------------------------------------------------


def state_of(stack: Stack, row: int) -> list[Tensor]:
    kept = [stack.host, *stack.seeds, *stack.gates]
    tensors = [getattr(one, name)[row] for one in kept for name in ("weights", "first", "second", "steps")]
    statistics = [getattr(one, name)[row] for one in (*stack.running, *stack.private) for name in ("mean", "variance")]
    return [tensor.clone() for tensor in (*tensors, *statistics)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_network_whose_episode_is_over_stays_as_it_is_and_padding_stays_zero(device: str) -> None:
    family = Small(EVERYTHING)
    env = StackedEnv(family, len(DRAWS), rules=OPEN, device=device)
    masks = env.reset(DRAWS)[1].to(torch.device("cpu"))
    play = RandomPlay([str(family.draw(number).facts["layout"]) for number in DRAWS])
    ended: dict[tuple[int, int], list[Tensor]] = {}
    while not env.over:
        step = env.step(play(masks))
        masks = step.masks.to(torch.device("cpu"))
        over = env.world.over.tolist()
        for i, places in enumerate(env.engine.places):
            for row, place in enumerate(places.tolist()):
                if over[place] and (i, row) not in ended:
                    ended[i, row] = state_of(env.engine.stacks[i], row)
    assert len(ended) == len(DRAWS)
    for (i, row), then in ended.items():
        now = state_of(env.engine.stacks[i], row)
        assert all(torch.equal(a, b) for a, b in zip(now, then, strict=True))
    for stack in env.engine.stacks:
        padding = ~stack.hosts.table.real
        assert all(bool((tensor[padding] == 0).all()) for tensor in (stack.host.weights, stack.host.first))


def test_after_an_error_nothing_goes_on_beside_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacks that were queued before it have streams of their own: all are waited for, and only a reset can follow."""
    env = StackedEnv(Small(EVERYTHING), len(DRAWS))
    env.reset(DRAWS)
    stacks, joined = env.engine.stacks, []

    def fail(*given: object) -> None:
        raise MemoryError("in the last stack")

    monkeypatch.setattr(stacks[-1], "measure", fail)
    monkeypatch.setattr(Stack, "join", lambda stack: joined.append(stack))
    with pytest.raises(MemoryError, match="in the last stack"):
        env.step(torch.zeros((len(DRAWS), 4), dtype=torch.int64))
    assert joined == stacks
    with pytest.raises(RuntimeError, match="call reset"):
        env.step(torch.zeros((len(DRAWS), 4), dtype=torch.int64))

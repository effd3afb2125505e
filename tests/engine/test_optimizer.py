"""Optimizer surgery: survivors keep their state bit for bit, the pruned leave no trace, schedules go on as before.

Covers: R149, R024 (fused, foreach and plain optimizers alike)
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import lr_scheduler as schedules
from torch.optim.lr_scheduler import LRScheduler

from esper.actions import Action, Op
from esper.engine.learner import Learner
from esper.engine.measure import gather
from esper.engine.optimizer import GrowingOptimizer
from esper.lifecycle import Stage
from esper.tasks.registry import cross_entropy, percent_correct
from small_worlds import EAGER, OPTIMIZERS, PATIENT, WORLDS, end_epoch, germinate, learner_for, run_epoch, same

KINDS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "plain": {"foreach": False, "fused": False},
}


def state_of(optimizer: Optimizer) -> dict[Tensor, dict[str, Any]]:
    """The optimizer's state: the objects, and copies of them."""
    return {p: {key: (value, copy.deepcopy(value)) for key, value in s.items()} for p, s in optimizer.state.items()}


def assert_survivors_keep(optimizer: Optimizer, before: dict[Tensor, dict[str, Any]], survivors: list[Tensor]) -> None:
    assert set(before) >= set(survivors)
    for parameter in survivors:
        now = optimizer.state[parameter]
        assert set(now) == set(before[parameter])
        for key, (tensor, copied) in before[parameter].items():
            assert now[key] is tensor
            assert torch.equal(now[key], copied)


def assert_each_parameter_once(learner: Learner) -> None:
    grouped = [p for group in learner.optimizer.optimizer.param_groups for p in group["params"]]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == {p for p in learner.model.parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_survivors_keep_their_state_through_germinate_prune_and_fossilize(name: str, kind: str) -> None:
    learner = learner_for(WORLDS["conv1d"], rules=EAGER)
    optimizer = OPTIMIZERS[name](learner.model.host.parameters(), **KINDS[kind])
    learner.optimizer = GrowingOptimizer(optimizer, warmup_updates=2)
    host = list(learner.model.host.parameters())
    run_epoch(learner)

    before = state_of(optimizer)
    assert len(before) == len(host)
    assert learner.apply(germinate(0, "conv")).changed
    assert_survivors_keep(optimizer, before, host)
    assert set(optimizer.state) == set(host), "a new seed has no state yet"
    assert_each_parameter_once(learner)
    run_epoch(learner, germinate(1, "depthwise"))
    first, second = (learner.model.seed_parameters(slot) for slot in learner.model.slots)
    assert set(optimizer.state) == {*host, *first, *second}
    assert_each_parameter_once(learner)

    while learner.model.slots[0].life.stage is not Stage.HOLDING:
        run_epoch(learner)
    before = state_of(optimizer)
    assert learner.apply(Action(Op.FOSSILIZE, 0)).changed
    assert_survivors_keep(optimizer, before, [*host, *first, *second])
    assert_each_parameter_once(learner)

    assert learner.model.slots[1].life.stage is Stage.HOLDING
    assert learner.apply(Action(Op.PRUNE, 1)).changed
    for _ in range(EAGER.ramp_out_epochs - 1):
        run_epoch(learner)
    learner.begin_epoch()
    trained, measured = learner.train(), learner.evaluate()
    before = state_of(optimizer)
    end_epoch(learner, *gather([trained]), *gather([measured]))
    assert learner.model.slots[1].life.stage is Stage.PRUNED
    assert_survivors_keep(optimizer, before, [*host, *first])
    assert not set(optimizer.state) & set(second), "the pruned leave no trace"
    assert not any(p is q for group in optimizer.param_groups for p in group["params"] for q in second)
    assert_each_parameter_once(learner)
    run_epoch(learner)
    assert [group.get("slot") for group in optimizer.param_groups] == [None, 0]


def test_a_slot_can_be_grown_pruned_and_grown_again_many_times() -> None:
    learner = learner_for(WORLDS["mlp"])
    optimizer = learner.optimizer.optimizer
    for _ in range(3):
        while learner.model.slots[0].life.stage is not Stage.DORMANT:
            run_epoch(learner)
        run_epoch(learner, germinate(0, "mlp"))
        learner.model.prune(learner.model.slots[0], epoch=learner.epoch, at_once=True)
        learner.optimizer.drop(0)
    assert len(optimizer.param_groups) == 1
    assert len(optimizer.state) == len(list(learner.model.host.parameters()))


def test_named_parameters_stay_named() -> None:
    learner = learner_for(WORLDS["mlp"], rules=EAGER)
    learner.optimizer = GrowingOptimizer(AdamW(learner.model.host.named_parameters()))
    run_epoch(learner, germinate(0, "norm"))
    for group in learner.optimizer.optimizer.param_groups:
        assert len(group["param_names"]) == len(group["params"]) == len(set(group["param_names"]))


def test_a_seed_takes_the_settings_of_the_first_group_of_the_host() -> None:
    host = nn.Linear(3, 2)
    optimizer = SGD([{"params": [host.weight], "weight_decay": 0.1}, {"params": [host.bias], "lr": 9.0}], lr=0.5)
    growing = GrowingOptimizer(optimizer)
    growing.add(4, [nn.Parameter(torch.zeros(2))])
    group = optimizer.param_groups[2]
    assert (group["lr"], group["weight_decay"], group["slot"]) == (0.5, 0.1, 4)
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 9.0, 0.5]


def test_a_rate_that_is_a_tensor_is_the_seeds_own() -> None:
    """Whoever lowers rates writes into such tensors: into one that two groups share, twice."""
    optimizer = AdamW([nn.Parameter(torch.zeros(2))], lr=torch.tensor(0.5))
    growing = GrowingOptimizer(optimizer)
    growing.add(0, [nn.Parameter(torch.zeros(2))])
    for group in optimizer.param_groups:
        group["lr"].mul_(0.5)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.25, 0.25]


# -- warm-up ------------------------------------------------------------------------------------------------------


def test_the_warm_up_by_hand() -> None:
    """Four updates of warm-up with rate 2 and gradient 1: steps of 0.5, 1, 1.5, 2 and then 2; the host steps by 2."""
    host, seed = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
    growing = GrowingOptimizer(SGD([host], lr=2.0), warmup_updates=4)
    growing.add(0, [seed])
    places = []
    for _ in range(6):
        growing.zero_grad()
        host.grad, seed.grad = torch.ones(()), torch.ones(())
        growing.step()
        places.append((-host.item(), -seed.item()))
        assert [group["lr"] for group in growing.optimizer.param_groups] == [2.0, 2.0]
    assert places == [(2.0, 0.5), (4.0, 1.5), (6.0, 3.0), (8.0, 5.0), (10.0, 7.0), (12.0, 9.0)]


def test_an_error_in_the_middle_of_a_step_restores_the_rates() -> None:
    host, seed = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
    growing = GrowingOptimizer(SGD([host], lr=1.0), warmup_updates=4)
    growing.add(0, [seed])

    def fail(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    growing.optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        growing.step()
    assert [group["lr"] for group in growing.optimizer.param_groups] == [1.0, 1.0]


# -- schedulers ---------------------------------------------------------------------------------------------------

STEPS = 24
SCHEDULES: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "StepLR": lambda o: schedules.StepLR(o, 5, 0.5),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [4, 15], 0.1),
    "ExponentialLR": lambda o: schedules.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, STEPS),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 7),
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda n: 1.0 / (1 + n)),
    "MultiplicativeLR": lambda o: schedules.MultiplicativeLR(o, lambda n: 0.95),
    "PolynomialLR": lambda o: schedules.PolynomialLR(o, STEPS, 2.0),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, 0.3, STEPS + 1),
    "CyclicLR": lambda o: schedules.CyclicLR(o, 0.01, 0.1, 5),
    "SequentialLR": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, 1.0, 6), schedules.CosineAnnealingLR(o, STEPS - 6)], [6]
    ),
    "ChainedScheduler": lambda o: schedules.ChainedScheduler(
        [schedules.LinearLR(o, 0.1, 1.0, 6), schedules.ExponentialLR(o, 0.9)]
    ),
}


def rates(make: Callable[[Optimizer], LRScheduler], grow: bool) -> list[tuple[float, ...]]:
    """The rate of every group at every step; seeds come at steps 3, 5 and 9, and go at 8 and 12."""
    host = [nn.Parameter(torch.zeros(2))]
    optimizer = SGD(host, lr=0.1, momentum=0.9)
    growing = GrowingOptimizer(optimizer, [make(optimizer)], warmup_updates=2)
    seen = []
    for step in range(STEPS):
        if grow and step in (3, 5, 9):
            growing.add(step, [nn.Parameter(torch.zeros(2))])
        if grow and step in (8, 12):
            growing.drop({8: 3, 12: 9}[step])
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones(2)
        for scheduler in growing.schedulers:
            last = [float(rate) for rate in scheduler.get_last_lr()]
            assert last == pytest.approx([float(group["lr"]) for group in optimizer.param_groups])
        seen.append(tuple(float(group["lr"]) for group in optimizer.param_groups))
        growing.step()
    return seen


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.filterwarnings("ignore:.*epoch parameter in `scheduler.step:UserWarning")
def test_a_schedule_goes_on_as_if_nothing_had_grown_and_seeds_follow_it(name: str) -> None:
    plain = rates(SCHEDULES[name], grow=False)
    grown = rates(SCHEDULES[name], grow=True)
    assert [step[0] for step in grown] == [step[0] for step in plain]
    assert [len(step) for step in grown] == [1, 1, 1, 2, 2, 3, 3, 3, 2, 3, 3, 3] + [2] * 12
    for step in grown:
        for seed in step[1:]:
            assert seed == pytest.approx(step[0], abs=1e-12)


def test_a_scheduler_that_waits_for_a_metric_is_refused() -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ValueError, match="waits for a metric") as refusal:
        GrowingOptimizer(optimizer, [schedules.ReduceLROnPlateau(optimizer)])
    assert "\n" not in str(refusal.value)


def test_the_host_trains_the_same_with_a_schedule_whether_or_not_a_seed_incubates() -> None:
    """Everything at once: OneCycleLR with its cycling momentum, a seed in its warm-up, and the host bit for bit."""
    hosts = []
    for grow in (False, True):
        learner = learner_for(WORLDS["conv2d"], rules=PATIENT)
        optimizer = AdamW(learner.model.host.parameters(), lr=0.01)
        schedule = schedules.OneCycleLR(optimizer, 0.02, 40)
        growing = GrowingOptimizer(optimizer, [schedule], warmup_updates=4)
        learner = Learner(learner.model, growing, learner.feed, cross_entropy, percent_correct)
        for epoch in range(4):
            run_epoch(learner, germinate(1, "conv") if grow and epoch == 1 else None)
        hosts.append(learner.model.host)
        if grow:
            learner.model.prune(learner.model.slots[1], epoch=4, at_once=True)
            learner.optimizer.drop(1)
    assert same(hosts[0].parameters(), hosts[1].parameters())
    assert same(hosts[0].buffers(), hosts[1].buffers())

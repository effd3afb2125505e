"""Hosts of different widths, sizes, kernels and pools as one stack, against the plain hosts.

Covers: R143
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch
from side_by_side import DEVICES, ON_CUDA, pack, scrambled
from torch import Tensor, nn
from torch.testing import assert_close

from esper.engine.stacked.composition import SeedStates
from esper.engine.stacked.hosts import MOMENTUM, Statistics
from esper.engine.stacked.passes import Leaves, StackedPass
from esper.engine.stacked.stack import Stack
from esper.tasks.data import Split, Splits
from esper.tasks.family import Draw
from esper.tasks.hosts import Conv1dHost, Conv2dHost
from esper.tasks.registry import Task
from esper.tasks.stacking import stack_draws
from esper.tasks.token_host import TokenHost

CLASSES, BATCH, EXAMPLES = 4, 8, 20
Host = tuple[partial[nn.Module], tuple[int, ...]]
"""How it is made, and the shape of its inputs."""


def token_hosts(time: list[int] | None) -> list[Host]:
    """Of vectors without `time`; else of sequences of that many steps."""
    t, f = True, False
    settings: list[tuple[int, list[int], list[bool], list[bool], list[int]]] = [
        (6, [5, 9, 7], [t, t, t], [f, f, f], [1, 1, 1]),
        (3, [12, 4, 4], [f, t, f], [t, f, f], [2, 1, 1]),
        (6, [8, 8, 16], [f, f, f], [f, t, t], [1, 3, 1]),
        (1, [1, 3, 2], [t, f, t], [t, t, t], [4, 1, 3]),
    ]
    hosts: list[Host] = []
    for i, (features, widths, bends, attends, pools) in enumerate(settings):
        if time is None:
            attends, pools = [f] * 3, [1] * 3
        make = partial(TokenHost, features, widths, CLASSES, bends, attends, pools)
        hosts.append((make, (features,) if time is None else (time[i], features)))
    return hosts


def conv_hosts(pooling: str, norm: bool, sizes: list[tuple[int, ...]]) -> list[Host]:
    """Pools that leave a remainder, kernels of three sizes, with and without a nonlinearity."""
    settings = [
        (2, [5, 9, 7], [1, 3, 1], [2, 1, 1], True),
        (1, [12, 4, 4], [5, 1, 3], [1, 2, 2], False),
        (3, [8, 8, 16], [3, 5, 1], [3, 1, 1], True),
        (2, [1, 3, 2], [1, 1, 1], [2, 2, 1], False),
    ]
    kind = Conv1dHost if len(sizes[0]) == 1 else Conv2dHost
    return [
        (partial(kind, channels, widths, kernels, CLASSES, pools, pooling, norm, bends), (channels, *size))
        for (channels, widths, kernels, pools, bends), size in zip(settings, sizes, strict=True)
    ]


SERIES: list[tuple[int, ...]] = [(11,), (16,), (10,), (4,)]
IMAGES: list[tuple[int, ...]] = [(7, 6), (5, 9), (9, 4), (4, 4)]
CASES: dict[str, list[Host]] = {
    "vectors": token_hosts(None),
    "sequences": token_hosts([7, 8, 6, 12]),
    **{
        f"{name}, {pooling}, {'norm' if norm else 'no norm'}": conv_hosts(pooling, norm, sizes)
        for name, sizes in (("series", SERIES), ("images", IMAGES))
        for pooling in ("average", "max")
        for norm in (True, False)
    },
}


def draw_of(number: int, host: Host) -> Draw:
    make, shape = host
    generator = torch.Generator().manual_seed(number)
    parts = [
        Split(torch.randn(EXAMPLES, *shape, generator=generator), torch.arange(EXAMPLES) % CLASSES) for _ in range(3)
    ]
    task = Task(
        name="by hand",
        description="",
        splits=Splits(*parts, check=False),
        make_host=make,
        slots=("stages.*",),
        labels=tuple("abcd"),
        batch_size=BATCH,
        updates_per_epoch=1,
        learning_rate=1e-2,
    )
    return Draw(task, 100 + number, 3, None, None, {})


def stack_of(hosts: list[Host], device: str) -> Stack:
    draws = [draw_of(number, host) for number, host in enumerate(hosts)]
    ((places, problems),) = stack_draws(range(len(hosts)), draws, device)
    assert places == list(range(len(hosts)))
    return Stack(problems, torch.float64)


def bare_pass(stack: Stack, rows: Sequence[int]) -> StackedPass:
    """Networks without seeds."""
    none = np.zeros((len(rows), stack.slots))
    states = SeedStates(none.astype(np.int64), none.astype(np.int64), none.astype(np.bool_), none)
    return stack.prepare(torch.tensor(rows, device=stack.device), states)


def inputs_of(stack: Stack) -> Tensor:
    """[N, *sizes, batch, features]: the first training examples."""
    return stack.problems.train_x[:, :BATCH].double().movedim(1, -2)


@pytest.mark.parametrize("case", CASES)
def test_first_weights_and_sizes_are_those_of_the_plain_hosts(case: str) -> None:
    stack = stack_of(CASES[case], "cpu")
    for row, (make, _) in enumerate(CASES[case]):
        torch.manual_seed(100 + row)
        plain = dict(make().named_parameters())
        found = stack.hosts.table.state_dict(stack.host.weights, row)
        assert {name for name, value in found.items() if value.numel()} == plain.keys()
        assert all(torch.equal(found[name], value.double()) for name, value in plain.items())
        assert int(stack.hosts.table.sizes[row]) == sum(value.numel() for value in plain.values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_outputs_gradients_and_statistics_are_those_of_the_plain_hosts(case: str, device: str) -> None:
    hosts = CASES[case]
    stack, tolerance = stack_of(hosts, device), {"rtol": 0.0, "atol": 1e-11 if device == "cpu" else ON_CUDA}
    table, run = stack.hosts.table, bare_pass(stack, range(len(stack)))
    plain = [scrambled(make(), row) for row, (make, _) in enumerate(hosts)]
    leaf = torch.zeros(len(hosts), table.width, dtype=torch.float64, device=device)
    for row, host in enumerate(plain):
        pack(table, row, dict(host.named_parameters()), leaf)
    leaf.requires_grad_()
    leaves = Leaves(leaf, ((),) * stack.slots, (None,) * stack.slots)
    out, seen = run(leaves, inputs_of(stack), None)
    wanted = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    (out * wanted.to(device)).sum().backward()
    assert leaf.grad is not None
    running = [Statistics(MOMENTUM * one.mean, 1.0 - MOMENTUM + MOMENTUM * one.variance) for one in seen]
    with torch.no_grad():
        judged, _ = run(leaves, inputs_of(stack), running)
    for row, host in enumerate(plain):
        x = draw_of(row, hosts[row]).task.splits.train.x[:BATCH].double()
        expected = host.train()(x)
        (expected * wanted[row]).sum().backward()
        assert_close(out[row].detach().cpu(), expected.detach(), **tolerance)
        gradients = table.state_dict(leaf.grad, row)
        for name, parameter in host.named_parameters():
            assert_close(gradients[name].cpu(), parameter.grad, **tolerance)
        norms = [module for module in host.modules() if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)]
        assert len(norms) == len(running)
        for norm, one in zip(norms, running, strict=True):
            width = norm.num_features
            assert_close(one.mean[row, :width].cpu(), norm.running_mean, **tolerance)
            assert_close(one.variance[row, :width].cpu(), norm.running_var, **tolerance)
        assert_close(judged[row].cpu(), host.eval()(x).detach(), **tolerance)


@pytest.mark.parametrize("device", DEVICES)
def test_some_rows_of_a_stack_give_what_they_give_among_all(device: str) -> None:
    """Networks whose episodes are over leave; the others keep the padding that was made for them."""
    for case in ("sequences", "series, average, norm", "images, max, no norm"):
        stack = stack_of(CASES[case], device)
        whole = stack.measure(bare_pass(stack, range(len(stack))))
        for row in range(len(stack)):
            alone = stack.measure(bare_pass(stack, [row]))
            assert_close(alone.loss, whole.loss[[row]], rtol=0.0, atol=1e-12)
            assert torch.equal(alone.accuracy, whole.accuracy[[row]])

"""Gradient statistics per parameter: right, in one transfer, on one device.

Covers: R108, R120, R134, R147, R153
"""

from __future__ import annotations

from math import isnan, nan

import pytest
import torch
from torch import nn

from esper.telemetry.gradients import GradientWatch, gradient_statistics, on_one_device


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def test_statistics_by_hand() -> None:
    """Gradients (3, 4), (0, 0), none and (NaN, 1): norms 5, 0, 0, NaN."""
    named = [(name, nn.Parameter(torch.zeros(2))) for name in ("a", "b", "c", "d")]
    named[0][1].grad = torch.tensor([3.0, -4.0])
    named[1][1].grad = torch.zeros(2)
    named[3][1].grad = torch.tensor([nan, 1.0])
    found = gradient_statistics(named, vanishing=1e-6, exploding=4.5)
    assert found.norms[:3] == (5.0, 0.0, 0.0)
    assert isnan(found.norms[3])
    assert isnan(found.largest)
    assert found.vanishing == ("b", "c")
    assert found.exploding == ("a", "d")
    metrics = found.metrics()
    assert metrics["gradient/a"] == 5.0
    assert (metrics["gradients_vanishing"], metrics["gradients_exploding"]) == (2.0, 2.0)


def test_against_a_loop() -> None:
    net = network()
    net(torch.randn(8, 3)).square().sum().backward()
    found = gradient_statistics(net.named_parameters(), 1e-6, 100.0)
    for name, norm, parameter in zip(found.names, found.norms, net.parameters(), strict=True):
        assert parameter.grad is not None
        assert norm == pytest.approx(float(parameter.grad.norm())), name
    assert found.largest == pytest.approx(
        max(float(p.grad.abs().max()) for p in net.parameters() if p.grad is not None)
    )


def test_one_transfer_however_many_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(20)))
    net(torch.randn(8, 3)).sum().backward()
    transfers = []
    original = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: transfers.append(1) or original(self))
    monkeypatch.setattr(torch.Tensor, "item", lambda self: pytest.fail("a second transfer"))
    gradient_statistics(net.named_parameters(), 1e-6, 100.0)
    assert len(transfers) == 1


def test_parameters_on_several_devices_are_refused() -> None:
    here, there = torch.zeros(2), torch.zeros(2, device="meta")
    with pytest.raises(ValueError, match=r"2 devices \(cpu, meta\)"):
        on_one_device([here, there])
    with pytest.raises(ValueError, match="each device's parameters on their own"):
        gradient_statistics([("a", nn.Parameter(here)), ("b", nn.Parameter(there))], 1e-6, 1.0)


def test_a_watch_averages_over_an_optimizers_steps_and_leaves_no_trace() -> None:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    reference = network()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    norms = []
    with GradientWatch(optimizer, net.named_parameters(), 1e-6, 100.0) as watch:
        assert watch.drain() is None
        for i in range(3):
            x = torch.randn(8, 3, generator=torch.Generator().manual_seed(i))
            for model, steps in ((net, optimizer), (reference, plain)):
                steps.zero_grad()
                model(x).square().sum().backward()
                steps.step()
            assert net[0].weight.grad is not None
            norms.append(float(net[0].weight.grad.norm()))
        found = watch.drain()
    assert found is not None
    assert found.norms[0] == pytest.approx(sum(norms) / 3)
    assert watch.drain() is None
    optimizer.step()
    assert watch.drain() is None  # not entered any more
    assert (
        all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), reference.state_dict().values(), strict=True))
        is False
    )
    plain.step()
    assert all(
        torch.equal(a, b) for a, b in zip(net.state_dict().values(), reference.state_dict().values(), strict=True)
    )

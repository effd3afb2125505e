"""The gradient of every parameter: right, in one transfer, on one device, and in the record of a run.

Covers: R108, R120, R134, R147, R153
"""

from __future__ import annotations

from math import isnan, nan

import pytest
import torch
from torch import nn

from esper.telemetry.alarms import EXPLODING, VANISHING, rules_with
from esper.telemetry.gradients import GradientWatch, one_device
from esper.telemetry.health import AnomalyDetector
from esper.training.train_config import TrainConfig


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def after_one_step(net: nn.Module, clip_norm: float = 1.0) -> dict[str, float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with GradientWatch(optimizer, net, clip_norm) as watch:
        optimizer.step()
    return watch.metrics()


def test_statistics_by_hand() -> None:
    """Gradients (3, 4), (0, 0), none and (NaN, 1): norms 5, 0, 0, NaN."""
    net = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in ("a", "b", "c", "d")})
    net["a"].grad = torch.tensor([3.0, -4.0])
    net["b"].grad = torch.zeros(2)
    net["d"].grad = torch.tensor([nan, 1.0])
    found = after_one_step(net, clip_norm=4.9 / EXPLODING)
    assert [found[f"gradient/{name}"] for name in "abc"] == [5.0, 0.0, 0.0]
    assert isnan(found["gradient/d"])
    assert isnan(found["gradient_largest"])
    assert (found["gradients_vanishing"], found["gradients_exploding"]) == (2.0, 2.0)  # b and c, a and d


def test_limits_follow_the_clip_norm() -> None:
    net = nn.ParameterDict({"a": nn.Parameter(torch.zeros(1))})
    net["a"].grad = torch.ones(1)
    for clip_norm, vanishing, exploding in ((0.9 / EXPLODING, 0, 1), (1.0, 0, 0), (1.1 / VANISHING, 1, 0)):
        found = after_one_step(net, clip_norm)
        assert (found["gradients_vanishing"], found["gradients_exploding"]) == (vanishing, exploding)


def test_limits_can_be_set() -> None:
    """A norm of 1 at a clip norm of 1 is neither by default, and each of them beyond a limit of one's own."""
    net = nn.ParameterDict({"a": nn.Parameter(torch.zeros(1))})
    net["a"].grad = torch.ones(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    for limits, vanishing, exploding in (((2.0, 3.0), 1, 0), ((0.1, 0.5), 0, 1)):
        with GradientWatch(optimizer, net, 1.0, limits=limits) as watch:
            optimizer.step()
        found = watch.metrics()
        assert (found["gradients_vanishing"], found["gradients_exploding"]) == (vanishing, exploding)
        alarms = AnomalyDetector(1.0, rules_with(limits)).check_all({"gradient_norm": 1.0, "update": 1}, 0.5)
        assert [alarm.name for alarm in alarms] == ["gradient_exploding"] * exploding
        assert TrainConfig(vanishing_gradient=limits[0], exploding_gradient=limits[1]).gradient_limits == limits
    for low, high in ((-1.0, 2.0), (2.0, 2.0), (nan, 1.0), (0.1, nan)):
        with pytest.raises(ValueError, match="_gradient must be"):
            TrainConfig(vanishing_gradient=low, exploding_gradient=high)


def test_against_a_loop() -> None:
    net = network()
    net(torch.randn(8, 3)).square().sum().backward()
    found = after_one_step(net)
    gradients = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    for name, gradient in gradients.items():
        assert found[f"gradient/{name}"] == pytest.approx(float(gradient.norm())), name
    assert found["gradient_largest"] == pytest.approx(max(float(g.abs().max()) for g in gradients.values()))


def test_one_transfer_however_many_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(20)))
    net(torch.randn(8, 3)).sum().backward()
    transfers = []
    original = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: transfers.append(1) or original(self))
    monkeypatch.setattr(torch.Tensor, "item", lambda self: pytest.fail("a second transfer"))
    assert len(after_one_step(net)) == 40 + 3
    assert len(transfers) == 1


def test_parameters_on_several_devices_are_refused() -> None:
    here, there = torch.zeros(2), torch.zeros(2, device="meta")
    with pytest.raises(ValueError, match=r"several devices \(cpu, meta\)"):
        one_device([here, there])
    with pytest.raises(ValueError, match="one agent lives on one"):
        after_one_step(nn.ParameterDict({"a": nn.Parameter(here), "b": nn.Parameter(there)}))


def test_a_watch_averages_over_an_optimizers_steps_and_leaves_no_trace() -> None:
    net, reference = network(), network()
    optimizer, plain = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (net, reference))
    norms = []
    with GradientWatch(optimizer, net, 1.0) as watch:
        assert watch.metrics() == {}
        for i in range(3):
            x = torch.randn(8, 3, generator=torch.Generator().manual_seed(i))
            for model, steps in ((net, optimizer), (reference, plain)):
                steps.zero_grad()
                model(x).square().sum().backward()
                steps.step()
            assert net[0].weight.grad is not None
            norms.append(float(net[0].weight.grad.norm()))
    assert watch.metrics()["gradient/0.weight"] == pytest.approx(sum(norms) / 3)
    assert watch.metrics() == {}
    optimizer.step()
    assert watch.metrics() == {}  # not entered any more
    plain.step()
    assert all(
        torch.equal(a, b) for a, b in zip(net.state_dict().values(), reference.state_dict().values(), strict=True)
    )


def test_a_watch_that_is_not_enabled_measures_nothing() -> None:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.randn(8, 3)).sum().backward()
    with GradientWatch(optimizer, net, 1.0, enabled=False) as watch:
        optimizer.step()
    assert watch.metrics() == {}

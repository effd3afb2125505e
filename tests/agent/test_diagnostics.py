"""Health measures with known answers, including broken inputs.

Covers: R019, R026, R062, R065, R133, R134, R150, R152
"""

from math import log, nan

import pytest
import torch
from torch import nn

from esper.agent.diagnostics import MOST_EXAMPLES, NumericalStabilityReport, RatioExplosionDiagnostic
from esper.agent.metrics import explained_variance, measure_state
from esper.policy.network import RecurrentState
from esper.telemetry.alarms import RATIO_HIGH, RATIO_LOW
from esper.telemetry.health import AnomalyDetector


def batch(rows: int = 2, steps: int = 3):
    return torch.zeros(rows, steps, 4), torch.ones(rows, steps, 4, dtype=torch.bool), torch.zeros(rows, steps, 4).long()


def test_sane_ratios_need_no_diagnostic():
    log_ratio, relevant, action = batch()
    log_ratio[0, 0, 0], log_ratio[0, 0, 1] = log(0.98 * RATIO_HIGH), log(1.1 * RATIO_LOW)
    assert RatioExplosionDiagnostic.from_batch(log_ratio, relevant, action) is None


def test_the_worst_head_is_named_with_its_step_and_decision():
    log_ratio, relevant, action = batch()
    log_ratio[0, 2, 3] = log(6.0)
    log_ratio[1, 1, 1] = log(0.02)  # further from 1, as a factor
    log_ratio[1, 0, 0] = log(100.0)
    relevant[1, 0, 0] = False  # took no effect
    action[1, 1] = torch.tensor([2, 5, 0, 1])
    found = RatioExplosionDiagnostic.from_batch(log_ratio, relevant, action, rows=torch.tensor([7, 9]))
    assert found is not None
    assert (found.worst_head, found.count) == ("blueprint", 2)
    assert found.worst_ratio == pytest.approx(0.02)
    assert (found.rows, found.steps, found.heads) == ((9, 7), (1, 2), ("blueprint", "op"))
    assert found.actions[0] == (2, 5, 0, 1)
    assert found.ratios == pytest.approx((0.02, 6.0))
    assert found.largest_log_gap == pytest.approx(log(50.0))
    event = found.event(update=3)
    assert (event.kind, event.update, event.data["worst_head"], event.data["rows"]) == (
        "ratio_explosion",
        3,
        "blueprint",
        (9, 7),
    )
    assert "head blueprint in row 9 at step 1" in event.message
    assert "(2, 5, 0, 1)" in event.message


def test_a_nan_ratio_is_an_explosion_and_examples_are_bounded():
    log_ratio, relevant, action = batch(50, 10)
    log_ratio[3, 3, 3] = nan
    log_ratio[4:] = 3.0
    found = RatioExplosionDiagnostic.from_batch(log_ratio, relevant, action)
    assert found is not None
    assert len(found.rows) == MOST_EXAMPLES
    assert found.count == 46 * 10 * 4 + 1
    assert (found.rows[0], found.worst_head) == (3, "op")


def lstm_alarms(state: RecurrentState) -> set[str]:
    metrics = {name: number.item() for name, number in measure_state(state).items()}
    detector = AnomalyDetector(clip_norm=0.5)
    return {anomaly.name for _ in range(3) for anomaly in detector.check_all(metrics, 0.5)}


def test_lstm_health():
    assert measure_state(None) == {}
    assert measure_state(RecurrentState(torch.zeros(0, 3, 8), torch.zeros(0, 3, 8))) == {}
    fine = RecurrentState(torch.full((1, 2, 4), 0.5), torch.full((1, 2, 4), -2.0))
    assert [number.item() for number in measure_state(fine).values()] == [0.5, 2.0, 2.0, 1.0]
    assert lstm_alarms(fine) == set()
    broken = RecurrentState(torch.full((1, 2, 4), nan), torch.zeros(1, 2, 4))
    assert measure_state(broken)["lstm/finite"].item() == 0.0
    assert lstm_alarms(broken) == {"non_finite", "lstm_not_finite"}
    assert lstm_alarms(RecurrentState(torch.full((1, 2, 4), 50.0), torch.ones(1, 2, 4))) == {"lstm_saturated"}


def test_numerical_stability_report_names_the_parameter():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with torch.no_grad():
        net[0].weight.fill_(1.0)
    net(torch.ones(1, 2)).sum().backward()
    report = NumericalStabilityReport.of(net, torch.tensor(1.0))
    assert (report.bad_weights, report.bad_gradients, report.loss_finite) == ((), (), True)
    norm = torch.cat([p.grad.flatten() for p in net.parameters()]).norm().item()
    assert report.gradient_norm == pytest.approx(norm, rel=1e-5)
    with torch.no_grad():
        net[1].bias.fill_(nan)
        net[0].weight.grad[0, 0] = torch.inf
    report = NumericalStabilityReport.of(net, torch.tensor(nan))
    assert report.bad_weights == ("1.bias",)
    assert report.bad_gradients == ("0.weight",)
    assert not report.loss_finite
    event = report.event(update=3)
    assert (event.kind, event.severity, event.data["bad_weights"]) == ("skipped_steps", "error", ("1.bias",))
    assert "gradient of 0.weight; weights of 1.bias; the loss" in event.message


def test_explained_variance_by_hand():
    returns, valid = torch.tensor([[1.0, 2.0, 3.0, 99.0]]), torch.tensor([[True, True, True, False]])
    assert explained_variance(returns, returns.clone(), valid).item() == 1.0
    assert explained_variance(returns, torch.zeros(1, 4), valid).item() == 0.0
    assert explained_variance(returns, -returns, valid).item() == pytest.approx(-3.0)  # Var(2x) = 4·Var(x)
    assert explained_variance(torch.ones(1, 4), torch.zeros(1, 4), valid).item() == 0.0

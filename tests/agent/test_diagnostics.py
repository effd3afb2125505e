"""Health measures with known answers, including broken inputs.

Covers: R019, R026, R062, R065, R120, R131, R133, R134, R150, R151, R152, R153
"""

from math import log, nan

import pytest
import torch
from torch import nn

from esper.agent.diagnostics import (
    EXAMPLES,
    GRADIENT_DRIFT,
    GradientDrift,
    GradientLimits,
    LSTMHealth,
    NumericalStabilityReport,
    RatioExplosionDiagnostic,
    explained_variance,
    one_device,
)
from esper.policy.network import RecurrentState


def batch(rows: int = 2, steps: int = 3):
    return torch.zeros(rows, steps, 4), torch.ones(rows, steps, 4, dtype=torch.bool), torch.zeros(rows, steps, 4).long()


def test_sane_ratios_need_no_diagnostic():
    log_ratio, relevant, action = batch()
    log_ratio[0, 0, 0], log_ratio[0, 0, 1] = log(4.9), log(0.11)
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


def test_a_nan_ratio_is_an_explosion_and_examples_are_bounded():
    log_ratio, relevant, action = batch(50, 10)
    log_ratio[3, 3, 3] = nan
    log_ratio[4:] = 3.0
    found = RatioExplosionDiagnostic.from_batch(log_ratio, relevant, action)
    assert found is not None
    assert len(found.rows) == EXAMPLES
    assert found.count == 46 * 10 * 4 + 1
    assert (found.rows[0], found.worst_head) == (3, "op")


def test_lstm_health():
    assert LSTMHealth.of(None) is None
    assert LSTMHealth.of(RecurrentState(torch.zeros(0, 3, 8), torch.zeros(0, 3, 8))) is None
    fine = LSTMHealth.of(RecurrentState(torch.full((1, 2, 4), 0.5), torch.full((1, 2, 4), -2.0)))
    assert fine is not None
    assert (fine.hidden_rms, fine.cell_rms, fine.largest, fine.healthy) == (0.5, 2.0, 2.0, True)
    broken = RecurrentState(torch.full((1, 2, 4), nan), torch.zeros(1, 2, 4))
    health = LSTMHealth.of(broken)
    assert health is not None
    assert not health.finite
    assert not health.healthy
    assert not LSTMHealth.of(RecurrentState(torch.full((1, 2, 4), 50.0), torch.ones(1, 2, 4))).healthy


def test_numerical_stability_report_names_the_parameter():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with torch.no_grad():
        net[0].weight.fill_(1.0)
    net(torch.ones(1, 2)).sum().backward()
    report = NumericalStabilityReport.of(net, torch.tensor(1.0))
    assert report.stable
    norm = torch.cat([p.grad.flatten() for p in net.parameters()]).norm().item()
    assert report.gradient_norm == pytest.approx(norm, rel=1e-5)
    with torch.no_grad():
        net[1].bias.fill_(nan)
        net[0].weight.grad[0, 0] = torch.inf
    report = NumericalStabilityReport.of(net, torch.tensor(nan))
    assert report.bad_weights == ("1.bias",)
    assert report.bad_gradients == ("0.weight",)
    assert not report.loss_finite
    assert not report.stable


def test_gradient_drift_by_hand():
    drift = GradientDrift(momentum=0.9)
    assert drift.update(1.0) == 0.0
    assert drift.update(2.0) == pytest.approx(1.0, abs=1e-6)  # twice the average
    assert drift.average == pytest.approx(1.1)
    assert drift.update(1.1) == pytest.approx(0.0, abs=1e-6)
    assert drift.update(2.0) > GRADIENT_DRIFT
    assert drift.update(drift.average / 4) == pytest.approx(-0.75, abs=1e-6)
    with pytest.raises(ValueError, match="not finite"):
        drift.update(nan)
    with pytest.raises(ValueError, match="momentum"):
        GradientDrift(1.0)


def test_gradient_limits_follow_the_clip_norm():
    limits = GradientLimits.from_clip(0.5)
    assert GradientLimits.from_clip(5.0).exploding == 10 * limits.exploding
    assert [limits.judge(x) for x in (1e-9, 1.0, 1e3, nan)] == ["vanishing", "healthy", "exploding", "exploding"]
    assert GradientLimits.from_clip(0.5, exploding_factor=2.0).judge(1.5) == "exploding"


def test_parameters_on_several_devices_are_refused():
    with pytest.raises(ValueError, match="several devices"):
        one_device([torch.zeros(1), torch.zeros(1, device="meta")])


def test_explained_variance_by_hand():
    returns, valid = torch.tensor([[1.0, 2.0, 3.0, 99.0]]), torch.tensor([[True, True, True, False]])
    assert explained_variance(returns, returns.clone(), valid).item() == 1.0
    assert explained_variance(returns, torch.zeros(1, 4), valid).item() == 0.0
    assert explained_variance(returns, -returns, valid).item() == pytest.approx(-3.0)  # Var(2x) = 4·Var(x)
    assert explained_variance(torch.ones(1, 4), torch.zeros(1, 4), valid).item() == 0.0

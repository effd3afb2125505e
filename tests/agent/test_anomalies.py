"""Anomalies: each is found from the metrics that show it, and a healthy update has none.

Covers: R065, R110, R111, R131, R145, R151
"""

from dataclasses import replace
from math import nan

import pytest
from toy_environments import OpConditional, make_agent, rollout

from esper.agent.anomalies import AnomalyDetector
from esper.agent.config import PPOConfig
from esper.agent.diagnostics import LSTMHealth
from esper.agent.metrics import UpdateMetrics


@pytest.fixture(scope="module")
def healthy() -> UpdateMetrics:
    env = OpConditional(4)
    agent = make_agent(env, PPOConfig(), 10)
    rollout(env, agent, env.reset())
    return replace(agent.update(), explained_variance=0.5, gradient_norm=0.3)


def head(metrics: UpdateMetrics, name: str, **changes: float) -> UpdateMetrics:
    return replace(metrics, heads={**metrics.heads, name: replace(metrics.heads[name], **changes)})


def test_a_healthy_update_has_none(healthy):
    assert AnomalyDetector(0.5).check_all(healthy, 0.5) == []


@pytest.mark.parametrize(
    ("kind", "severe", "change"),
    [
        ("not_finite", True, lambda m: replace(m, policy_loss=nan)),
        ("skipped", True, lambda m: replace(m, skipped=2)),
        ("ratio_explosion", True, lambda m: replace(head(m, "blueprint", ratio_max=9.0), ratio_max=9.0)),
        ("ratio_explosion", True, lambda m: replace(head(m, "blend", ratio_min=0.01), ratio_min=0.01)),
        ("entropy_collapse", True, lambda m: head(m, "slot", entropy=0.05, live_fraction=0.1)),
        ("entropy_low", False, lambda m: head(m, "slot", entropy=0.2, live_fraction=0.1)),
        ("kl_spike", False, lambda m: replace(m, kl_max=0.2)),
        ("kl_spike", True, lambda m: replace(m, kl_max=0.6)),
        ("kl_stalled", True, lambda m: replace(m, kl_max=1e-9)),
        ("value_collapse", False, lambda m: replace(m, explained_variance=-0.3)),
        ("gradient_vanishing", True, lambda m: replace(m, gradient_norm=1e-9)),
        ("gradient_exploding", True, lambda m: replace(m, gradient_norm=1e4)),
        ("lstm", True, lambda m: replace(m, lstm=LSTMHealth(nan, 1.0, nan, False))),
    ],
)
def test_each_is_found(healthy, kind, severe, change):
    found = {a.kind: a for a in AnomalyDetector(0.5).check_all(change(healthy), 0.5)}
    assert kind in found
    assert found[kind].severe == severe


def test_the_worst_head_is_named(healthy):
    broken = replace(head(head(healthy, "op", ratio_max=6.0), "blend", ratio_min=0.01), ratio_max=6.0, ratio_min=0.01)
    (anomaly,) = AnomalyDetector(0.5).check_ratios(broken)
    assert "worst head blend" in anomaly.message


def test_drift_and_phases(healthy):
    detector = AnomalyDetector(0.5)
    assert detector.check_gradient(healthy) == []
    assert [a.kind for a in detector.check_gradient(replace(healthy, gradient_norm=0.9))] == ["gradient_drift"]
    early = replace(healthy, explained_variance=-0.3)
    assert detector.check_value(early, 0.05) == []
    assert len(detector.check_value(early, 0.2)) == 1
    assert len(detector.check_value(replace(healthy, explained_variance=0.05), 0.9)) == 1


def test_a_head_that_was_never_used_is_not_collapsed(healthy):
    assert AnomalyDetector(0.5).check_entropy(head(healthy, "blend", entropy=0.0, live_fraction=0.0)) == []

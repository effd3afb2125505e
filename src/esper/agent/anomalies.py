"""What is wrong with an update, if anything: every check on every metric, in one call.

A check looks in both directions where both are bad. The caller decides what an anomaly leads to; `severe` ones ask for
a closer look (per-layer gradients, stability report).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from esper.agent.diagnostics import (
    ENTROPY_COLLAPSED,
    ENTROPY_LOW,
    GRADIENT_DRIFT,
    KL_EXTREME,
    KL_SPIKE,
    KL_STALLED,
    RATIO_HIGH,
    RATIO_LOW,
    GradientDrift,
    GradientLimits,
)
from esper.agent.metrics import UpdateMetrics

VALUE_COLLAPSE = ((0.10, -0.5), (0.25, -0.2), (0.75, 0.0), (1.00, 0.1))
"""Explained variance below the second number is a collapse until the first share of training is over."""


@dataclass(frozen=True, slots=True)
class Anomaly:
    """One finding."""

    kind: str
    message: str
    severe: bool = False


class AnomalyDetector:
    """Keeps the moving averages that some checks need; one per run."""

    def __init__(self, max_grad_norm: float, limits: GradientLimits | None = None) -> None:
        self.limits = limits or GradientLimits.from_clip(max_grad_norm)
        self.drift = GradientDrift()

    def check_all(self, metrics: UpdateMetrics, progress: float) -> list[Anomaly]:
        """`progress` is the share of training that is over, in [0, 1]."""
        return [
            *self.check_numbers(metrics),
            *self.check_ratios(metrics),
            *self.check_entropy(metrics),
            *self.check_kl(metrics),
            *self.check_value(metrics, progress),
            *self.check_gradient(metrics),
            *self.check_memory(metrics),
        ]

    def check_numbers(self, metrics: UpdateMetrics) -> list[Anomaly]:
        bad = [name for name, value in metrics.flat().items() if not isfinite(value)]
        found = [Anomaly("not_finite", f"not finite: {', '.join(bad)}", severe=True)] if bad else []
        if metrics.skipped:
            message = (
                f"{metrics.skipped} of {metrics.minibatches} minibatches were skipped: loss or gradient not finite"
            )
            found.append(Anomaly("skipped", message, severe=True))
        return found

    def check_ratios(self, metrics: UpdateMetrics) -> list[Anomaly]:
        if metrics.ratio_max <= RATIO_HIGH and metrics.ratio_min >= RATIO_LOW:
            return []
        head = metrics.heads[metrics.worst_head]
        message = f"worst head {metrics.worst_head}: ratios from {head.ratio_min:.3g} to {head.ratio_max:.3g}"
        return [Anomaly("ratio_explosion", message, severe=True)]

    def check_entropy(self, metrics: UpdateMetrics) -> list[Anomaly]:
        found = []
        for name, head in metrics.heads.items():
            if head.live_fraction == 0.0 or head.entropy >= ENTROPY_LOW:
                continue
            collapsed = head.entropy < ENTROPY_COLLAPSED
            kind = "entropy_collapse" if collapsed else "entropy_low"
            found.append(Anomaly(kind, f"{name}: {head.entropy:.3f} of 1 where it is live", severe=collapsed))
        return found

    def check_kl(self, metrics: UpdateMetrics) -> list[Anomaly]:
        if metrics.kl_max > KL_SPIKE:
            extreme = metrics.kl_max > KL_EXTREME
            return [Anomaly("kl_spike", f"KL {metrics.kl_max:.3g} in one minibatch", severe=extreme)]
        if metrics.optimizer_steps > 1 and metrics.kl_max < KL_STALLED:
            return [Anomaly("kl_stalled", f"KL {metrics.kl_max:.1e}: the policy does not move", severe=True)]
        return []

    def check_value(self, metrics: UpdateMetrics, progress: float) -> list[Anomaly]:
        least = next((limit for until, limit in VALUE_COLLAPSE if progress <= until), VALUE_COLLAPSE[-1][1])
        if metrics.explained_variance >= least:
            return []
        return [Anomaly("value_collapse", f"explained variance {metrics.explained_variance:.2f}, expected {least}")]

    def check_gradient(self, metrics: UpdateMetrics) -> list[Anomaly]:
        verdict = self.limits.judge(metrics.gradient_norm)
        found = []
        if verdict != "healthy":
            found.append(
                Anomaly(f"gradient_{verdict}", f"norm {metrics.gradient_norm:.3g} before clipping", severe=True)
            )
        if isfinite(metrics.gradient_norm):
            drift = self.drift.update(metrics.gradient_norm)
            if drift > GRADIENT_DRIFT:
                found.append(Anomaly("gradient_drift", f"norm {drift:.0%} away from its average"))
        return found

    def check_memory(self, metrics: UpdateMetrics) -> list[Anomaly]:
        if metrics.lstm is None or metrics.lstm.healthy:
            return []
        state = metrics.lstm
        message = f"LSTM rms {state.hidden_rms:.3g} hidden, {state.cell_rms:.3g} cell, finite: {state.finite}"
        return [Anomaly("lstm", message, severe=not state.finite)]

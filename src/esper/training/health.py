"""The anomaly detector of a run: its limits are the agent's own numbers, which have one source each."""

from __future__ import annotations

from esper.agent import diagnostics
from esper.telemetry.anomalies import AnomalyDetector
from esper.telemetry.escalation import HealthMonitor
from esper.telemetry.readings import Limits
from esper.telemetry.recorder import Recorder
from esper.training.train_config import TrainConfig

DRIFT_MEMORY = 0.9
"""Of the average gradient norm. Norms halve within a dozen healthy updates; a longer memory would call that drift."""


def health_monitor(recorder: Recorder, config: TrainConfig) -> HealthMonitor:
    gradient = diagnostics.GradientLimits.from_clip(config.ppo.max_grad_norm)
    limits = Limits(
        ratio_high=diagnostics.RATIO_HIGH,
        ratio_low=diagnostics.RATIO_LOW,
        entropy_low=diagnostics.ENTROPY_LOW,
        entropy_collapsed=diagnostics.ENTROPY_COLLAPSED,
        kl_spike=diagnostics.KL_SPIKE,
        kl_extreme=diagnostics.KL_EXTREME,
        kl_stalled=diagnostics.KL_STALLED,
        gradient_vanishing=gradient.vanishing,
        gradient_exploding=gradient.exploding,
        gradient_drift=diagnostics.GRADIENT_DRIFT,
        lstm_low=diagnostics.LSTM_RMS_LOW,
        lstm_high=diagnostics.LSTM_RMS_HIGH,
    )
    return HealthMonitor(recorder, AnomalyDetector(limits, diagnostics.GradientDrift(momentum=DRIFT_MEMORY)))

"""Detailed telemetry for a few updates after an anomaly, then back. `HealthMonitor` is what a training loop calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from esper.telemetry.anomalies import Anomaly, AnomalyDetector
from esper.telemetry.recorder import Recorder
from esper.telemetry.records import Event, Level


class Escalation:
    """Decides the level of the next update."""

    def __init__(self, base: Level = Level.NORMAL, updates: int = 5) -> None:
        """An anomaly makes the next `updates` updates detailed; 0 never escalates."""
        if updates < 0:
            raise ValueError(f"updates must be at least 0, not {updates}")
        self.base = base
        self.updates = updates
        self.remaining = 0
        """Detailed updates still to come."""

    @property
    def level(self) -> Level:
        return Level.DETAILED if self.remaining > 0 else self.base

    def after_update(self, anomaly: bool) -> Level:
        """An update is over; the level for the next one. A new anomaly starts the count afresh."""
        self.remaining = self.updates if anomaly else max(0, self.remaining - 1)
        return self.level


class HealthMonitor:
    """Watches updates: anomalies become events, and raise the recorder's level for a while."""

    def __init__(self, recorder: Recorder, detector: AnomalyDetector, escalation: Escalation | None = None) -> None:
        self.recorder = recorder
        self.detector = detector
        self.escalation = escalation or Escalation(recorder.level)
        recorder.level = self.escalation.level

    def after_update(self, update: int, metrics: Mapping[str, float], phase: float) -> list[Anomaly]:
        """Judge one update; `phase` is the share of the run that is done. Gives what is newly wrong."""
        anomalies = self.detector.check_all({**metrics, "update": update}, phase)
        for anomaly in anomalies:
            self.recorder.event(anomaly.event())
        before, level = self.recorder.level, self.escalation.after_update(bool(anomalies))
        if level is not before:
            self.recorder.level = level
            why = f"after {anomalies[0].name}, {self.escalation.updates} updates" if anomalies else "the count is over"
            self.recorder.event(Event("telemetry", update, f"level {level.name.lower()} from now on: {why}"))
        return anomalies

    def state(self) -> dict[str, Any]:
        """For the checkpoint, as JSON: a resumed run then reports what an uninterrupted one would."""
        return {"detector": self.detector.state(), "detailed_updates": self.escalation.remaining}

    def load(self, state: Mapping[str, Any]) -> None:
        self.detector.load(state["detector"])
        self.escalation.remaining = int(state["detailed_updates"])
        self.recorder.level = self.escalation.level

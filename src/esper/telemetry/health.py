"""Watching a run: the alarm rules applied to every update, what they need from earlier updates, and escalation.

An anomaly is reported when its rule has held for `AlarmRule.updates` updates in a row, then not again until it has been
clearly over for RECOVERY updates, or as a reminder after REMINDER. `HealthMonitor` is what a training loop calls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import fmean, variance
from typing import Any

from esper.actions import HEAD_NAMES
from esper.telemetry.alarms import ALARM_RULES, AlarmRule, CheckedUpdate, Reading, RunPhase
from esper.telemetry.recorder import RunRecorder
from esper.telemetry.records import Event, Level, Severity

RECOVERY = 3
"""Clear updates in a row after which an anomaly is over."""
REMINDER = 25
"""Updates after which an anomaly that lasts is reported again."""
DRIFT_MOMENTUM = 0.9
"""Of the average gradient norm. Norms halve within a dozen healthy updates; a longer memory would call that drift."""
RETURN_DROP = 4.0
"""Spreads (mean absolute deviations) that the level of returns must fall below its best."""
RETURN_LEAST_DROP = 0.05
"""And at least this share of the best: returns that hardly vary have no spread to speak of."""
RETURN_MEMORY, RETURN_WINDOW = 0.8, 20
RETURN_WARM_UP = 5
"""Updates before a level of returns means anything."""
OBJECTIVE = ("episode/score", "return_mean")
"""The objective of a run: the first of these that is there. The score before the return, which can be gamed."""
IMPROVEMENT_WINDOW = 5
"""Updates at the beginning and at the end of a run so far whose objectives are compared."""
IMPROVEMENT_ERRORS = 2.0
"""Standard errors that the difference must have."""


class GradientDrift:
    """How far a gradient norm is above its moving average, relative to that average; negative below it."""

    def __init__(self) -> None:
        self.average: float | None = None

    def update(self, norm: float) -> float:
        """The drift of `norm` against the average so far (0 for the first), then take it in."""
        if not math.isfinite(norm):
            raise ValueError(f"gradient norm {norm} is not finite: report it as instability, not as drift")
        if self.average is None:
            self.average = norm
        drift = (norm - self.average) / (self.average + 1e-8)
        self.average = DRIFT_MOMENTUM * self.average + (1.0 - DRIFT_MOMENTUM) * norm
        return drift


@dataclass(slots=True)
class Improvement:
    """Whether the objective is clearly better than in the first updates of the run."""

    first: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)

    def note(self, metrics: Mapping[str, float]) -> None:
        seen = next((metrics[name] for name in OBJECTIVE if name in metrics), math.nan)
        if not math.isfinite(seen):
            return
        if len(self.first) < IMPROVEMENT_WINDOW:
            self.first.append(seen)
        else:
            self.last = [*self.last, seen][-IMPROVEMENT_WINDOW:]

    @property
    def shown(self) -> bool:
        if len(self.last) < IMPROVEMENT_WINDOW:
            return False
        error = math.sqrt((variance(self.first) + variance(self.last)) / IMPROVEMENT_WINDOW)
        return fmean(self.last) - fmean(self.first) > IMPROVEMENT_ERRORS * error


@dataclass(slots=True)
class ReturnLevel:
    """The level of returns (a moving average) against the best level so far, in units of their usual spread."""

    level: float | None = None
    spread: float = 0.0
    """Mean absolute deviation from the level, over the last updates that were not a fall."""
    best: float | None = None
    count: int = 0

    def read(self, metrics: Mapping[str, float]) -> Reading | None:
        seen = metrics.get("return_mean", math.nan)
        if not math.isfinite(seen):
            return None
        self.count += 1
        before = seen if self.level is None else self.level
        self.level = before + (1.0 - RETURN_MEMORY) * (seen - before)
        # A fall must not widen what is allowed to it.
        if self.best is None or seen >= self._limit(self.best):
            self.spread += (abs(seen - before) - self.spread) / min(self.count, RETURN_WINDOW)
        if self.count <= RETURN_WARM_UP:
            return None
        best, self.best = self.best, self.level if self.best is None else max(self.best, self.level)
        if best is None:
            return None
        limit = self._limit(best)
        return Reading("return_mean", self.level, limit, self.level < limit, self.level >= (limit + best) / 2.0)

    def _limit(self, best: float) -> float:
        return best - max(RETURN_DROP * self.spread, RETURN_LEAST_DROP * abs(best))


@dataclass(slots=True)
class _Track:
    """The state of one rule for one metric."""

    streak: int = 0
    clear: int = 0
    active: bool = False
    since: int = 0

    def note(self, reading: Reading, patience: int) -> bool:
        """Whether to report it now."""
        self.streak = self.streak + 1 if reading.bad else 0
        self.clear = self.clear + 1 if reading.clear else 0
        self.since += 1
        if self.active and self.clear >= RECOVERY:
            self.active = False
        due = reading.bad and (self.since >= REMINDER if self.active else self.streak >= patience)
        if due:
            self.active, self.since = True, 0
        return due


@dataclass(frozen=True, slots=True)
class Anomaly:
    """Something wrong, once."""

    name: str
    metric: str
    seen: float
    limit: float
    update: int
    severity: Severity
    message: str
    """What was seen, the limit, what it usually means, and what to try."""

    def event(self) -> Event:
        data = {"name": self.name, "metric": self.metric, "seen": self.seen, "limit": self.limit}
        return Event("anomaly", self.update, self.message, self.severity, data=data)


class AnomalyDetector:
    """Judges updates one after another."""

    def __init__(self, clip_norm: float, rules: Mapping[str, AlarmRule] = ALARM_RULES) -> None:
        self.clip_norm = clip_norm
        self.rules = rules
        self._drift = GradientDrift()
        self._returns = ReturnLevel()
        self._improvement = Improvement()
        self._had_choice: set[str] = set()
        self._tracks: dict[str, _Track] = {}
        self._update = 0

    def check_all(self, metrics: Mapping[str, float], progress: float) -> list[Anomaly]:
        """What is newly wrong with this update; `progress` is the share of the run that is done, in [0, 1]."""
        self._update = int(metrics.get("update", self._update + 1))
        update = self._checked(metrics, RunPhase.of(progress))
        found = []
        for name, rule in self.rules.items():
            for reading in rule.readings(update):
                # All NaNs are one fault, whichever metrics show it this time.
                key = name if name == "non_finite" else f"{name} {reading.metric}"
                if self._tracks.setdefault(key, _Track()).note(reading, rule.updates):
                    found.append(self._explain(name, rule, reading))
        return found

    def _checked(self, metrics: Mapping[str, float], phase: RunPhase) -> CheckedUpdate:
        self._improvement.note(metrics)
        self._had_choice |= {head for head in HEAD_NAMES if metrics.get(f"{head}/entropy", 0.0) > 0.0}
        norm = metrics.get("gradient_norm", math.nan)
        drift = self._drift.update(norm) if math.isfinite(norm) else math.nan
        improved, returns = self._improvement.shown, self._returns.read(metrics)
        return CheckedUpdate(metrics, phase, self.clip_norm, improved, self._had_choice, drift, returns)

    def _explain(self, name: str, rule: AlarmRule, reading: Reading) -> Anomaly:
        lasting = f" for {rule.updates} updates" if rule.updates > 1 else ""
        limit = f"limit {reading.limit:.3g}" if math.isfinite(reading.limit) else "not a finite number"
        message = (
            f"{name}: {reading.metric} is {reading.seen:.3g}{lasting} ({limit}). Usually {rule.meaning}. "
            f"Try: {rule.remedy}."
        )
        return Anomaly(name, reading.metric, reading.seen, reading.limit, self._update, rule.severity, message)

    def state(self) -> dict[str, object]:
        """All that decides what is reported later, for JSON."""
        return {
            "update": self._update,
            "drift": self._drift.average,
            "returns": asdict(self._returns),
            "improvement": asdict(self._improvement),
            "seen_alive": sorted(self._had_choice),
            "tracks": {key: asdict(track) for key, track in self._tracks.items()},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken."""
        self._update = int(state["update"])
        self._drift.average = state["drift"]
        self._returns = ReturnLevel(**state["returns"])
        self._improvement = Improvement(**state.get("improvement", {}))  # not in checkpoints before it was judged
        self._had_choice = set(state["seen_alive"])
        self._tracks = {key: _Track(**track) for key, track in state["tracks"].items()}


class HealthMonitor:
    """Watches the updates of a run: anomalies become events, and make the next updates' telemetry detailed."""

    def __init__(self, recorder: RunRecorder, detector: AnomalyDetector, detailed_updates: int = 5) -> None:
        """An anomaly makes the next `detailed_updates` updates detailed; 0 never does."""
        if detailed_updates < 0:
            raise ValueError(f"detailed_updates must be at least 0, not {detailed_updates}")
        self.recorder = recorder
        self.detector = detector
        self.detailed_updates = detailed_updates
        self._base = recorder.level
        self._remaining = 0
        """Detailed updates still to come."""

    def after_update(self, update: int, metrics: Mapping[str, float], progress: float) -> list[Anomaly]:
        """Judge one update; `progress` is the share of the run that is done. Gives what is newly wrong."""
        anomalies = self.detector.check_all({**metrics, "update": update}, progress)
        for anomaly in anomalies:
            self.recorder.event(anomaly.event())
        before = self.recorder.level
        self._remain(self.detailed_updates if anomalies else max(0, self._remaining - 1))
        if (level := self.recorder.level) is not before:
            why = f"after {anomalies[0].name}, {self.detailed_updates} updates" if anomalies else "the count is over"
            self.recorder.event(Event("telemetry", update, f"level {level.name.lower()} from now on: {why}"))
        return anomalies

    def _remain(self, updates: int) -> None:
        self._remaining = updates
        self.recorder.level = Level.DETAILED if updates > 0 else self._base

    def state(self) -> dict[str, Any]:
        """For the checkpoint, as JSON: a resumed run then reports what an uninterrupted one would."""
        return {"detector": self.detector.state(), "detailed_updates": self._remaining}

    def load(self, state: Mapping[str, Any]) -> None:
        self.detector.load(state["detector"])
        self._remain(int(state["detailed_updates"]))

"""The anomaly detector: reads the metrics of every update and speaks up once when something is wrong.

An anomaly is reported when its number has been beyond its limit for a while (`Symptom.patience`), then not again until
it has been clearly over for RECOVERY updates, or as a reminder after REMINDER. Too small is as wrong as too large.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from esper.telemetry import readings
from esper.telemetry.readings import Drift, Improvement, Limits, Phase, Reading, ReturnLevel
from esper.telemetry.records import Event, Severity
from esper.telemetry.symptoms import SYMPTOMS

__all__ = ["Anomaly", "AnomalyDetector", "Drift", "Limits", "Phase"]

RECOVERY = 3
"""Clear updates in a row after which an anomaly is over."""
REMINDER = 25
"""Updates after which an anomaly that lasts is reported again."""


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


@dataclass(slots=True)
class _Track:
    """What the detector remembers of one symptom of one metric."""

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


class AnomalyDetector:
    """Judges updates one after another."""

    def __init__(self, limits: Limits, drift: Drift | None = None) -> None:
        """`drift` is the moving average of the gradient norm; without one drift is not judged."""
        self.limits = limits
        self._drift = drift
        self._returns = ReturnLevel()
        self._improvement = Improvement()
        self._seen_alive: set[str] = set()
        self._tracks: dict[str, _Track] = {}
        self._update = 0

    def check_all(self, metrics: Mapping[str, float], phase: float) -> list[Anomaly]:
        """What is newly wrong with this update; `phase` is the share of the run that is done, in [0, 1]."""
        self._update = int(metrics.get("update", self._update + 1))
        found = []
        for reading in self._read(metrics, Phase.of(phase)):
            # All NaNs are one fault, whichever metrics show it this time.
            key = reading.name if reading.name == "non_finite" else reading.key
            if self._tracks.setdefault(key, _Track()).note(reading, SYMPTOMS[reading.name].patience):
                found.append(self._explain(reading))
        return found

    def _read(self, metrics: Mapping[str, float], phase: Phase) -> Iterator[Reading]:
        limits = self.limits
        yield from readings.numbers(metrics)
        yield from readings.policy(metrics, limits, phase)
        self._improvement.note(metrics)
        yield from readings.entropies(metrics, limits, phase, self._seen_alive, self._improvement.shown)
        yield from readings.value(metrics, limits, phase)
        yield from readings.gradients(metrics, limits, self._drift, phase)
        yield from readings.memory(metrics, limits)
        yield from self._returns.read(metrics)

    def _explain(self, reading: Reading) -> Anomaly:
        symptom = SYMPTOMS[reading.name]
        lasting = f" for {symptom.patience} updates" if symptom.patience > 1 else ""
        limit = f"limit {reading.limit:.3g}" if isfinite(reading.limit) else "not a finite number"
        message = (
            f"{reading.name}: {reading.metric} is {reading.seen:.3g}{lasting} ({limit}). "
            f"Usually {symptom.meaning}. Try: {symptom.remedy}."
        )
        return Anomaly(
            reading.name, reading.metric, reading.seen, reading.limit, self._update, symptom.severity, message
        )

    # -- exact resume --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, object]:
        """All that decides what is reported later, for JSON."""
        return {
            "update": self._update,
            "drift": None if self._drift is None else self._drift.average,
            "returns": asdict(self._returns),
            "improvement": asdict(self._improvement),
            "seen_alive": sorted(self._seen_alive),
            "tracks": {key: asdict(track) for key, track in self._tracks.items()},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken."""
        self._update = int(state["update"])
        if self._drift is not None:
            self._drift.average = state["drift"]
        self._returns = ReturnLevel(**state["returns"])
        self._improvement = Improvement(**state.get("improvement", {}))  # not in checkpoints before it was judged
        self._seen_alive = set(state["seen_alive"])
        self._tracks = {key: _Track(**track) for key, track in state["tracks"].items()}

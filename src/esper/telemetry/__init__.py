"""What a run leaves behind and what it says about its health. A leaf: it knows no agent and no environment."""

from esper.telemetry.anomalies import Anomaly, AnomalyDetector, Limits
from esper.telemetry.escalation import Escalation, HealthMonitor
from esper.telemetry.profiler import PhaseTimers, Profile, profiling
from esper.telemetry.recorder import FanOut, NullRecorder, Recorder, StoreRecorder
from esper.telemetry.records import Decision, Episode, Event, Level
from esper.telemetry.store import STORE_NAME, RunStore, open_readonly
from esper.telemetry.writer import StoreError

__all__ = [
    "STORE_NAME",
    "Anomaly",
    "AnomalyDetector",
    "Decision",
    "Episode",
    "Escalation",
    "Event",
    "FanOut",
    "HealthMonitor",
    "Level",
    "Limits",
    "NullRecorder",
    "PhaseTimers",
    "Profile",
    "Recorder",
    "RunStore",
    "StoreError",
    "StoreRecorder",
    "open_readonly",
    "profiling",
]

"""What a run leaves behind and what it reports about its health. A leaf: it imports no agent and no environment."""

from esper.telemetry.health import Anomaly, AnomalyDetector, HealthMonitor
from esper.telemetry.profiler import PhaseTimers, Profile, profiling
from esper.telemetry.recorder import FanOut, RunRecorder, StoreRecorder
from esper.telemetry.records import Decision, Episode, Event, Level
from esper.telemetry.store import STORE_NAME, RunStore, StoreError, open_readonly

__all__ = [
    "STORE_NAME",
    "Anomaly",
    "AnomalyDetector",
    "Decision",
    "Episode",
    "Event",
    "FanOut",
    "HealthMonitor",
    "Level",
    "PhaseTimers",
    "Profile",
    "RunRecorder",
    "RunStore",
    "StoreError",
    "StoreRecorder",
    "open_readonly",
    "profiling",
]

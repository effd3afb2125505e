"""What recording costs: one update of a default run (16 environments of 25 steps) handed to each kind of recorder.

    python benchmarks/telemetry.py [--updates 60] [--update-seconds 4] [--json]

"caller" is the time that the training thread spends in recorder calls; "flush" is what it then waits for the disk, once
an update, before a checkpoint. The share is of an update that takes --update-seconds; with a real run at hand, give
the seconds that its `esper query RUN "SELECT avg(s) FROM (SELECT sum(seconds) s FROM v_timers GROUP BY update_number)"`
says.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from esper.actions import Action, Effect, Op
from esper.agent import diagnostics as agent
from esper.agent.metrics import GLOSSARY
from esper.lifecycle import Stage, Transition
from esper.telemetry import (
    AnomalyDetector,
    Decision,
    Episode,
    Event,
    Level,
    NullRecorder,
    PhaseTimers,
    Recorder,
    RunStore,
    StoreRecorder,
)
from esper.telemetry.anomalies import Limits

ENVIRONMENTS, STEPS = 16, 25
TERMS = ("objective", "governor", "score", "progress", "credit", "action", "prune", "indecision", "ratio")
HEADS = ("slot", "blueprint", "blend", "op")
METRICS = {
    name.replace("head/", f"{head}/"): 0.5
    for name in GLOSSARY
    for head in (HEADS if name.startswith("head/") else ("",))
}
GERMINATE = Effect(Action(Op.GERMINATE, 1, "depthwise", "sigmoid", reason="policy"), True, "policy")
WAIT = Effect(Action(), False, "wait")


def record_update(recorder: Recorder, update: int, timers: PhaseTimers) -> None:
    """What a training loop reports of one update: every decision, a transition each 5 steps, an episode per row."""
    rewards = dict.fromkeys(TERMS, 0.25)
    for epoch in range(STEPS):
        with timers("collect"):
            for env in range(ENVIRONMENTS):
                growing = epoch % 5 == 0
                probabilities = {"op": 0.3, "slot": 0.4, "blueprint": 0.2, "blend": 0.5} if growing else {"op": 0.9}
                recorder.decision(
                    Decision.of(
                        GERMINATE if growing else WAIT,
                        update=update,
                        env=env,
                        epoch=epoch,
                        slot="layers.1" if growing else None,
                        probabilities=probabilities,
                        value=1.5,
                        reward=2.25,
                        rewards=rewards,
                    )
                )
                if growing:
                    change = Transition(epoch, "layers.1", 1, Stage.DORMANT, Stage.GERMINATED, "policy")
                    recorder.event(Event.of_transition(change, update=update, env=env))
    for env in range(ENVIRONMENTS):
        recorder.episode(Episode(update, env, 100 * update + env, 51.0, 60.0, 65.0, 900, 700, STEPS, rewards=rewards))
    recorder.metrics(update, {**METRICS, **timers.drain()})


def measure(recorder: Recorder, updates: int) -> tuple[float, float]:
    """Milliseconds an update: in the calls, and waiting in `flush`."""
    timers = PhaseTimers()
    calls = waits = 0.0
    for update in range(1, updates + 1):
        began = perf_counter()
        record_update(recorder, update, timers)
        handed = perf_counter()
        recorder.flush()
        calls, waits = calls + handed - began, waits + perf_counter() - handed
    return 1e3 * calls / updates, 1e3 * waits / updates


def microseconds(what: Callable[[], object], times: int = 2000) -> float:
    began = perf_counter()
    for _ in range(times):
        what()
    return 1e6 * (perf_counter() - began) / times


def limits() -> Limits:
    gradient = agent.GradientLimits.from_clip(0.5)
    return Limits(
        ratio_high=agent.RATIO_HIGH,
        ratio_low=agent.RATIO_LOW,
        entropy_low=agent.ENTROPY_LOW,
        entropy_collapsed=agent.ENTROPY_COLLAPSED,
        kl_spike=agent.KL_SPIKE,
        kl_extreme=agent.KL_EXTREME,
        kl_stalled=agent.KL_STALLED,
        gradient_vanishing=gradient.vanishing,
        gradient_exploding=gradient.exploding,
        gradient_drift=agent.GRADIENT_DRIFT,
        lstm_low=agent.LSTM_RMS_LOW,
        lstm_high=agent.LSTM_RMS_HIGH,
    )


def run(updates: int, update_seconds: float) -> dict[str, float]:
    facts = {}
    null, _ = measure(NullRecorder(), updates)
    facts["records made and thrown away, ms an update"] = null
    for level in Level:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run.sqlite"
            with RunStore(path) as store:
                calls, waits = measure(StoreRecorder(store, level), updates)
            name = level.name.lower()
            facts[f"{name}: caller, ms an update"] = calls
            facts[f"{name}: flush, ms an update"] = waits
            facts[f"{name}: % of an update of {update_seconds:g} s"] = 0.1 * (calls + waits) / update_seconds
            facts[f"{name}: kB an update"] = path.stat().st_size / 1024 / updates
    detector = AnomalyDetector(limits(), agent.GradientDrift())
    facts["anomaly check, µs an update"] = microseconds(lambda: detector.check_all(METRICS, 0.5))
    timers = PhaseTimers()

    def timed() -> None:
        with timers("phase"):
            pass

    facts["phase timer, µs a phase"] = microseconds(timed, 100_000)
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--update-seconds", type=float, default=4.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    facts = run(options.updates, options.update_seconds)
    if options.json:
        print(json.dumps(facts, indent=1))
    else:
        for name, value in facts.items():
            print(f"{name:<45} {value:10.3f}")


if __name__ == "__main__":
    main()

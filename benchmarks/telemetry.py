"""What recording costs: the same training run with its store and without, and the parts of it one by one.

    python benchmarks/telemetry.py [--task mixed/vector] [--envs 8] [--updates 2] [--pairs 4]

The run is real: growing networks, agent, checkpoints. With the store: every decision, transition, episode and metric at
the default level, and the anomaly check. Without: none of these is even made. Otherwise both do the same work (final
weights are compared), so that each update of one pairs with the same update of the other; runs alternate. CPU time is
that of the process; wall time is what a person waits for.

On a busy machine neither is worth much (measured beside six other jobs: quartiles of ±18 % for CPU time). So the run
also says where its time went: in calls that record, and in writing before checkpoints. These are shares of one and the
same run, which other jobs slow down as a whole.

    python benchmarks/telemetry.py --bulk-steps 3000000 [--envs 1024]

Only what a run of thousands of networks records, from made-up columns: the size of the file after so many steps, and
the time per step. Exits with 1 where a limit is broken (500 MB for 3 million steps; 3 % of the time at 3,000 steps/s).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from sqlite3 import OperationalError
from statistics import quantiles
from time import perf_counter, process_time
from unittest.mock import patch

import torch
import tyro

from esper.agent.metrics import METRICS as AGENT_METRICS
from esper.lifecycle import Stage, Transition
from esper.telemetry.health import AnomalyDetector, HealthMonitor
from esper.telemetry.profiler import PhaseTimers
from esper.telemetry.recorder import RunRecorder, StoreRecorder
from esper.telemetry.records import Decision, EpisodeColumns, Event, Level
from esper.telemetry.schema import RUN_TABLES
from esper.telemetry.store import RunStore, open_readonly
from esper.training import journal
from esper.training.journal import Journal
from esper.training.loop import Trainer, UpdateReport
from esper.training.run_folder import RunFolder
from esper.training.train_config import TrainConfig
from synthetic_rollout import synthetic_rollout

ENVIRONMENTS, STEPS = 16, 25
TERMS = ("objective", "governor", "score", "progress", "credit", "action", "prune", "indecision", "ratio")
HEADS = ("slot", "blueprint", "blend", "op")
METRICS = {
    name.replace("head/", f"{head}/"): 0.5
    for name in AGENT_METRICS
    for head in (HEADS if name.startswith("head/") else ("",))
}
PROBABILITIES = {"op": 0.3, "slot": 0.4, "blueprint": 0.2, "blend": 0.5}
GERMINATE = (("GERMINATE", "layers.1", "depthwise", "sigmoid"), PROBABILITIES, True, "policy")
WAIT = (("WAIT", None, None, None), {"op": 0.9}, False, "wait")


def record_update(recorder: RunRecorder, update: int, timers: PhaseTimers) -> None:
    """What a training loop reports of one update: every decision, a transition each 5 steps, an episode per row."""
    rewards = dict.fromkeys(TERMS, 0.25)
    for epoch in range(STEPS):
        with timers("collect"):
            for env in range(ENVIRONMENTS):
                growing = epoch % 5 == 0
                decided, probabilities, changed, said = GERMINATE if growing else WAIT
                recorder.decision(
                    Decision(update, env, epoch, *decided, probabilities, 1.5, changed, said, 2.25, rewards)
                )
                if growing:
                    change = Transition(epoch, "layers.1", 1, Stage.DORMANT, Stage.GERMINATED, "policy")
                    recorder.event(Event.of_transition(change, update=update, env=env))
    draws, row = range(100 * update, 100 * update + ENVIRONMENTS), (51.0, 60.0, 65.0, 900, 700, STEPS, None)
    columns, by_term = ([value] * ENVIRONMENTS for value in row), [list(rewards.values())] * ENVIRONMENTS
    recorder.episodes(EpisodeColumns(update, draws, *columns, TERMS, by_term))
    recorder.metrics(update, {**METRICS, **timers.drain()})


def measure(recorder: RunRecorder, updates: int) -> tuple[float, float]:
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


# -- the parts --------------------------------------------------------------------------------------------------------


def recorder_costs(updates: int = 60) -> dict[str, float]:
    """A default update (16 environments of 25 steps) handed to each kind of recorder."""
    facts = {}
    null, _ = measure(RunRecorder(), updates)
    facts["records made and thrown away, ms an update"] = null
    for level in Level:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run.sqlite"
            with RunStore(path) as store:
                calls, waits = measure(StoreRecorder(store, level), updates)
            name = level.name.lower()
            facts[f"{name}: caller, ms an update"] = calls
            facts[f"{name}: flush, ms an update"] = waits
            facts[f"{name}: kB an update"] = path.stat().st_size / 1024 / updates
    detector = AnomalyDetector(clip_norm=0.5)
    facts["anomaly check, µs an update"] = microseconds(lambda: detector.check_all(METRICS, 0.5))
    timers = PhaseTimers()

    def timed() -> None:
        with timers("phase"):
            pass

    facts["phase timer, µs a phase"] = microseconds(timed, 100_000)
    return facts


# -- the whole --------------------------------------------------------------------------------------------------------


class Watched(StoreRecorder):
    """Counts the time that the run spends in writing."""

    wrote = 0.0

    def flush(self) -> None:
        began = perf_counter()
        super().flush()
        self.wrote += perf_counter() - began


@dataclass(frozen=True)
class Run:
    """One training run."""

    updates: list[tuple[float, float]]
    """CPU and wall seconds of each update."""
    weights: dict[str, torch.Tensor]
    recording: float
    """Seconds in calls that record, and in the anomaly check."""
    writing: float
    """Seconds in `flush`."""


def train(config: TrainConfig, *, recorded: bool) -> Run:
    with ExitStack() as stack:
        folder = RunFolder.create(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run", config)
        recorder = Watched(RunStore(folder.path / "run.sqlite")) if recorded else None
        if not recorded:
            for method in ("_decision", "_events"):
                stack.enter_context(patch.object(Journal, method, lambda *_: None))
            stack.enter_context(patch.object(journal, "episode_columns", lambda *_: None))
            stack.enter_context(patch.object(HealthMonitor, "after_update", lambda *_: []))
        trainer = Trainer(config, folder, recorder)
        clocks = [(process_time(), perf_counter())]
        recording: list[float] = []

        def note(report: UpdateReport) -> None:
            clocks.append((process_time(), perf_counter()))
            recording.append(report.metrics["seconds/telemetry"])

        trainer.run(note)
        trainer.close()
        updates = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(clocks)]
        return Run(
            updates,
            {name: tensor.clone() for name, tensor in trainer.agent.network.state_dict().items()},
            sum(recording),
            0.0 if recorder is None else recorder.wrote,
        )


def whole(config: TrainConfig, pairs: int) -> dict[str, float]:
    """Overhead in percent: the median over paired updates, with quartiles; and where a recorded run's time went."""
    train(config, recorded=True)  # the first run in a process is slower than all others
    ratios: dict[str, list[float]] = {"CPU time": [], "wall time": []}
    runs = []
    for pair in range(pairs):
        order = (True, False) if pair % 2 else (False, True)
        found = {recorded: train(config, recorded=recorded) for recorded in order}
        on, off = found[True], found[False]
        assert all(torch.equal(on.weights[name], off.weights[name]) for name in on.weights), "recording changed weights"
        for with_store, without in zip(on.updates, off.updates, strict=True):
            for name, one, other in zip(ratios, with_store, without, strict=True):
                ratios[name].append(100.0 * (one / other - 1.0))
        runs.append(on)
    wall = sum(wall for run in runs for _, wall in run.updates)
    facts = {
        "seconds an update": wall / pairs / config.updates,
        "% of wall time in calls that record": 100.0 * sum(run.recording for run in runs) / wall,
        "% of wall time writing before checkpoints": 100.0 * sum(run.writing for run in runs) / wall,
    }
    for name, values in ratios.items():
        low, middle, high = quantiles(values, n=4)
        facts |= {f"{name}: % more with the store": middle, f"{name}: lower quartile": low}
        facts |= {f"{name}: upper quartile": high}
    return facts


# -- thousands of networks ---------------------------------------------------------------------------------------------

MEGABYTES, SHARE, RATE = 500.0, 3.0, 3000.0
"""Limits of a run of 3 million steps: size of the file, percent of the time at this many steps a second."""


def bulk(steps: int, envs: int) -> dict[str, float]:
    """A run of that many steps, recorded from columns; making them is not counted."""
    logged = dict.fromkeys(METRICS, 0.5)
    rollouts = [synthetic_rollout(envs, 25, 4, seed) for seed in range(3)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.sqlite"
        done = update = 0
        noting = writing = 0.0
        processor = process_time()
        with RunStore(path) as store:
            recorder = StoreRecorder(store)
            while done < steps:
                episodes = rollouts[update % len(rollouts)]
                update += 1
                began = perf_counter()
                rollout = Journal(recorder, update).note(episodes, episodes.value)
                recorder.metrics(update, logged | rollout.metrics())
                noted = perf_counter()
                recorder.flush()
                noting, writing = noting + noted - began, writing + perf_counter() - noted
                done += episodes.steps
        processor = process_time() - processor
        size = path.stat().st_size / 1e6
        with open_readonly(path) as connection:
            rows = {name: connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in RUN_TABLES}
            pages: dict[str, float] = {}
            with suppress(OperationalError):  # not every SQLite is built with dbstat
                pages |= connection.execute("SELECT name, sum(pgsize) / 1e6 FROM dbstat GROUP BY name").fetchall()
    seconds = noting + writing
    facts = {"bulk: steps": float(done), "bulk: updates": float(update), "bulk: MB": size}
    facts |= {f"bulk: {name}, rows": float(count) for name, count in rows.items()}
    facts |= {f"bulk: {name}, MB": pages[name] for name in RUN_TABLES if name in pages}
    return facts | {
        "bulk: MB of 3 million steps": size * 3e6 / done,
        "bulk: µs a step, recording": 1e6 * noting / done,
        "bulk: µs a step, writing": 1e6 * writing / done,
        "bulk: µs a step, CPU time of both": 1e6 * processor / done,
        f"bulk: % of the time at {RATE:g} steps/s": 100.0 * RATE * seconds / done,
    }


def short_of(facts: dict[str, float]) -> list[str]:
    limits = {"bulk: MB of 3 million steps": MEGABYTES, f"bulk: % of the time at {RATE:g} steps/s": SHARE}
    return [f"{name} is {facts[name]:.2f}, over {limit:g}" for name, limit in limits.items() if facts[name] > limit]


def main(
    task: str = "mixed/vector",
    bulk_steps: int = 0,
    envs: int | None = None,
    updates: int = 2,
    pairs: int = 4,
) -> int:
    """`bulk_steps`: a run of so many steps from columns, such as 3000000, instead of real runs."""
    torch.set_num_threads(1)
    if bulk_steps:
        facts = bulk(bulk_steps, envs or 1024)
    else:
        facts = recorder_costs() | whole(
            TrainConfig(task=task, envs=envs or 8, updates=updates, evaluate_every=0), pairs
        )
    for name, value in facts.items():
        print(f"{name:<45} {value:10.3f}")
    broken = short_of(facts) if bulk_steps else []
    for line in broken:
        print(line)
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(tyro.cli(main, description=__doc__))

"""The first questions about a run: is it learning, is it healthy, how far is it and how long will it take?"""

from __future__ import annotations

import math
import os
import sqlite3
import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from esper.dashboard.growth_recorder import CONTROL, GROWTH
from esper.dashboard.source import Source, meta
from esper.telemetry.health import IMPROVEMENT_WINDOW, REMINDER, Improvement

QUIET = 30.0
"""Seconds without news after which a run is not called running, unless its updates take longer."""
RECENT = 10
"""Updates that steps per second and the time left are averaged over; an alarm that is older is over."""

LATEST = (
    *(f"episode/{what}" for what in ("score", "return", "accuracy", "growth", "germinated", "fossilized", "pruned")),
    *("episode/governed", "entropy", "kl", "clip_fraction", "explained_variance", "gradient_norm"),
)
LIGHTS = {
    "policy": ("kl_", "clip_", "entropy_", "head_", "ratio_"),
    "critic": ("value_",),
    "gradients": ("gradient_", "non_finite", "skipped_", "lstm_"),
}
"""Beginnings of the names of the alarms that each light stands for."""


def overview(source: Source, now: float | None = None) -> dict[str, Any]:
    """All that the head of the page says."""
    with source.reading() as connection:
        facts = meta(connection)
        return (
            _of_growth(source, connection, facts, now or time.time())
            if GROWTH in facts
            else _of_run(source, connection, facts, now or time.time())
        )


# -- a run of training -------------------------------------------------------------------------------------------------


def _of_run(source: Source, connection: sqlite3.Connection, facts: Mapping[str, Any], now: float) -> dict[str, Any]:
    settings = facts.get("config")
    config: dict[str, Any] = settings if isinstance(settings, dict) else {}
    done, total = last_update(connection), _whole(config.get("updates"))
    pace = _pace(connection, done)
    state = _state(source, connection, done, total, pace["seconds_per_update"], now)
    latest = latest_metrics(connection, done)
    left = None if total is None or pace["seconds_per_update"] is None else (total - done) * pace["seconds_per_update"]
    return {
        "kind": "run",
        "name": source.name,
        "task": config.get("task"),
        "engine": facts.get("engine"),
        "envs": config.get("envs"),
        "seed": config.get("seed"),
        "settings": _settings(config),
        "update": done,
        "updates": total,
        "state": state,
        "steps_per_second": pace["steps_per_second"],
        "seconds_left": left if state["name"] == "running" else None,
        "steps": _total_steps(connection),
        "sessions": [dict(row) for row in connection.execute("SELECT * FROM sessions ORDER BY session DESC LIMIT 5")],
        "latest": latest,
        "lights": [*_learning(connection, done), *_alarms(connection, done, latest), _networks(connection, done)],
    }


def last_update(connection: sqlite3.Connection) -> int:
    """The newest update that is recorded as a whole; 0 before the first."""
    tables = ("episodes", "decisions")  # a network that grows has steps before it has a result
    found = [connection.execute(f"SELECT max(update_number) FROM main.{name}").fetchone()[0] for name in tables]
    return max(int(one or 0) for one in found)


def latest_metrics(connection: sqlite3.Connection, update: int) -> dict[str, float | None]:
    found = {name: series(connection, name, update, update).get(update) for name in LATEST}
    newest = connection.execute(
        "SELECT update_number, value FROM metrics WHERE name = 'evaluation/score' ORDER BY update_number DESC LIMIT 1"
    ).fetchone()
    found["evaluation/score"] = None if newest is None else newest["value"]
    return found


def series(
    connection: sqlite3.Connection, name: str, first: int = 0, last: int | None = None
) -> dict[int, float | None]:
    """By update: one metric; the primary key makes this one walk."""
    rows = connection.execute(
        "SELECT update_number, value FROM metrics WHERE name = ? AND update_number BETWEEN ? AND ? "
        "ORDER BY update_number",
        (name, first, 2**62 if last is None else last),
    )
    return {row["update_number"]: row["value"] for row in rows}


def _total_steps(connection: sqlite3.Connection) -> int:
    (found,) = connection.execute("SELECT sum(value) FROM metrics WHERE name = 'env_steps'").fetchone()
    return int(found) if _known(found) else 0


def _pace(connection: sqlite3.Connection, done: int) -> dict[str, float | None]:
    """From the last updates: what was timed of each, evaluations and checkpoints included."""
    first = max(1, done - RECENT + 1)
    speed, steps = (series(connection, name, first) for name in ("steps_per_second", "env_steps"))
    rates = [(steps[u], s) for u, s in speed.items() if s and steps.get(u)]
    if not rates:
        return {"steps_per_second": None, "seconds_per_update": None}
    seconds = fmean(float(n or 0.0) / s for n, s in rates)
    for phase in ("evaluation", "checkpoint"):
        own = [value for value in series(connection, f"seconds/{phase}", first).values() if value]
        seconds += sum(own) / len(rates)
    return {"steps_per_second": fmean(s for _, s in rates), "seconds_per_update": seconds}


def _state(
    source: Source, connection: sqlite3.Connection, done: int, total: int | None, pace: float | None, now: float
) -> dict[str, Any]:
    quiet = max(0.0, now - source.written())
    row = connection.execute("SELECT process FROM sessions ORDER BY session DESC LIMIT 1").fetchone()
    running = row is not None and _is_running(int(row["process"]))
    patience = max(QUIET, 5.0 * (pace or 0.0))
    if total is not None and done >= total:
        name, said = "finished", "all updates are done"
    elif quiet <= patience and (running or quiet <= QUIET):
        name, said = "running", "an update follows the other"
    elif running:
        name, said = "quiet", f"process {row['process']} lives, but nothing was recorded for {_span(quiet)}"
    else:
        name, said = "stopped", f"nothing was recorded for {_span(quiet)}, and its process is not on this machine"
    return {"name": name, "said": said, "quiet_seconds": quiet, "written": source.written()}


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except PermissionError:  # another user's
        return True
    except (OSError, OverflowError):
        return False
    return True


def _span(seconds: float) -> str:
    for length, unit in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Flat, by name, those of a table as TABLE.NAME; what is not set is left out."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        flat |= {f"{name}.{key}" if key else name: one for key, one in inner if one is not None}
    return flat


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


# -- health ------------------------------------------------------------------------------------------------------------


def light(name: str, state: str, said: str, remedy: str = "") -> dict[str, str]:
    """`state` is good, neutral, warning, bad or unknown."""
    return {"name": name, "state": state, "said": said, "remedy": remedy}


def _learning(connection: sqlite3.Connection, done: int) -> list[dict[str, str]]:
    """Whether the score is clearly better than at the beginning: the rule of the alarms."""
    scores = [value for value in series(connection, "episode/score").values() if value is not None]
    if len(scores) < 2 * IMPROVEMENT_WINDOW:
        return [light("learning", "unknown", f"too early to tell: {2 * IMPROVEMENT_WINDOW} updates are needed")]
    first, last = fmean(scores[:IMPROVEMENT_WINDOW]), fmean(scores[-IMPROVEMENT_WINDOW:])
    shown = Improvement(scores[:IMPROVEMENT_WINDOW], scores[-IMPROVEMENT_WINDOW:]).shown
    said = f"score {first:.1f} at first, {last:.1f} now (means of {IMPROVEMENT_WINDOW} updates)"
    if any(row["name"] == "return_collapse" for row in _anomalies(connection, done)):
        return [light("learning", "bad", f"returns collapsed; {said}", "resume from before the fall")]
    if shown:
        return [light("learning", "good", f"{said}: a clear rise")]
    return [light("learning", "neutral", f"{said}: no clear change")]


def _alarms(connection: sqlite3.Connection, done: int, latest: Mapping[str, float | None]) -> list[dict[str, str]]:
    shown = {
        "policy": [("entropy", "entropy", ".2f"), ("KL", "kl", ".4f"), ("clipped", "clip_fraction", ".1%")],
        "critic": [("explained variance", "explained_variance", ".2f")],
        "gradients": [("norm", "gradient_norm", ".2g")],
    }
    found = []
    for name, beginnings in LIGHTS.items():
        numbers = ", ".join(f"{label} {latest[key]:{form}}" for label, key, form in shown[name] if _known(latest[key]))
        alarms = [row for row in _anomalies(connection, done) if str(row["name"]).startswith(beginnings)]
        if not numbers and not alarms:
            found.append(light(name, "unknown", "not measured yet"))
        elif alarms:
            worst = "bad" if any(row["severity"] == "error" for row in alarms) else "warning"
            one = alarms[0]
            found.append(
                light(name, worst, f"{one['name']} at update {one['update_number']}; {numbers}", one["message"])
            )
        else:
            found.append(light(name, "good", numbers))
    return found


def _known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _anomalies(connection: sqlite3.Connection, done: int) -> Sequence[sqlite3.Row]:
    """Those that last, the newest first: an alarm is reported again after REMINDER updates."""
    return connection.execute(
        "SELECT * FROM v_anomalies WHERE update_number > ? ORDER BY update_number DESC LIMIT 50",
        (done - min(RECENT, REMINDER),),
    ).fetchall()


def _networks(connection: sqlite3.Connection, done: int) -> dict[str, str]:
    """What the governor had to end among the episodes of the last update."""
    row = connection.execute(
        "SELECT count(*) AS every, count(governor) AS ended FROM episodes WHERE update_number = ? AND arm = 'train'",
        (done,),
    ).fetchone()
    if not row["every"]:
        return light("networks", "unknown", "no episode is recorded yet")
    said = f"{row['every'] - row['ended']} of {row['every']} episodes of update {done} ran to their end"
    share = row["ended"] / row["every"]
    if share > 0.25:
        return light("networks", "bad", said, "the governor ends many episodes: look at its events below")
    return light("networks", "warning" if row["ended"] else "good", said)


# -- one network that grows --------------------------------------------------------------------------------------------


def _of_growth(source: Source, connection: sqlite3.Connection, facts: Mapping[str, Any], now: float) -> dict[str, Any]:
    settings = facts[GROWTH]
    rows = connection.execute(
        "SELECT epoch, accuracy, parameters FROM decisions WHERE arm = 'train' ORDER BY epoch"
    ).fetchall()
    control = connection.execute(
        "SELECT accuracy FROM decisions WHERE arm = ? ORDER BY epoch DESC LIMIT 1", (CONTROL,)
    ).fetchone()
    done, total = len(rows), _whole(settings.get("epochs"))
    result = facts.get("result")
    came_back: Mapping[str, Any] = result if isinstance(result, dict) else {}
    finished = result is not None or (total is not None and done >= total)
    quiet = max(0.0, now - source.written())
    state = "finished" if finished else "running" if quiet < QUIET else "stopped"
    (faults,) = connection.execute("SELECT count(*) FROM events WHERE kind = 'governor'").fetchone()
    return {
        "kind": "growth",
        "name": source.name,
        "task": settings.get("task"),
        "controller": settings.get("controller"),
        "rent": settings.get("rent"),
        "host_parameters": settings.get("host_parameters"),
        "update": done,
        "updates": total,
        "state": {"name": state, "said": "", "quiet_seconds": quiet, "written": source.written()},
        # The network that came back may be that of an earlier epoch, without the seeds that the end removed.
        "accuracy": came_back.get("validation_accuracy", rows[-1]["accuracy"] if rows else None),
        "parameters": came_back.get("parameters", rows[-1]["parameters"] if rows else None),
        "control_accuracy": None if control is None else control["accuracy"],
        "result": result,
        "lights": [
            light("networks", "warning", f"the governor undid {faults} epochs")
            if faults
            else light("networks", "good", "no epoch was undone")
        ],
    }

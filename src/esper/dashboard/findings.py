"""What a person should look at: alarms and verdicts with what to do, the best networks, and files to take home."""

from __future__ import annotations

import json
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Any

from esper.dashboard.source import Source
from esper.telemetry.alarms import ALARM_RULES

MOST_EVENTS = 100
BEST = 15
DOWNLOADS = (".safetensors", ".pt2", ".py", ".json", ".png", ".toml", ".html")
"""Endings of files that may be fetched; the store and temporary files may not."""

REMEDIES = {
    "governor": "one network broke and its epoch was undone; many of them: lower the learning rate of the task",
    "reward_hacking": "a seed claims more than the network gained: the claim is limited, and it is watched",
    "ransomware": "a seed is needed only because the network came to depend on it: the claim pays nothing",
    "ratio_explosion": "single steps stray in healthy updates; with an alarm of the same name, lower the learning rate",
    "skipped_steps": "the gradient was not finite: lower the learning rate, look at rewards and observations",
    "compile": "the run goes on uncompiled, and slower",
    "telemetry": "a sink was let go; the store itself is whole",
}


def findings(source: Source) -> dict[str, Any]:
    """Everything but stage changes, the newest first; and how often each kind came."""
    with source.reading() as connection:
        kinds = connection.execute(  # a step in the index for each, however many events there are
            "WITH RECURSIVE k(kind) AS (SELECT min(kind) FROM events UNION ALL "
            "SELECT (SELECT min(kind) FROM events WHERE kind > k.kind) FROM k WHERE k.kind IS NOT NULL) "
            "SELECT kind FROM k WHERE kind IS NOT NULL AND kind <> 'lifecycle'"
        ).fetchall()
        found: list[sqlite3.Row] = []
        counts: dict[str, int] = {}
        for (kind,) in kinds:
            (counts[kind],) = connection.execute("SELECT count(*) FROM events WHERE kind = ?", (kind,)).fetchone()
            found += connection.execute(
                "SELECT event, time, kind, severity, update_number, arm, env, epoch, slot, message, data FROM events "
                "WHERE kind = ? ORDER BY update_number DESC, event DESC LIMIT ?",
                (kind, MOST_EVENTS),
            ).fetchall()
        found.sort(key=lambda row: (row["update_number"], row["event"]), reverse=True)
        return {"counts": counts, "events": [_event(row) for row in found[:MOST_EVENTS]]}


def _event(row: sqlite3.Row) -> dict[str, Any]:
    event = {name: row[name] for name in ("time", "kind", "severity", "arm", "env", "epoch", "slot", "message")}
    data = json.loads(row["data"] or "{}")
    rule = ALARM_RULES.get(str(data.get("name"))) if row["kind"] == "anomaly" else None
    remedy = REMEDIES.get(row["kind"], "") if rule is None else rule.remedy
    return event | {"update": row["update_number"], "name": data.get("name"), "remedy": remedy}


def leaderboard(source: Source) -> dict[str, Any]:
    """The best grown network of each problem, what it kept, and files."""
    with source.reading() as connection:
        rows = connection.execute(
            # SQLite takes the other columns of a group from the row of the maximum.
            "SELECT update_number, arm, env, draw, max(score) AS score, accuracy, parameters, host_parameters "
            "FROM episodes WHERE score IS NOT NULL AND parameters > host_parameters "
            "GROUP BY arm, draw ORDER BY score DESC, update_number DESC LIMIT ?",
            (BEST,),
        ).fetchall()
        best = []
        for row in rows:
            key = (row["update_number"], row["arm"], row["env"])
            size = row["parameters"] / max(row["host_parameters"], 1)
            best.append({"update": key[0], **dict(row), "size": size, "kept": _kept(connection, key)})
    return {"best": best, "files": files(source)}


def _kept(connection: sqlite3.Connection, key: tuple[int, str, int]) -> list[str] | None:
    """Blueprints that became part of the network, with their slots; None where its steps are not recorded."""
    planted: dict[str, str] = {}
    steps = connection.execute(
        "SELECT op, slot, blueprint, changed FROM decisions WHERE update_number = ? AND arm = ? AND env = ? "
        "ORDER BY epoch",
        key,
    ).fetchall()
    kept = []
    for step in steps:
        if step["op"] == "GERMINATE" and step["changed"]:
            planted[step["slot"]] = step["blueprint"]
        elif step["op"] == "FOSSILIZE" and step["changed"]:
            kept.append(f"{planted.get(step['slot'], 'a seed')} at {step['slot']}")
    return kept if steps else None


def files(source: Source) -> list[dict[str, Any]]:
    """Policies, grown networks, comparisons and reports in the folder, by their paths in it."""
    found: dict[str, int] = {}
    for pattern in ("*", "checkpoints/*", "*/*"):
        for path in sorted(source.folder.glob(pattern)):
            if downloadable(source, path):
                with suppress(OSError):  # a run that goes on removes old checkpoints
                    found.setdefault(path.relative_to(source.folder).as_posix(), path.stat().st_size)
    return [{"name": name, "bytes": size} for name, size in list(found.items())[:200]]


def downloadable(source: Source, path: Path) -> bool:
    """A plain file of the folder with one of the known endings, that is not hidden and no link to elsewhere."""
    hidden = any(part.startswith(".") for part in path.relative_to(source.folder).parts)
    return not hidden and path.suffix in DOWNLOADS and path.is_file() and source.is_inside(path)

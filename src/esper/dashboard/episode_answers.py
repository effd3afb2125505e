"""Episodes of one update: all of them small, and one in full, with the reasons of every decision."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from esper.actions import Op
from esper.dashboard.overview import last_update
from esper.dashboard.source import Source
from esper.lifecycle import LIVE, Rules, Stage

TILES = 64
"""Episodes that are drawn; of more, those whose steps are recorded come first."""
PAGE = 50
BINS = 24
ORDERS = {
    "env": "env",
    "draw": "draw",
    "score": "score DESC",
    "accuracy": "accuracy DESC",
    "return": "episode_return DESC",
    "size": "parameters * 1.0 / max(host_parameters, 1)",
}

Key = tuple[int, str, int]
"""Update, arm, environment."""


def rollout(source: Source, update: int | None, arm: str, sort: str = "env", page: int = 0) -> dict[str, Any]:
    """The episodes of one update and arm: sums over all, a page of rows, and small plots."""
    with source.reading() as connection:
        newest = last_update(connection)
        at = newest if update is None else update
        every = connection.execute(
            "SELECT count(*) AS episodes, count(governor) AS governed, avg(score) AS score, avg(accuracy) AS accuracy, "
            "avg(parameters * 1.0 / max(host_parameters, 1)) AS size FROM episodes WHERE update_number = ? AND arm = ?",
            (at, arm),
        ).fetchone()
        order = ORDERS.get(sort, "env")
        rows = connection.execute(
            f"SELECT * FROM episodes WHERE update_number = ? AND arm = ? ORDER BY {order}, env LIMIT ? OFFSET ?",
            (at, arm, PAGE, max(0, page) * PAGE),
        ).fetchall()
        recorded = _recorded(connection, at, arm)
        arms = connection.execute("SELECT DISTINCT arm FROM episodes WHERE update_number = ?", (at,)).fetchall()
        return {
            "update": at,
            "newest": newest,
            "arm": arm,
            "arms": [row["arm"] for row in arms],
            "all": dict(every),
            "page": page,
            "pages": max(1, -(-every["episodes"] // PAGE)),
            "rows": [_row(row) | {"recorded": row["env"] in recorded} for row in rows],
            "histogram": _histogram(connection, at, arm),
            "counts": _counts(connection, at),
            "tiles": _tiles(connection, at, arm, sorted(recorded)[:TILES]),
            "sampled": len(recorded) < every["episodes"],
        }


def _row(row: sqlite3.Row) -> dict[str, Any]:
    return {
        "env": row["env"],
        "draw": row["draw"],
        "score": row["score"],
        "accuracy": row["accuracy"],
        "return": row["episode_return"],
        "parameters": row["parameters"],
        "size": row["parameters"] / max(row["host_parameters"], 1),
        "length": row["length"],
        "governor": row["governor"],
    }


def _recorded(connection: sqlite3.Connection, update: int, arm: str) -> set[int]:
    """Environments whose steps are in the store: all, or a sample of a large rollout."""
    rows = connection.execute("SELECT DISTINCT env FROM decisions WHERE update_number = ? AND arm = ?", (update, arm))
    return {row["env"] for row in rows}


def _histogram(connection: sqlite3.Connection, update: int, arm: str) -> dict[str, Any]:
    """Scores of the update, in bins of equal width."""
    scores = [
        row["score"]
        for row in connection.execute("SELECT score FROM episodes WHERE update_number = ? AND arm = ?", (update, arm))
        if row["score"] is not None
    ]
    if not scores:
        return {"low": 0.0, "high": 1.0, "counts": []}
    low, high = min(0.0, min(scores)), max(100.0, max(scores))
    counts = [0] * BINS
    for score in scores:
        counts[min(BINS - 1, int((score - low) / (high - low) * BINS))] += 1
    return {"low": low, "high": high, "counts": counts}


def _counts(connection: sqlite3.Connection, update: int) -> dict[str, dict[str, float]]:
    """Operations and stage changes over all episodes, where a large rollout has counted them."""
    found: dict[str, dict[str, float]] = {}
    for what in ("actions", "transitions", "faults"):
        rows = connection.execute(
            "SELECT name, value FROM metrics WHERE name >= ? AND name < ? AND update_number = ?",
            (f"{what}/", f"{what}0", update),
        )
        found[what] = {row["name"].partition("/")[2]: row["value"] for row in rows if row["name"].count("/") == 1}
    return found


def _tiles(connection: sqlite3.Connection, update: int, arm: str, envs: Sequence[int]) -> list[dict[str, Any]]:
    """A small plot of each: accuracy by epoch, and where its slots are at the end."""
    if not envs:
        return []
    marks = ", ".join("?" * len(envs))
    where = f"update_number = ? AND arm = ? AND env IN ({marks})"
    key = (update, arm, *envs)
    plots: dict[int, list[float | None]] = {env: [] for env in envs}
    for row in connection.execute(f"SELECT env, accuracy FROM decisions WHERE {where} ORDER BY env, epoch", key):
        plots[row["env"]].append(None if row["accuracy"] is None else round(row["accuracy"], 1))
    stages: dict[int, dict[str, str]] = {env: {} for env in envs}
    for row in connection.execute(
        f"SELECT env, slot, json_extract(data, '$.target') AS target FROM events WHERE kind = 'lifecycle' AND {where} "
        "ORDER BY event",
        key,
    ):
        stages[row["env"]][row["slot"]] = row["target"]
    results = {r["env"]: r for r in connection.execute(f"SELECT * FROM episodes WHERE {where}", key)}
    return [
        {"plot": plots[env], "stages": sorted(stages[env].items()), **_row(results[env])}
        for env in envs
        if env in results
    ]


# -- one episode -------------------------------------------------------------------------------------------------------


ENTERED_AT_ONCE = frozenset({"GERMINATED", "TRAINING", "FOSSILIZED"})
"""Stages that a seed enters when its epoch begins; the others follow at the end of an epoch."""


def episode(source: Source, key: Key) -> dict[str, Any] | None:
    """One episode in full; None if there is none of this key."""
    with source.reading() as connection:
        result = connection.execute(
            "SELECT * FROM episodes WHERE update_number = ? AND arm = ? AND env = ?", key
        ).fetchone()
        decisions = connection.execute(
            "SELECT d.*, s.slots, s.choices FROM decisions AS d LEFT JOIN step_details AS s "
            "USING (update_number, arm, env, epoch) "
            "WHERE d.update_number = ? AND d.arm = ? AND d.env = ? ORDER BY d.epoch",
            key,
        ).fetchall()
        if result is None and not decisions:
            return None
        events = connection.execute(
            "SELECT * FROM events WHERE update_number = ? AND arm = ? AND env = ? ORDER BY event", key
        ).fetchall()
        terms = connection.execute(
            "SELECT term, value FROM episode_rewards WHERE update_number = ? AND arm = ? AND env = ? ORDER BY term", key
        ).fetchall()
        told = {"control": _control(connection), "terms": {row["term"]: row["value"] for row in terms}}
        return told | _story(key, result, decisions, events)


def _control(connection: sqlite3.Connection) -> list[float | None]:
    rows = connection.execute("SELECT accuracy FROM decisions WHERE arm = 'control' ORDER BY epoch").fetchall()
    return [row["accuracy"] for row in rows]


def _story(
    key: Key, result: sqlite3.Row | None, decisions: Sequence[sqlite3.Row], events: Sequence[sqlite3.Row]
) -> dict[str, Any]:
    length = len(decisions) or (0 if result is None else result["length"])
    changes = [_change(row) for row in events if row["kind"] == "lifecycle"]
    states = [json.loads(row["slots"]) if row["slots"] else None for row in decisions]
    named = next(([slot["path"] for slot in one] for one in states if one), None)
    slots = named or sorted({change["slot"] for change in changes})
    lanes, before = _fold(changes, length, slots)
    steps = [_step(row, before[i]) for i, row in enumerate(decisions)]
    planted = {(s["slot"], s["epoch"]): s["blueprint"] for s in steps if s["op"] == Op.GERMINATE.name}
    seeds = {change["seed"]: planted.get((change["slot"], change["epoch"])) for change in changes if change["born"]}
    return {
        "update": key[0],
        "arm": key[1],
        "env": key[2],
        "result": None if result is None else _row(result) | {"host_parameters": result["host_parameters"]},
        "epochs": length,
        "slots": slots,
        "lanes": [{"slot": slot, "segments": lanes.get(slot, [])} for slot in slots],
        "seeds": {str(seed): blueprint for seed, blueprint in seeds.items()},
        "changes": changes,
        "states": states,
        "steps": steps,
        "events": [_event(row) for row in events if row["kind"] != "lifecycle"],
    }


def _change(row: sqlite3.Row) -> dict[str, Any]:
    data = json.loads(row["data"])
    return {
        "epoch": row["epoch"],
        "slot": row["slot"],
        "seed": row["seed"],
        "source": data.get("source"),
        "target": data.get("target"),
        "reason": row["message"],
        "born": data.get("target") == Stage.GERMINATED.name,
    }


def _event(row: sqlite3.Row) -> dict[str, Any]:
    return {name: row[name] for name in ("epoch", "kind", "severity", "message", "slot")}


def _fold(
    changes: Sequence[Mapping[str, Any]], length: int, slots: Sequence[str]
) -> tuple[dict[str, list[dict[str, Any]]], list[dict[str, tuple[str, int]]]]:
    """Lanes by slot, and for each epoch the stage and the age of every slot when its decision was made."""
    empty = (Stage.DORMANT.name, 0, 0)  # stage, seed, the epoch since when
    now, born = dict.fromkeys(slots, empty), dict.fromkeys(slots, 0)
    lanes: dict[str, list[dict[str, Any]]] = {}

    def end(slot: str, epoch: int) -> None:
        stage, seed, since = now.get(slot, empty)
        if epoch > since:
            lanes.setdefault(slot, []).append({"stage": stage, "seed": seed, "from": since, "to": epoch})

    by_epoch: dict[int, list[Mapping[str, Any]]] = {}
    for change in changes:
        by_epoch.setdefault(min(change["epoch"], length), []).append(change)
    before = []
    for epoch in range(length + 1):
        before.append({slot: (stage, epoch - born.get(slot, 0)) for slot, (stage, _, _) in now.items()})
        for change in by_epoch.get(epoch, ()):
            at = epoch if change["target"] in ENTERED_AT_ONCE or epoch == length else epoch + 1
            end(change["slot"], at)
            now[change["slot"]] = (change["target"], change["seed"], at)
            if change["born"]:
                born[change["slot"]] = epoch
    for slot in now:
        end(slot, length)
    return lanes, before


def _step(row: sqlite3.Row, before: Mapping[str, tuple[str, int]]) -> dict[str, Any]:
    choices = json.loads(row["choices"]) if row["choices"] else None
    kept = ("epoch", "op", "slot", "blueprint", "blend", "p_op", "p_slot", "p_blueprint", "p_blend", "value", "reward")
    step = {name: row[name] for name in (*kept, "message", "accuracy", "parameters")}
    return step | {
        "changed": bool(row["changed"]),
        "choices": choices,
        "illegal": {} if choices is None else _why_illegal(choices, row["op"], before),
    }


# -- why something was illegal -----------------------------------------------------------------------------------------

_LIVE = {stage.name for stage in LIVE}
_AGE = Rules().prune_age


def _why_illegal(
    choices: Mapping[str, Mapping[str, float | None]], op: str, before: Mapping[str, tuple[str, int]]
) -> dict[str, dict[str, str]]:
    """A reason for every choice that had no probability, from the stages of the slots when it was decided."""
    found: dict[str, dict[str, str]] = {}
    for head, options in choices.items():
        for name, probability in options.items():
            if probability is None:
                found.setdefault(head, {})[name] = _reason(head, name, op, before)
    return found


def _reason(head: str, name: str, op: str, before: Mapping[str, tuple[str, int]]) -> str:
    if head == "op":
        slots: dict[str, list[str]] = {}
        for slot, state in before.items():
            slots.setdefault(_of_slot(name, *state), []).append(slot)
        told = [f"{reason} at {', '.join(where)}" for reason, where in slots.items()]
        return "; ".join(told) or "no slot is known"
    if head == "slot":
        return _of_slot(op, *before.get(name, (Stage.DORMANT.name, 0)))
    if head == "blueprint":
        return "does not fit the slot's layout, or what is left of the parameter budget"
    return "cannot be used here"


def _of_slot(op: str, stage: str, age: int) -> str:
    """Why an operation is not possible on a slot in this stage."""
    if op == Op.GERMINATE.name:
        if stage != Stage.DORMANT.name:
            return f"not empty ({stage.lower()})"
        return "no blueprint fits the budget, or there are as many seeds as allowed"
    if op == Op.PRUNE.name:
        if stage not in _LIVE:
            return f"no unfinished seed to remove ({stage.lower()})"
        return (
            f"the seed is too young to remove ({age} of {_AGE} epochs)" if age < _AGE else "it is being removed already"
        )
    if op == Op.FOSSILIZE.name:
        if stage != Stage.HOLDING.name:
            return f"only a holding seed can be kept ({stage.lower()})"
        return "its measured contribution is not above the limit"
    return "not possible"

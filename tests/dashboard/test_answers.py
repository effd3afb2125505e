"""What the page is told of a run, with numbers worked out by hand from made-up rows."""

from __future__ import annotations

import json
import os
import sqlite3
from pathlib import Path

import pytest
from made_up_runs import EPOCHS, make_bulk_run, make_comparison, make_run

from esper.dashboard.curves import POINTS, curves, levels
from esper.dashboard.episode_answers import episode, rollout
from esper.dashboard.findings import downloadable, files, findings, leaderboard
from esper.dashboard.overview import overview
from esper.dashboard.source import Source
from esper.telemetry.recorder import StoreRecorder
from esper.telemetry.records import Event
from esper.telemetry.schema import MIGRATIONS
from esper.telemetry.store import STORE_NAME, RunStore, StoreError


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    folder = make_run(tmp_path_factory.mktemp("runs") / "first")
    make_comparison(folder / "comparison")
    return Source.of(folder)


def lights(view: dict[str, object]) -> dict[str, str]:
    return {one["name"]: one["state"] for one in view["lights"]}  # type: ignore[attr-defined]


def test_the_head_of_the_page(source: Source) -> None:
    view = overview(source)
    assert (view["update"], view["updates"], view["state"]["name"]) == (12, 12, "finished")
    assert (view["task"], view["envs"], view["steps"]) == ("mixed/vector", 3, 12 * 75)
    assert view["steps_per_second"] == 50.0
    assert view["latest"]["episode/score"] == 72.0
    assert view["latest"]["evaluation/score"] == 69.0  # of update 12: 72 − 3
    assert view["settings"]["ppo.clip"] == 0.2
    # Means of the first and last five updates: 61 … 65 and 68 … 72.
    learning = view["lights"][0]
    assert learning["state"] == "good"
    assert "63.0 at first, 70.0 now" in learning["said"]
    assert set(lights(view).values()) == {"good"}


def test_a_run_that_goes_on_has_time_left_and_one_that_is_silent_has_not(tmp_path: Path) -> None:
    source = Source.of(make_run(tmp_path / "r", updates=4, total=10))
    now = source.written()
    view = overview(source, now + 1.0)
    assert view["state"]["name"] == "running"
    assert view["seconds_left"] == pytest.approx(6 * 75 / 50)  # six updates of 75 steps at 50 a second
    assert lights(view)["learning"] == "unknown"
    # This process wrote it and lives; one that is not on this machine cannot be called running for ever.
    assert overview(source, now + 3600.0)["state"]["name"] == "quiet"
    connection = sqlite3.connect(source.store)
    connection.execute("UPDATE sessions SET process = 999999999")
    connection.commit()
    connection.close()
    stopped = overview(source, source.written() + 3600.0)
    assert stopped["state"]["name"] == "stopped"
    assert stopped["seconds_left"] is None
    assert "60 minutes" in stopped["state"]["said"]


def test_who_looks_at_an_old_run_does_not_make_it_look_alive(tmp_path: Path) -> None:
    """A reader makes an empty log beside the store: it must not pass for news."""
    source = Source.of(make_run(tmp_path / "r", updates=4, total=10))
    os.utime(source.store, (1e9, 1e9))
    overview(source)
    (source.folder / f"{STORE_NAME}-wal").touch()
    assert source.written() == 1e9


def test_an_alarm_turns_its_light_on_and_says_what_to_do(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r")
    with RunStore(folder / STORE_NAME) as store:
        recorder = StoreRecorder(store)
        recorder.event(
            Event("anomaly", 11, "KL is far too large", "error", data={"name": "kl_extreme", "metric": "kl_max"})
        )
        recorder.event(Event("anomaly", 1, "long over", "warning", data={"name": "value_collapse"}))
        recorder.event(Event("governor", 12, "the loss diverged", "warning", 1, 3))
    source = Source.of(folder)
    assert lights(overview(source)) == {
        "learning": "good",
        "policy": "bad",
        "critic": "good",  # its alarm is eleven updates old
        "gradients": "good",
        "networks": "good",
    }
    found = findings(source)
    assert found["counts"] == {"anomaly": 2, "governor": 1}
    assert [one["update"] for one in found["events"]] == [12, 11, 1]
    assert "learning rate" in found["events"][1]["remedy"]
    assert all(one["remedy"] for one in found["events"])


def test_curves_have_one_point_per_update_and_the_levels_of_the_baselines(source: Source) -> None:
    found = curves(source)
    assert found["updates"] == list(range(1, 13))
    assert found["every"] == 1
    assert found["series"]["episode/score"] == [60.0 + update for update in range(1, 13)]
    assert found["series"]["op/entropy"] == [0.0] * 12
    assert found["evaluation"] == {"updates": [4, 8, 12], "scores": [61.0, 65.0, 69.0]}
    assert found["band"]["low"][0] == pytest.approx(60.2)  # deciles of 60, 61, 62
    assert found["band"]["high"][0] == pytest.approx(61.8)
    assert found["levels"][1] == {"name": "learned", "score": 71.5, "low": 69.5, "high": 73.5}
    assert "policy_loss" not in found["series"]  # not measured is not there, not zero


def test_a_long_run_is_thinned_to_means(tmp_path: Path) -> None:
    folder = tmp_path / "long"
    with RunStore(folder / STORE_NAME) as store:
        recorder = StoreRecorder(store)
        for update in range(1, 2 * POINTS + 2):
            recorder.metrics(update, {"episode/score": float(update)})
        recorder.store.add(
            ("INSERT INTO episodes VALUES (?, 'train', 0, 0, 1, 1, 1, 1, 1, 1, NULL)", [(2 * POINTS + 1,)])
        )
    found = curves(Source.of(folder))
    assert found["every"] == 3
    assert len(found["updates"]) <= POINTS
    assert found["series"]["episode/score"][:2] == [2.0, 5.0]  # means of 1, 2, 3 and 4, 5, 6
    assert found["updates"][-1] == 2 * POINTS + 1


def test_a_damaged_comparison_is_passed_over(tmp_path: Path) -> None:
    make_comparison(tmp_path / "comparison")
    newer = tmp_path / "comparison-2"
    newer.mkdir()
    (newer / "comparison.json").write_text('{"rows": [')
    os.utime(newer / "comparison.json", (2e9, 2e9))
    assert [one["name"] for one in levels(tmp_path)] == ["none", "learned"]
    assert levels(tmp_path / "nowhere") == []


def test_the_episodes_of_an_update(source: Source) -> None:
    found = rollout(source, None, "train")
    assert (found["update"], found["newest"], found["all"]["episodes"], found["sampled"]) == (12, 12, 3, False)
    assert [tile["score"] for tile in found["tiles"]] == [71.0, 72.0, 73.0]
    assert found["tiles"][0]["plot"] == [50.0, 55.0, 60.0, 65.0, 70.0, 75.0]
    assert found["tiles"][0]["stages"] == [("stages.0", "FOSSILIZED")]
    assert [row["env"] for row in rollout(source, 3, "train", "score")["rows"]] == [2, 1, 0]
    assert rollout(source, 3, "train", "1; DROP TABLE episodes")["update"] == 3  # not a column: the usual order
    assert rollout(source, 99, "nobody")["tiles"] == []


def test_of_thousands_of_episodes_there_are_sums_a_page_and_the_sampled_ones(tmp_path: Path) -> None:
    source = Source.of(make_bulk_run(tmp_path / "bulk"))
    found = rollout(source, None, "train", "score", page=1)
    assert found["sampled"]
    assert (found["all"]["episodes"], found["all"]["governed"], found["pages"]) == (600, 1, 12)
    assert len(found["rows"]) == 50
    assert found["rows"][0]["env"] == 549  # the second fifty from the top
    assert [tile["env"] for tile in found["tiles"]] == [5]
    assert sum(found["histogram"]["counts"]) == 600
    assert found["counts"]["actions"] == {"WAIT": 900.0, "GERMINATE": 100.0}
    unrecorded = episode(source, (1, "train", 9))
    assert unrecorded is not None
    assert unrecorded["steps"] == []
    assert unrecorded["result"]["score"] == pytest.approx(50.75)


def test_one_episode_in_full(source: Source) -> None:
    told = episode(source, (12, "train", 1))
    assert told is not None
    assert told["slots"] == ["stages.0", "stages.1"]
    assert told["seeds"] == {"1": "norm"}
    assert [(s["stage"], s["from"], s["to"]) for s in told["lanes"][0]["segments"]] == [
        ("TRAINING", 0, 2),  # blending begins at the end of the second epoch
        ("BLENDING", 2, 4),
        ("FOSSILIZED", 4, EPOCHS),  # kept at the beginning of the fifth, so it never held for an epoch
    ]
    assert told["lanes"][1]["segments"] == [{"stage": "DORMANT", "seed": 0, "from": 0, "to": EPOCHS}]
    assert told["states"][3][0]["contribution"] == 3.5
    assert told["terms"] == {"objective": 72.0}
    assert episode(source, (12, "train", 77)) is None


def test_why_a_choice_was_illegal(source: Source) -> None:
    told = episode(source, (12, "train", 1))
    assert told is not None
    first, second, kept = told["steps"][0], told["steps"][1], told["steps"][4]
    assert first["choices"]["op"]["GERMINATE"] == 0.75
    assert "no unfinished seed to remove (dormant) at stages.0, stages.1" in first["illegal"]["op"]["PRUNE"]
    assert "budget" in first["illegal"]["blueprint"]["conv"]
    germinate = second["illegal"]["op"]["GERMINATE"]
    assert "not empty (training) at stages.0" in germinate
    assert "budget" in germinate  # of the slot that is empty
    assert "too young to remove (1 of 3 epochs) at stages.0" in second["illegal"]["op"]["PRUNE"]
    assert kept["illegal"]["slot"] == {"stages.1": "only a holding seed can be kept (dormant)"}


def test_a_store_of_the_second_version_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    today, old = make_run(tmp_path / "today"), tmp_path / "old"
    RunStore(old / STORE_NAME, migrations=MIGRATIONS[:2]).close()
    connection = sqlite3.connect(old / STORE_NAME)
    connection.execute("ATTACH ? AS today", (str(today / STORE_NAME),))
    for (name,) in connection.execute("SELECT name FROM main.sqlite_schema WHERE type = 'table'").fetchall():
        columns = ", ".join(row[1] for row in connection.execute(f"PRAGMA main.table_info({name})"))
        where = "WHERE name NOT LIKE 'reward/%'" if name == "metrics" else ""
        connection.execute(f"INSERT INTO main.{name} SELECT {columns} FROM today.{name} {where}")
    connection.commit()
    connection.close()
    before = (old / STORE_NAME).read_bytes()
    source = Source.of(old)
    told = episode(source, (12, "train", 0))
    assert told is not None
    assert [step["accuracy"] for step in told["steps"]] == [None] * EPOCHS
    assert [step["choices"] for step in told["steps"]] == [None] * EPOCHS
    assert [s["stage"] for s in told["lanes"][0]["segments"]][:2] == ["TRAINING", "BLENDING"]
    assert rollout(source, None, "train")["tiles"][0]["plot"] == [None] * EPOCHS
    assert curves(source)["series"]["reward/objective"] == [60.0 + update for update in range(1, 13)]
    assert (old / STORE_NAME).read_bytes() == before


def test_the_best_network_of_each_problem_and_files(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r")
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "best.safetensors").write_bytes(b"x")
    (folder / ".hidden.json").write_text("{}")
    secret = tmp_path / "secret.json"
    secret.write_text("{}")
    (folder / "link.json").symlink_to(secret)
    source = Source.of(folder)
    best = leaderboard(source)["best"]
    assert [(one["draw"], one["score"], one["update"]) for one in best] == [
        (102, 73.0, 12),
        (101, 72.0, 12),
        (100, 71.0, 12),
    ]
    assert best[0]["kept"] == ["norm at stages.0"]
    assert [one["name"] for one in files(source)] == ["checkpoints/best.safetensors"]
    assert not downloadable(source, folder / "link.json")
    assert not downloadable(source, folder / STORE_NAME)


def test_what_is_no_run_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no run and no grown network"):
        Source.of(tmp_path)
    (tmp_path / "history.json").write_text(json.dumps({"slots": 3}))
    with pytest.raises(StoreError, match="not the history of a grown network"):
        Source.of(tmp_path)
    other = tmp_path / "other.sqlite"
    connection = sqlite3.connect(other)
    connection.execute("CREATE TABLE songs (title TEXT)")
    connection.commit()
    with pytest.raises(StoreError, match="not the store of a run"):
        Source.of(other)
    newer = tmp_path / "newer" / STORE_NAME
    RunStore(newer, migrations=(*MIGRATIONS, "CREATE TABLE notes (note TEXT);")).close()
    with pytest.raises(StoreError, match="newer Esper"):
        Source.of(newer)

"""The run store: nothing is lost, half written or silently swallowed, and anyone can read it meanwhile.

Covers: R147, R157 (bounded memory, nothing dropped over long runs)
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from telemetry_samples import record_update, sample_episodes

from esper.telemetry.recorder import StoreRecorder
from esper.telemetry.records import Decision, SlotState, StepDetails
from esper.telemetry.schema import MIGRATIONS, RUN_TABLES
from esper.telemetry.store import STORE_NAME, RunStore, StoreError, open_readonly

INSERT = "INSERT OR REPLACE INTO metrics (update_number, name, value) VALUES (?, ?, ?)"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / STORE_NAME


@pytest.fixture
def store(path: Path) -> Iterator[RunStore]:
    with RunStore(path) as opened:
        yield opened


def ask(path: Path, sql: str) -> list[tuple[object, ...]]:
    with open_readonly(path) as connection:
        return connection.execute(sql).fetchall()


def last_update(path: Path) -> int:
    return int(str(ask(path, "SELECT max(update_number) FROM metrics")[0][0]))


def contents(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """Every row that belongs to an update, without the time of day."""
    with open_readonly(path) as connection:
        names = {name: [c[1] for c in connection.execute(f"PRAGMA table_info({name})")] for name in RUN_TABLES}
        return {
            name: connection.execute(f"SELECT {', '.join(c for c in columns if c != 'time')} FROM {name}").fetchall()
            for name, columns in names.items()
        }


def test_closing_writes_everything(path: Path) -> None:
    with RunStore(path) as store:
        recorder = StoreRecorder(store)
        for update in range(1, 4):
            record_update(recorder, update)
    assert not path.with_name(path.name + "-wal").exists()  # one plain file is left
    assert ask(path, "SELECT count(*) FROM decisions") == [(15,)]
    assert ask(path, "SELECT value FROM metrics WHERE name = 'kl' ORDER BY update_number") == [
        (0.01,),
        (0.02,),
        (0.03,),
    ]


def test_a_reader_sees_whole_updates_while_the_run_writes(path: Path, store: RunStore) -> None:
    names = [f"m{i}" for i in range(50)]
    done = threading.Event()
    counts: set[int] = set()

    def read() -> None:
        with open_readonly(path) as connection:
            while not done.is_set():
                rows = connection.execute("SELECT count(*) FROM metrics GROUP BY update_number").fetchall()
                counts.update(count for (count,) in rows)

    reader = threading.Thread(target=read)
    reader.start()
    for update in range(1, 200):
        for name in names:
            store.add((INSERT, [(update, name, 0.0)]))
        store.flush()
    done.set()
    reader.join()
    assert counts == {len(names)}


def test_what_waits_is_written_by_flush_in_one_transaction(path: Path, store: RunStore) -> None:
    statements: list[str] = []
    store._connection.set_trace_callback(statements.append)
    record_update(StoreRecorder(store), 1)
    assert statements == []
    assert ask(path, "SELECT * FROM metrics") == []
    store.flush()
    assert [sql for sql in statements if not sql.startswith("INSERT")] == ["BEGIN IMMEDIATE", "COMMIT"]
    assert ask(path, "SELECT count(*) FROM decisions") == [(5,)]


def test_without_a_flush_memory_is_bounded_and_nothing_is_dropped(path: Path) -> None:
    with RunStore(path, capacity=4) as store:
        for update in range(21):
            store.add((INSERT, [(update, "kl", 1.0)]))
            assert len(store._pending) < 4
        assert ask(path, "SELECT count(*) FROM metrics") == [(20,)]
    assert ask(path, "SELECT count(*) FROM metrics") == [(21,)]
    with pytest.raises(ValueError, match="capacity must be at least 1"):
        RunStore(path, capacity=0)


def test_a_store_that_nobody_closes_is_written_at_the_end_of_the_process(path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from esper.telemetry.store import RunStore; "
        f"RunStore(Path(sys.argv[1])).add(({INSERT!r}, [(1, 'kl', 0.5)]))"
    )
    subprocess.run([sys.executable, "-c", script, str(path)], check=True)
    assert ask(path, "SELECT value FROM metrics") == [(0.5,)]


def test_an_interrupted_flush_can_be_repeated(path: Path, store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add((INSERT, [(1, "kl", 0.5)]))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.flush()
    store.flush()
    assert ask(path, "SELECT value FROM metrics") == [(0.5,)]


def test_after_close_nothing_can_be_recorded_and_closing_again_is_nothing(path: Path) -> None:
    store = RunStore(path)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="is closed"):
        store.add((INSERT, [(1, "kl", 1.0)]))


def test_a_forked_worker_is_told_where_records_go(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(StoreError, match="a forked worker has to send its records"):
            store.add((INSERT, [(1, "kl", 1.0)]))


# -- errors ------------------------------------------------------------------------------------------------------------


def test_a_full_disk_reaches_the_next_record_and_close(path: Path) -> None:
    store = RunStore(path)
    recorder = StoreRecorder(store)
    record_update(recorder, 1)
    store.flush()
    (pages,) = store._connection.execute("PRAGMA page_count").fetchone()
    store._connection.execute(f"PRAGMA max_page_count = {pages + 2}")

    def run_on() -> None:
        for update in range(2, 100):
            record_update(recorder, update, decisions=100)
            store.flush()

    with pytest.raises(StoreError, match=r"cannot write the run store .*full.*resumed"):
        run_on()
    with pytest.raises(StoreError, match="full"):
        recorder.metrics(100, {"kl": 1.0})
    with pytest.raises(StoreError, match="full"):
        store.close()
    assert ask(path, "PRAGMA integrity_check") == [("ok",)]
    assert ask(path, "SELECT DISTINCT update_number FROM metrics")[0] == (1,)


def test_inside_with_the_error_is_said_once(path: Path) -> None:
    with pytest.raises(StoreError, match="full") as caught, RunStore(path) as store:  # noqa: PT012
        (pages,) = store._connection.execute("PRAGMA page_count").fetchone()
        store._connection.execute(f"PRAGMA max_page_count = {pages}")
        store.add((INSERT, [(i, "kl", 1.0) for i in range(10_000)]))
        store.flush()
    assert not isinstance(caught.value.__context__, StoreError)


def test_a_folder_that_goes_away_is_noticed(path: Path) -> None:
    store = RunStore(path)
    shutil.rmtree(path.parent)
    with pytest.raises(StoreError, match="was removed during the run"):  # noqa: PT012
        store.add((INSERT, [(1, "kl", 1.0)]))
        store.flush()
    with pytest.raises(StoreError, match="was removed"):
        store.close()


def test_a_row_that_cannot_be_stored_is_an_error_of_the_run(path: Path) -> None:
    store = RunStore(path)
    store.add((INSERT, [(1, "kl", 1.0)]), (INSERT, [(1, "kl", object())]))
    with pytest.raises(StoreError, match="not supported"):
        store.close()
    assert ask(path, "SELECT * FROM metrics") == []  # the call is written as a whole or not at all


def test_an_episode_that_comes_twice_is_an_error_and_replaces_nothing(path: Path) -> None:
    store = RunStore(path)
    recorder = StoreRecorder(store)
    recorder.episodes(sample_episodes(1, {"draw": 7}))
    store.flush()
    recorder.episodes(sample_episodes(1, {"draw": 8}))
    with pytest.raises(StoreError, match=r"recorded twice .*needs an `env` of its own"):
        store.close()
    assert ask(path, "SELECT draw FROM episodes") == [(7,)]


def test_an_unusable_place_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot open the run store"):
        RunStore(tmp_path / "file" / STORE_NAME)
    (tmp_path / "text.sqlite").write_text("no database " * 100)
    with pytest.raises(StoreError, match="not a database"):
        RunStore(tmp_path / "text.sqlite")


CHILD = """
    import resource, sys
    sys.path.insert(0, {tests!r})
    from pathlib import Path
    from telemetry_samples import record_update
    from esper.telemetry.recorder import StoreRecorder
    from esper.telemetry.store import RunStore, StoreError
    if {limit}:
        resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
    try:
        with RunStore(Path(sys.argv[1])) as store:
            recorder = StoreRecorder(store)
            for update in range(1, 100_000):
                record_update(recorder, update, decisions=40)
                store.flush()
                print(update, flush=True)
    except StoreError as error:
        sys.exit(f"StoreError: {{error}}")
"""


def child(path: Path, limit: int = 0) -> subprocess.Popen[str]:
    script = textwrap.dedent(CHILD).format(tests=str(Path(__file__).parent), limit=limit)
    words = [sys.executable, "-c", script, str(path)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def assert_whole(path: Path, promised: int) -> None:
    """Readable, and every update that was flushed is complete."""
    assert ask(path, "PRAGMA integrity_check") == [("ok",)]
    complete = f"SELECT count(*) FROM decisions WHERE update_number <= {promised}"
    assert ask(path, complete) == [(40 * promised,)]
    assert ask(path, f"SELECT count(*) FROM metrics WHERE update_number <= {promised}") == [(3 * promised,)]
    # The rows of one call belong together, also in what was written after the last promise.
    assert ask(path, "SELECT 1 FROM metrics GROUP BY update_number HAVING count(*) <> 3") == []


def test_kill_9_leaves_whole_transactions(path: Path) -> None:
    process = child(path)
    assert process.stdout is not None
    promised = 0
    for line in process.stdout:
        promised = int(line)
        if promised == 15:
            process.send_signal(signal.SIGKILL)
            break
    promised = max([promised, *(int(line) for line in process.stdout)])
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert_whole(path, promised)
    with RunStore(path) as store:  # and it can be taken up again
        assert last_update(path) >= promised
        store.rewind(promised)
        assert last_update(path) == promised


def test_a_file_size_limit_ends_in_one_clear_error(path: Path) -> None:
    process = child(path, limit=400_000)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.startswith("StoreError: cannot write the run store")
    assert len(err.strip().splitlines()) == 1
    assert_whole(path, int(out.split()[-1]))


# -- resume ------------------------------------------------------------------------------------------------------------


def test_rewind_gives_the_history_of_an_uninterrupted_run(tmp_path: Path) -> None:
    with RunStore(tmp_path / "whole.sqlite") as store:
        for update in range(1, 7):
            record_update(StoreRecorder(store), update)
    with RunStore(tmp_path / "broken.sqlite") as store:
        for update in range(1, 6):  # killed in update 5, after the checkpoint of update 3
            record_update(StoreRecorder(store), update, decisions=9 if update > 3 else 5)
    with RunStore(tmp_path / "broken.sqlite") as store:
        assert last_update(tmp_path / "broken.sqlite") == 5
        assert store.rewind(3) == 2 * (9 + 1 + 1 + 3 + 3)  # decisions, event, episode, its rewards, metrics
        store.begin_session(from_update=3, version="1", command=["esper", "train", "--resume"])
        for update in range(4, 7):
            record_update(StoreRecorder(store), update)
    assert contents(tmp_path / "broken.sqlite") == contents(tmp_path / "whole.sqlite")
    sessions = ask(tmp_path / "broken.sqlite", "SELECT from_update, version, command FROM sessions")
    assert sessions == [(3, "1", "esper train --resume")]


def test_rewind_also_forgets_what_is_still_waiting(path: Path) -> None:
    with RunStore(path) as store:
        for update in range(1, 5):
            record_update(StoreRecorder(store), update)
        store.rewind(2)
        assert last_update(path) == 2


def test_facts_about_the_run(path: Path, store: RunStore) -> None:
    store.describe({"task": "mixed", "settings": {"envs": 16, "worst": float("inf")}})
    store.describe({"task": "digits"})
    store.flush()
    facts = ask(path, "SELECT key, value FROM meta ORDER BY key")
    assert facts == [("settings", '{"envs": 16, "worst": "inf"}'), ("task", '"digits"')]


# -- versions ----------------------------------------------------------------------------------------------------------


def test_a_store_of_an_older_version_is_upgraded_in_one_go(path: Path) -> None:
    with RunStore(path) as store:
        record_update(StoreRecorder(store), 1)
    newer = (*MIGRATIONS, "ALTER TABLE episodes ADD COLUMN flops INTEGER;", "CREATE TABLE notes (note TEXT);")
    with RunStore(path, migrations=newer) as store:
        store.add(("INSERT INTO notes VALUES (?)", [("kept",)]))
    assert ask(path, "PRAGMA user_version") == [(len(MIGRATIONS) + 2,)]
    assert ask(path, "SELECT score, flops FROM episodes") == [(60.0, None)]
    assert ask(path, "SELECT score FROM v_progress") == [(60.0,)]


def older_store(path: Path, version: int) -> None:
    """A store of that version with one update: the columns that there were, copied from one of today."""
    today = path.with_name("today.sqlite")
    with RunStore(today) as store:
        record_update(StoreRecorder(store), 1)
    RunStore(path, migrations=MIGRATIONS[:version]).close()
    connection = sqlite3.connect(path)
    connection.execute("ATTACH ? AS today", (str(today),))
    for (name,) in connection.execute("SELECT name FROM main.sqlite_schema WHERE type = 'table'").fetchall():
        columns = ", ".join(row[1] for row in connection.execute(f"PRAGMA main.table_info({name})"))
        connection.execute(f"INSERT INTO main.{name} SELECT {columns} FROM today.{name}")
    connection.execute("DROP VIEW v_actions")
    connection.commit()
    connection.close()


def test_a_store_of_the_first_version_gets_the_views_of_this_one(path: Path) -> None:
    older_store(path, 1)
    with RunStore(path) as store:
        counted = {"sampled_episodes": 8.0, "actions/WAIT": 70.0, "actions/PRUNE": 30.0, "effective/PRUNE": 29.0}
        StoreRecorder(store).metrics(2, counted)
    rows = ask(path, "SELECT update_number, op, times, share, effective FROM v_actions ORDER BY 1, 2")
    assert rows == [(1, "GERMINATE", 5, 1.0, 5), (2, "PRUNE", 30, 0.3, 29), (2, "WAIT", 70, 0.7, None)]


def test_a_store_of_the_second_version_gets_the_columns_of_this_one(path: Path) -> None:
    """What was recorded before has no accuracy; what comes now has one, and details beside it."""
    older_store(path, 2)
    state = SlotState("layers.0", "TRAINING", 0.25, shadow=1.23456, shadow_error=0.5)
    details = StepDetails([state], {"op": {"WAIT": 0.123456, "PRUNE": None}})
    with RunStore(path) as store:
        decision = Decision(2, 0, 0, "WAIT", None, None, None, {}, None, False, "", accuracy=81.5, parameters=7)
        StoreRecorder(store).decision(dataclasses.replace(decision, details=details))
    assert ask(path, "SELECT update_number, accuracy, parameters FROM decisions WHERE env = 0 AND epoch = 0") == [
        (1, None, None),
        (2, 81.5, 7),
    ]
    ((slots, choices),) = ask(path, "SELECT slots, choices FROM step_details")
    # Four digits; what was not measured is left out, an illegal choice is null.
    assert json.loads(str(slots)) == [
        {"path": "layers.0", "stage": "TRAINING", "alpha": 0.25, "shadow": 1.235, "shadow_error": 0.5}
    ]
    assert json.loads(str(choices)) == {"op": {"WAIT": 0.1235, "PRUNE": None}}


def test_an_upgrade_that_fails_changes_nothing(path: Path) -> None:
    RunStore(path).close()
    broken = (*MIGRATIONS, "CREATE TABLE notes (note TEXT); SELECT * FROM nowhere;")
    with pytest.raises(StoreError, match="nowhere"):
        RunStore(path, migrations=broken)
    assert ask(path, "PRAGMA user_version") == [(len(MIGRATIONS),)]
    assert ask(path, "SELECT name FROM sqlite_schema WHERE name = 'notes'") == []


def test_a_store_of_a_newer_version_is_refused(path: Path) -> None:
    RunStore(path, migrations=(*MIGRATIONS, "CREATE TABLE notes (note TEXT);")).close()
    with pytest.raises(StoreError, match="newer Esper"):
        RunStore(path)


def test_reading_needs_no_right_to_write(path: Path, store: RunStore) -> None:
    record_update(StoreRecorder(store), 1)
    store.close()
    path.parent.chmod(0o555)
    try:
        assert ask(path.parent, "SELECT count(*) FROM episodes") == [(1,)]
    finally:
        path.parent.chmod(0o755)
    with open_readonly(path) as connection, pytest.raises(sqlite3.OperationalError, match="readonly"):
        connection.execute("DELETE FROM metrics")

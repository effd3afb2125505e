"""Training runs lose nothing: killed, cut off from power, or out of space at any operation, and then resumed.

After the resume the folder equals that of an undisturbed run: every checkpoint and the best policy byte for byte, the
same events, metrics and episodes, and no file more. The operations are found by tracing a run. Some of them are tried
here, a third of the kinds for each of three ways to fail; all, for five ways, on demand (`pytest tests/faults`).
"""

from __future__ import annotations

import random
import re
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_disk import after_power_cut
from faulty_run import Forker, Outcome

from esper.telemetry.schema import RUN_TABLES

LEFT_BY_READERS = ("run.sqlite-wal", "run.sqlite-shm")
"""A reader's connection makes and leaves them, in an undisturbed run as well."""


class Campaign:
    """Runs that fail, and the run that they are compared with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.forker = Forker(folder / "scratch")
        self.whole = folder / "whole"
        self.whole.mkdir()
        self.undisturbed = self.forker.train(self.whole)
        assert self.undisturbed.code == 0, self.undisturbed.said

    def operations(self, mode: str) -> list[str]:
        """Of an undisturbed run; a full disk refuses calls, and a script of SQL is one call."""
        if mode != "full":
            return self.undisturbed.operations
        root = Path(tempfile.mkdtemp(dir=self.folder))
        return self.forker.train(root, "full", 10**9).operations

    def fail_and_resume(self, mode: str, places: list[int]) -> list[str]:
        """Try each place; what went wrong, a line each."""
        return [line for line in (self._one(mode, at) for at in places) if line]

    def _one(self, mode: str, at: int) -> str:
        root, forker = self.folder / f"{mode}-{at}", self.forker
        root.mkdir()
        failure, _, how = mode.partition("-")
        failed = forker.train(root, failure, at)
        problem = _ended_badly(failure, failed)
        if failure == "cut" and failed.code == -9:
            after_power_cut(root, forker.cut_file, names_synced=how == "names")
        if newest(root / "run") < promised(failed.operations):
            problem = f"update {promised(failed.operations)} was saved and is gone"
        if how == "twice":
            forker.train(root, failure, random.Random(at).randrange(60))
        resumed = forker.train(root)
        if resumed.code != 0:
            problem = f"cannot be resumed: {resumed.said[-300:]}"
        problem = problem or differs(self.whole / "run", root / "run")
        return f"{mode} at operation {at}: {problem}" if problem else ""

    def close(self) -> None:
        self.forker.close()


def _ended_badly(failure: str, outcome: Outcome) -> str:
    """A full disk ends with one line; what is killed says nothing."""
    if failure != "full" or outcome.code == 0:
        return "" if outcome.code in (0, -9) else f"ended with {outcome.code}: {outcome.said[-300:]}"
    one_line = outcome.said.count("\n") == 1 and "Traceback" not in outcome.said
    return "" if outcome.code == 1 and one_line else f"ended with {outcome.code} and said {outcome.said[-300:]!r}"


def differs(whole: Path, run: Path) -> str:
    """How a run differs from the undisturbed one."""
    files, expected = ({str(p.relative_to(r)) for p in r.rglob("*")} - set(LEFT_BY_READERS) for r in (run, whole))
    if files != expected:
        return f"files {sorted(files ^ expected)}"
    for path in sorted((whole / "checkpoints").iterdir()):
        if path.read_bytes() != (run / "checkpoints" / path.name).read_bytes():
            return f"{path.name} is another one"
    for table in RUN_TABLES:
        if rows(run, table) != rows(whole, table):
            return f"the table {table}"
    return ""


def promised(operations: list[str]) -> int:
    """The last update whose checkpoint was renamed before the run went on to record the next one."""
    done = renamed = 0
    for what in operations:
        found = re.match(r"replace .*update-(\d+)", what)
        renamed = int(found[1]) if found else renamed
        done = renamed if what.startswith("sql") else done
    return done


def newest(run: Path) -> int:
    return max((int(path.stem[len("update-") :]) for path in run.glob("checkpoints/update-*")), default=0)


def rows(run: Path, table: str) -> list[tuple[object, ...]]:
    """All but what the clock decides."""
    with sqlite3.connect(run / "run.sqlite") as store:
        columns = [row[1] for row in store.execute(f"PRAGMA table_info({table})") if row[1] != "time"]
        clock = "WHERE name NOT LIKE 'seconds%' AND name <> 'steps_per_second'" if table == "metrics" else ""
        return sorted(store.execute(f"SELECT {', '.join(columns)} FROM {table} {clock}").fetchall(), key=repr)


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    made = Campaign(tmp_path_factory.mktemp("faults"))
    yield made
    made.close()


def test_the_undisturbed_run_has_everything_that_can_tear(campaign: Campaign) -> None:
    """A best policy of an update whose own checkpoint is dropped, and operations of every kind."""
    names = sorted(path.name for path in (campaign.whole / "run" / "checkpoints").iterdir())
    assert names == ["best.safetensors", "update-000003.safetensors"]
    found = {what.split()[0] for what in campaign.undisturbed.operations}
    assert {"write", "fsync", "replace", "unlink", "mkdir", "sql"} <= found
    best = [row for row in rows(campaign.whole / "run", "events") if "the best so far" in str(row)]
    assert len(best) == 2


MODES = ["kill", "kill-twice", "cut-names", "cut-content", "full"]
"""A power cut leaves the names that were synced, or today's names with the content that was synced."""


def one_of_each_kind(operations: list[str], rng: random.Random) -> list[int]:
    """Places; the tables of the store are made before anything can be lost. What the store does after a checkpoint is a
    kind of its own: from then on that checkpoint must be there."""
    places = [at for at, what in enumerate(operations) if not what.startswith(("sql CREATE", "sql DROP"))]
    rng.shuffle(places)
    kinds = {}
    for at in places:
        what = operations[at].split()[0]
        kinds[what, what == "sql" and promised(operations[: at + 1]) > 0] = at
    return sorted(kinds.values())


def test_a_run_that_fails_at_some_operation_loses_nothing(campaign: Campaign) -> None:
    """One test for three of the modes: processes that share the tests out would each make a campaign of their own."""
    problems = []
    for number, mode in enumerate(("kill-twice", "cut-content", "full")):
        places = one_of_each_kind(campaign.operations(mode), random.Random(number))
        assert len(places) >= 7, places
        problems += campaign.fail_and_resume(mode, places[number::3])
    assert problems == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_fails_at_any_operation_loses_nothing(campaign: Campaign, mode: str) -> None:
    tried = {path.name for path in campaign.folder.iterdir()}
    places = [at for at in range(len(campaign.operations(mode))) if f"{mode}-{at}" not in tried]
    assert campaign.fail_and_resume(mode, places) == []

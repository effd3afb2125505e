"""`esper query` from the shell's side."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from telemetry_samples import record_update, sample_decision

from esper.cli import main
from esper.telemetry.recorder import StoreRecorder
from esper.telemetry.schema import RUN_TABLES, VIEWS
from esper.telemetry.store import RunStore

Capture = pytest.CaptureFixture[str]
DOCS = Path(__file__).parents[2] / "docs" / "telemetry.md"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with RunStore(tmp_path / "run.sqlite") as store:
        for update in (1, 2):
            record_update(StoreRecorder(store), update)
        StoreRecorder(store).decision(sample_decision(3, message="[bold]not markup[/bold], really"))
    return tmp_path


def test_a_table_for_people(run: Path, capsys: Capture) -> None:
    assert main(["query", str(run), "SELECT update_number, score, clip_fraction FROM v_progress"]) == 0
    said = capsys.readouterr().out
    assert said.split() == ["update_number", "score", "clip_fraction", "1", "60", "–", "2", "60", "–", "2", "rows"]
    assert main(["query", str(run), "SELECT message FROM decisions WHERE update_number = 3"]) == 0
    assert "[bold]not markup[/bold], really" in capsys.readouterr().out


def test_json_and_csv_for_programs(run: Path, capsys: Capture) -> None:
    sql = "SELECT update_number, name, value FROM metrics WHERE name = 'kl'"
    assert main(["query", str(run / "run.sqlite"), sql, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows == [{"update_number": u, "name": "kl", "value": 0.01 * u} for u in (1, 2)]
    assert main(["query", str(run), "SELECT message, epoch FROM decisions WHERE update_number = 3", "--csv"]) == 0
    table = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert table == [["message", "epoch"], ["[bold]not markup[/bold], really", "0"]]
    assert main(["query", str(run), "SELECT * FROM metrics WHERE 0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert main(["query", str(run), "SELECT 1", "--json", "--csv"]) == 1
    assert main(["query", str(run), "SELECT 1 AS a, 2 AS b, 3 AS a", "--json"]) == 1  # one of them would be lost
    assert "several are called a: use AS" in capsys.readouterr().err


def test_without_sql_it_lists_what_there_is(run: Path, capsys: Capture) -> None:
    assert main(["query", str(run), "--json"]) == 0
    listed = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert set(listed) == {"meta", "sessions", *RUN_TABLES, *VIEWS}
    assert listed["metrics"] == {"name": "metrics", "kind": "table", "rows": 6, "columns": "name, update_number, value"}
    assert listed["v_progress"]["kind"] == "view"
    assert listed["v_progress"]["rows"] == 2
    assert main(["query", str(run)]) == 0
    assert "v_anomalies" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("SELECT colour FROM metrics", "no such column: colour"),
        ("SELEC 1", "syntax error"),
        ("DELETE FROM metrics", "a run can only be read (attempt to write a readonly database): ask with SELECT"),
        ("ATTACH DATABASE 'other.db' AS e", "a run can only be read (not authorized): ask with SELECT"),
        ("VACUUM INTO 'other.db'", "a run can only be read (authorization denied): ask with SELECT"),
        ("SELECT 1; SELECT 2", "one statement at a time. `esper query"),
        ("BEGIN", "gives no rows"),
    ],
)
def test_an_error_is_one_line_and_changes_nothing(
    run: Path, sql: str, said: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run)
    assert main(["query", str(run), sql]) == 1
    error = capsys.readouterr().err
    assert error.startswith("esper query: ")
    assert said in error
    assert len(error.strip().splitlines()) == 1
    assert {path.suffix for path in run.iterdir()} <= {".sqlite", ".sqlite-shm", ".sqlite-wal"}


def test_json_in_a_column_can_be_taken_apart(run: Path, capsys: Capture) -> None:
    """What keeps other files safe must not forbid SQLite's table-valued functions."""
    assert main(["query", str(run), "SELECT value FROM json_each('[7]')", "--csv"]) == 0
    assert capsys.readouterr().out == "value\n7\n"


def test_a_place_without_a_run_is_one_line(tmp_path: Path, capsys: Capture) -> None:
    assert main(["query", str(tmp_path)]) == 1
    assert "has no run.sqlite" in capsys.readouterr().err
    assert main(["query", str(tmp_path / "nowhere")]) == 1
    assert "neither a run's folder nor a run store" in capsys.readouterr().err
    (tmp_path / "run.sqlite").write_text("no database " * 100)
    assert main(["query", str(tmp_path)]) == 1
    assert "not a database" in capsys.readouterr().err


def test_from_the_shell_while_the_run_writes_and_into_head(tmp_path: Path) -> None:
    with RunStore(tmp_path / "run.sqlite") as store:
        for update in range(1, 3000):
            StoreRecorder(store).metrics(update, {"kl": 0.5})
        store.flush()
        words = f"{sys.executable} -m esper query {tmp_path} 'SELECT * FROM metrics' --csv | head -n 2"
        result = subprocess.run(words, shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout.splitlines() == ["name,update_number,value", "kl,1,0.5"]
    assert result.stderr == ""


def test_the_page_names_every_table_and_view() -> None:
    page = DOCS.read_text("utf-8")
    assert [name for name in ("meta", "sessions", *RUN_TABLES, *VIEWS) if f"`{name}`" not in page] == []

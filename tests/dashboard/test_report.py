"""`esper report`: one file, without scripts and without anything from elsewhere, for runs, networks and comparisons."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_up_runs import make_bulk_run, make_comparison, make_run

from esper.cli import main
from esper.dashboard.drawings import Line, lines, ticks
from esper.dashboard.growth_recorder import store_of_history
from esper.dashboard.markup import joined, number, table, tag
from esper.dashboard.report import report
from esper.dashboard.source import Source

HOSTILE = "<script>alert('x')</script><img src=x onerror=alert(1)>\"'&"


class Tags(HTMLParser):
    """What a browser would make of it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.said = ""
        self.feed(text)

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.names.append(name)
        self.attributes += attributes

    def handle_data(self, data: str) -> None:
        self.said += data


def history(folder: Path, **changes: object) -> Path:
    """A network that planted one seed, kept it, and was trained beside a control."""
    folder.mkdir(parents=True)
    stages = ["TRAINING", "TRAINING", "BLENDING", "FOSSILIZED"]
    planted = {"op": "GERMINATE", "slot": 0, "blueprint": "norm", "blend": "linear"}
    waited = {"op": "WAIT", "slot": None, "blueprint": None, "blend": None}
    epochs = [
        {
            "epoch": i,
            "val_accuracy": 50.0 + 10 * i,
            "parameters": 1200,
            "action": planted if i == 0 else waited,
            "effect": {"changed": i == 0, "message": "accuracy stands" if i == 0 else ""},
            "verdict": None,
            "stages": [stages[i]],
            "alphas": [i / 3],
            "contributions": {"0": {"accuracy": 4.0, "loss": 0.1, "error": 0.5}} if i == 2 else {},
            "shadow_benefits": {},
        }
        for i in range(4)
    ]
    changed = [("DORMANT", "GERMINATED", 0), ("GERMINATED", "TRAINING", 0), ("TRAINING", "BLENDING", 1)]
    told = {
        "format": 1,
        "controller": "heuristic",
        "slots": ["layer1"],
        "host_parameters": 1000,
        "rent": 5.0,
        "epochs": epochs,
        "transitions": [
            {"epoch": e, "slot": "layer1", "seed": 1, "source": s, "target": t, "reason": "because"}
            for s, t, e in changed
        ],
        "seeds": [],
        "control": [50.0, 52.0, 54.0, 56.0],
        "result": {"test_accuracy": 78.5, "control_accuracy": 55.0, "score": 77.5, "remarks": ["look at this"]},
    }
    (folder / "history.json").write_text(json.dumps(told | changes))
    return folder


@pytest.fixture(params=["run", "bulk", "grown", "comparison"])
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    make = {"run": make_run, "bulk": make_bulk_run, "grown": history, "comparison": make_comparison}[request.param]
    return make(tmp_path / request.param)  # type: ignore[operator]


def test_the_file_stands_alone(subject: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(subject)]) == 0
    file = subject / "report.html"
    assert capsys.readouterr().out.strip() == f"Written: {file}"
    text = file.read_text("utf-8")
    found = Tags(text)
    assert "script" not in found.names
    assert "link" not in found.names
    assert not [name for name, _ in found.attributes if name in ("src", "href") or name.startswith("on")]
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org)", text)
    assert "svg" in found.names
    assert found.names.count("h1") == 1
    assert len(text) < 200_000


def test_a_run_in_words_and_numbers(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r")
    make_comparison(folder / "comparison")
    said = Tags(report(folder)).said
    assert "went from 61.0 to 72.0 points" in said
    assert "the frozen policy scores 69.0" in said
    assert "21.5 points ahead of the best of the others, none" in said
    assert "No alarm is on." in said
    assert "not measured" not in said.partition("Alarms and events")[0]


def test_what_was_not_measured_is_said(tmp_path: Path) -> None:
    said = Tags(report(make_bulk_run(tmp_path / "r"))).said
    assert "Levels of the baselines: not measured" in said
    assert "evaluations were off" in said
    assert "nan" not in said.lower().replace("finance", "")


def test_a_grown_network(tmp_path: Path) -> None:
    said = Tags(report(history(tmp_path / "g"))).said
    assert "Growing changed the test accuracy from 55.0 % to 78.5 %." in said
    assert "accuracy stands" in said
    assert "look at this" in said
    assert "not grown" in said  # the control is drawn


def test_size_and_accuracy_are_those_of_the_network_that_came_back(tmp_path: Path) -> None:
    """That of an earlier epoch, say, without the seed of the last one."""
    result = {"validation_accuracy": 71.0, "control_accuracy": 55.0, "score": 71.0, "parameters": 1000}
    folder = history(tmp_path / "g", result=result)
    said = Tags(report(folder)).said
    assert "The validation accuracy ended at 71.0 %." in said
    assert "parameters1,000host 1,000size1.00times the host" in said.replace("\n", "")
    with Source.of(folder).reading() as store:
        (row,) = store.execute("SELECT score, accuracy, parameters FROM episodes").fetchall()
    assert tuple(row) == (71.0, 71.0, 1000)


def test_a_network_that_is_watched_while_it_grows_gives_the_same_rows(tmp_path: Path) -> None:
    source = Source.of(history(tmp_path / "g"))
    assert source.store.parent != source.folder  # made for this look, in a place of its own
    again = store_of_history(tmp_path / "g" / "history.json", tmp_path / "again.sqlite")
    queries = [
        "SELECT op, slot, accuracy, parameters FROM decisions WHERE arm = 'train'",
        "SELECT slots FROM step_details",
    ]
    with source.reading() as one, Source.of(again).reading() as two:
        for query in queries:
            assert [tuple(r) for r in one.execute(query)] == [tuple(r) for r in two.execute(query)]
        assert one.execute("SELECT count(*) FROM decisions WHERE arm = 'control'").fetchone()[0] == 4


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    told = json.loads((make_comparison(tmp_path / "c") / "comparison.json").read_text())
    told["task"] = told["rows"][1]["name"] = HOSTILE
    told["episodes"] = {"none": [], HOSTILE: told["episodes"]["learned"]}
    (tmp_path / "c" / "comparison.json").write_text(json.dumps(told))
    run = make_run(tmp_path / "r", task=HOSTILE)
    grown = history(tmp_path / "g", controller=HOSTILE, result={"remarks": [HOSTILE]})
    for path in (run, grown, tmp_path / "c"):
        found = Tags(report(path))
        assert not {"script", "img"} & set(found.names)
        assert HOSTILE in found.said


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": 3}', '{"rows": [{"name": "x"}]}', "nonsense"])
def test_a_file_that_is_no_comparison_is_one_line(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "comparison.json"
    file.write_text(text)
    assert main(["report", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "not a comparison" in said
    assert not (tmp_path / "report.html").exists()


DAMAGE = {
    "events": "UPDATE events SET data = '['",
    "details": "UPDATE step_details SET slots = '{'",
    "view": "DROP VIEW v_anomalies",
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_store_is_one_line(tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "r")
    with closing(sqlite3.connect(folder / "run.sqlite")) as connection, connection:
        connection.execute(DAMAGE[what])
    assert main(["report", str(folder)]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "run.sqlite cannot be read, it may be damaged" in said


def test_networks_that_diverged_and_scores_that_are_not_known_are_reported(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r")
    with closing(sqlite3.connect(folder / "run.sqlite")) as connection, connection:
        connection.execute("UPDATE episodes SET accuracy = NULL, score = NULL")
    file = make_comparison(folder / "comparison") / "comparison.json"
    told = json.loads(file.read_text())
    told["rows"][1]["score"] = {"value": None, "low": None, "high": None}
    file.write_text(json.dumps(told))
    assert "an accuracy (%) of not measured" in Tags(report(folder)).said
    assert "none has the best mean score, 50.0." in Tags(report(file)).said


def test_markup_escapes_text_and_attributes() -> None:
    assert tag("b", {"title": '"<'}, "<i>", tag("i", None, 3), None) == '<b title="&quot;&lt;">&lt;i&gt;<i>3</i></b>'
    assert joined(["a", ["<", tag("u", None)]]) == "a&lt;<u></u>"
    assert "not measured" in str(number(None))
    assert "not measured" in str(number(float("nan")))
    assert number(-1.25, ".1f") == "−1.2"
    assert '<td class="r">1</td>' in table(["a", "b"], [("x", 1)], (1,))


def test_ticks_are_round_and_lines_break_where_nothing_was_measured() -> None:
    assert ticks(0.0, 100.0) == [0.0, 25.0, 50.0, 75.0, 100.0]
    assert ticks(61.0, 72.0) == [65.0, 70.0]
    drawn = lines([Line("a", [1, 2, 3, 4], [1.0, None, 2.0, 3.0], "s1")], "A")
    (path,) = re.findall(r'<path d="([^"]*)" fill="none"', drawn)
    assert path.count("M") == 2
    assert "not measured" in lines([], "B")

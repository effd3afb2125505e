"""`esper compare` and `esper tune-heuristic` from the shell's side: what they print, write, and return."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from esper.agent.shipped import shipped_path
from esper.cli import main
from esper.cli.compare import Compare, _columns
from esper.env.rent import score
from esper.policy.heuristic import Heuristic, HeuristicSettings
from esper.training.catalogue import make_controller
from esper.training.comparison import Comparison, compare
from esper.training.statistics import Estimate
from esper.training.tuning import as_toml, plan_rounds

Capture = pytest.CaptureFixture[str]
PLAN = '[[grow]]\nepoch = 0\nslot = 0\nblueprint = "mlp_small"\n'


def test_compare_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.toml").write_text(PLAN)
    words = ["compare", "--task", "digits", "--controllers", "none,plan.toml", "--episodes", "2", "--workers", "1"]
    assert main([*words, "--out", "kept", "--json", "also/facts.json"]) == 0
    said = capsys.readouterr().out
    for part in (
        "none",
        "plan.toml",
        "from scratch",
        "static ×",
        "regret",
        "2 held-out draws",
        "2/14 episodes",
        "left",
    ):
        assert part in said, said
    assert (tmp_path / "kept" / "comparison.png").stat().st_size > 10_000
    facts = json.loads((tmp_path / "kept" / "comparison.json").read_text())
    assert facts == json.loads((tmp_path / "also" / "facts.json").read_text())
    _check_facts(facts)


def _check_facts(facts: dict[str, object]) -> None:
    episodes, rows = facts["episodes"], facts["rows"]
    assert isinstance(episodes, dict)
    assert isinstance(rows, list)
    assert {name: [e["number"] for e in some] for name, some in episodes.items()} == {
        "none": [0, 1],
        "plan.toml": [0, 1],
    }
    for some in episodes.values():
        for e in some:
            assert e["score"] == score(e["test_accuracy"], e["parameters"], e["host_parameters"])
            assert e["facts"]["kind"] == "digits"
    by_name = {row["name"]: row for row in rows}
    ours = [e["score"] for e in episodes["plan.toml"]]
    none = [e["score"] for e in episodes["none"]]
    assert by_name["plan.toml"]["score"]["value"] == pytest.approx(sum(ours) / 2)
    assert by_name["plan.toml"]["vs_none"]["value"] == pytest.approx((sum(ours) - sum(none)) / 2)
    assert any(row["is_control"] for row in rows)
    assert facts["interrupted"] is False


def test_where_no_growth_is_the_best_rule_its_column_is_there_once() -> None:
    row: Any = SimpleNamespace(vs_none=None, better_than_none=None, vs_best_rule=None, better_than_best_rule=None)
    estimate = Estimate(1.0, 0.5, 1.5, 2)
    for rule, headings in (("none", ["vs none"]), ("schedule", ["vs none", "vs schedule"])):
        columns = _columns(cast(Comparison, SimpleNamespace(best_rule=lambda rule=rule: rule)))
        assert [heading.partition("\n")[0] for heading in columns if heading.startswith("vs ")] == headings
        row.vs_none = estimate
        assert next(cell for heading, cell in columns.items() if heading.startswith("vs none"))(row).startswith("+1.0")


def test_json_to_the_standard_output_stands_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "compare",
        "--task",
        "digits",
        "--controllers",
        "none",
        "--episodes",
        "1",
        "--workers",
        "1",
        "--no-controls",
    ]
    assert main([*words, "--json", "-"]) == 0
    said = capsys.readouterr()
    facts = json.loads(said.out)
    assert [row["name"] for row in facts["rows"]] == ["none"]
    assert facts["rows"][0]["score"]["low"] is None  # one draw has no interval
    assert "1 held-out draw," in said.err
    kept = tmp_path / "compared" / "digits-0" / "comparison.json"
    before = kept.read_bytes()
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "there.json")
    assert main([*words, "--json", str(link)]) == 0
    assert link.is_symlink()
    assert json.loads((tmp_path / "there.json").read_text())["rows"]
    assert kept.read_bytes() == before
    assert (tmp_path / "compared" / "digits-0-2" / "comparison.json").exists()


def test_what_is_judged_again_keeps_its_first_judgement(tmp_path: Path) -> None:
    for _ in range(2):
        judged = Compare(task="digits", controllers="none", episodes=1, workers=1, controls=False, device="cpu")
        assert judged.into(tmp_path / "run" / "comparison") == 0
    found = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert found == ["comparison", "comparison-2"]


@pytest.mark.parametrize(
    ("words", "there", "message"),
    [
        ("compare --task digits --out kept", "kept/comparison.json", "kept holds a comparison already"),
        ("tune-heuristic --task digits --out mine.toml", "mine.toml", "mine.toml exists already"),
    ],
)
def test_nothing_is_written_over_what_was_found_before(
    words: str, there: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / there).parent.mkdir(exist_ok=True)
    (tmp_path / there).write_text("found before")
    assert main(words.split()) == 1
    assert message in capsys.readouterr().err
    assert (tmp_path / there).read_text() == "found before"


def test_a_comparison_that_fails_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise ValueError("it went wrong")

    monkeypatch.setattr("esper.training.comparison.compare", fail)
    assert main(["compare", "--task", "digits", "--controllers", "none"]) == 1
    assert "it went wrong" in capsys.readouterr().err
    assert not (tmp_path / "compared").exists()


@pytest.mark.slow
def test_ctrl_c_reports_what_is_complete(tmp_path: Path) -> None:
    words = "compare --task digits --episodes 4000 --workers 2 --controllers none,schedule --out kept"
    process = subprocess.Popen(
        [sys.executable, "-m", "esper", *words.split()],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("eager engine: ")
    first = process.stdout.readline()
    assert "episodes in" in first
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers, too
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Interrupted: this is what was completed" in output
    assert "Traceback" not in output
    assert json.loads((tmp_path / "kept" / "comparison.json").read_text())["interrupted"] is True


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("compare", "--task", "mnist2d"), "did you mean 'mnist1d'"),
        (("compare", "--controllers", "none,heuristc", "--task", "digits"), "did you mean 'heuristic'"),
        (("compare", "--controllers", "none,missing.toml", "--task", "digits"), "missing.toml"),
        (("compare", "--controllers", "none,none", "--task", "digits"), "named twice"),
        (("compare", "--controllers", ",", "--task", "digits"), "no controller is named"),
        (("compare", "--controllers", "none=heuristic", "--task", "digits"), "'none' is the name of a rule"),
        (("compare", "--controllers", "static ×2=random", "--task", "digits"), "is the name of a static control"),
        (("compare", "--episodes", "0"), "episodes must be at least 1"),
        (("compare", "--workers", "0", "--task", "digits"), "--workers must be at least 1"),
        (("compare", "--seed", "-1"), "--seed must be at least 0, not -1"),
        (("tune-heuristic", "--seed", "-1"), "--seed must be at least 0, not -1"),
        (("compare", "--task", "digits", "--out", "/proc/esper"), "choose another folder"),
        (("compare", "--task", "digits", "--json", "/proc/esper.json"), "choose another file with --json"),
        (("compare", "--device", "cuda:55", "--task", "digits"), "cannot be used here"),
        (("tune-heuristic", "--task", "digits", "--budget-steps", "10"), "too small: two candidates need 200"),
        (("tune-heuristic", "--task", "digits", "--out", "tuned.json"), ".toml file"),
        (("tune-heuristic", "--task", "digits", "--out", "/proc/tuned.toml"), "choose another file with --out"),
        (("tune-heuristic", "--task", "nowhere"), "unknown task family"),
    ],
)
def test_bad_input_ends_with_one_clear_line(
    words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    assert message in said


def test_tune_heuristic_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["tune-heuristic", "--task", "digits", "--budget-steps", "200", "--workers", "1", "--episodes", "1"]
    assert main([*words, "--out", "found/mine.toml", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["steps"] == 200  # two candidates on four draws of 25 epochs
    assert facts["candidates"] == 2
    assert facts["train_score"] >= facts["train_score_default"]
    assert set(facts["held_out"]) == {"heuristic", "tuned"}
    controller = make_controller("found/mine.toml")
    assert isinstance(controller, Heuristic)
    assert controller.name == "mine"
    assert controller.settings == HeuristicSettings(
        **{**facts["settings"], "rotation": tuple(facts["settings"]["rotation"])}
    )


def test_a_search_that_is_stopped_in_its_first_round_is_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """It was exit code 1, as if the search had failed."""
    requested = SimpleNamespace(requested=True)
    monkeypatch.setattr("esper.cli.tune_heuristic.interruptible", lambda: nullcontext(requested))
    words = ["tune-heuristic", "--task", "digits", "--budget-steps", "200", "--workers", "1"]
    assert main([*words, "--out", str(tmp_path / "h.toml")]) == 130
    assert capsys.readouterr().err.endswith("esper: interrupted\n")
    assert not (tmp_path / "h.toml").exists()


def test_the_rounds_of_a_search_by_hand() -> None:
    # 10 candidates on 4 draws (40 episodes), 4 go on to 8 more (32), 2 of them to 24 more (48): 120 episodes
    found = plan_rounds(budget_steps=120 * 25, horizon=25)
    assert [(one.candidates, one.start, one.stop) for one in found] == [(10, 0, 4), (4, 4, 12), (2, 12, 36)]
    assert sum(one.episodes for one in found) == 120
    assert plan_rounds(120 * 25 - 1, 25)[0].candidates == 9


def test_settings_survive_their_file(tmp_path: Path) -> None:
    settings = HeuristicSettings(patience=3, plateau_gain=0.7, rotation=("conv", "mlp"))
    path = tmp_path / "mine.toml"
    path.write_text(as_toml(settings, 'my "best"', ["found somewhere"]))
    controller = make_controller(str(path))
    assert isinstance(controller, Heuristic)
    assert (controller.name, controller.settings) == ('my "best"', settings)
    assert tomllib.loads(path.read_text())["heuristic"]["patience"] == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[heuristic]\npatienc = 3\n", "did you mean 'patience'"),
        ("[heuristic]\npatience = 2.5\n", "whole number"),
        ("[heuristic]\npatience = true\n", "whole number"),
        ("[heuristic]\nharm = -1\n", "at least 0"),
        ("[heuristic]\nharm = nan\n", "at least 0"),
        ("[heuristic]\nplateau_epochs = 0\n", "at least 1"),
        ('[heuristic]\nrotation = ["cnv"]\n', "unknown blueprint 'cnv'"),
        ('[heuristic]\nrotation = ["conv", "conv"]\n', "different blueprints"),
        ("heuristic = 3\n", "must hold a table"),
        ("[heuristic]\n[[grow]]\nepoch = 1\n", "unknown key 'grow'"),
        ("[heuristic\n", "not valid TOML"),
        ("name = 'x'\n", "needs at least one [[grow]]"),
    ],
)
def test_a_bad_controller_file_is_refused_with_the_reason(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"bad\.toml") as refused:
        make_controller(str(path))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("controllers", "settings", "message"),
    [
        ({"none": Heuristic()}, {}, "'none' is the name of a rule: call heuristic something else"),
        ({"mine": Heuristic}, {}, "the controller is the class Heuristic"),
        ({"mine": 3}, {}, "the controller must be a name"),
        ({"mine": "none"}, {"rent": "varied"}, "rent must be a number of at least 0"),
        ({"mine": "none"}, {"engine": "auto"}, "engine must be one of eager, graphs, stacked or None, not 'auto'"),
        ({"mine": "none"}, {"scratch_of": "other"}, "scratch_of is none of the controllers: 'other'"),
        ({"mine": "none"}, {"device": "cuda:99"}, "device 'cuda:99' cannot be used here"),
    ],
)
def test_what_a_script_gets_wrong_is_said_before_anything_is_trained(
    controllers: Any, settings: Any, message: str
) -> None:
    """An engine of another name was eager; another controller called `none` was what all were compared with."""
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        compare("digits", controllers, [0], controls=False, **settings)


def test_an_upgraded_checkpoint_replaces_no_other_file(tmp_path: Path, capsys: Capture) -> None:
    """With --out RUN/config.json the run was lost."""
    policy, other = tmp_path / "policy.safetensors", tmp_path / "config.json"
    policy.write_bytes(shipped_path("small").read_bytes())
    other.write_text("{}")
    assert main(["checkpoint", "upgrade", str(policy), "--out", str(other)]) == 1
    assert "exists already: choose another file with --out" in capsys.readouterr().err
    assert other.read_text() == "{}"
    assert main(["checkpoint", "upgrade", str(policy), "--out", str(policy)]) == 0
    assert "is current" in capsys.readouterr().out

"""`esper record`, `esper clone`, `esper offline` and `esper train --init` from the shell's side.

Covers: R083, R085, R081
"""

from __future__ import annotations

import json
import pickle
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from esper.agent.checkpoints import inspect_checkpoint, load_checkpoint
from esper.agent.tensor_files import read_tensor_file, write_tensor_file
from esper.cli import main
from esper.offline.recording import growth_schema, read
from esper.training.catalogue import make_controller
from esper.training.interrupt import Interrupt
from esper.training.run_folder import RunFolder

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven problems of digits, in two appends."""
    folder = tmp_path_factory.mktemp("recorded") / "digits"
    words = ["record", "--task", "digits", "--noise", "0.3", "--workers", "1", "--out", str(folder)]
    for episodes in ("3", "4"):
        assert main([*words, "--episodes", episodes]) == 0
    return folder


def test_record_goes_on_with_new_problems_and_says_where_they_come_from(recording: Path) -> None:
    found = read(recording, growth_schema())
    assert found.episodes.draw.tolist() == list(range(7))
    assert found.task == "digits"
    assert [entry["noise"] for entry in found.provenance] == [0.3, 0.3]
    assert found.provenance[0]["command"] == "esper record --task digits --controllers heuristic --noise 0.3"
    assert {"esper", "torch", "discount", "reward_mode"} <= found.provenance[0].keys()


def test_record_shows_how_different_the_actions_are(tmp_path: Path, capsys: Capture) -> None:
    words = ["record", "--task", "digits", "--controllers", "none", "--episodes", "1", "--workers", "1"]
    assert main([*words, "--out", str(tmp_path / "r")]) == 0
    said = capsys.readouterr().out
    assert "none: 1 episodes, mean return" in said
    assert "esper offline has nothing to improve on" in said
    assert "Recorded: 1 episodes, 25 steps" in said


@pytest.mark.parametrize("command", ["clone", "offline"])
def test_a_recording_becomes_a_controller(command: str, recording: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "learned.safetensors"
    words = [command, str(recording), "--out", str(out), "--epochs", "1", "--compare-episodes", "0"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "Agreement with the recorded controllers on 1 held-out episodes" in said
    assert "op: it did" in said
    assert f"esper train --init {out}" in said.replace("\n", "")
    assert make_controller(str(out)).name == "learned"
    caller = inspect_checkpoint(out).data["caller"]
    assert caller["learned_by"] == f"esper {command}"
    assert caller["controllers"] == ["heuristic"]
    assert caller["recorded"][0]["task"] == "digits"
    before = out.read_bytes()
    assert "learned.safetensors exists already: choose another file with --out" in only_line(capsys, words)
    assert out.read_bytes() == before
    (tmp_path / "taken").write_text("not a folder")
    for wrong in ("policy", "taken.safetensors"):
        words[3] = str(tmp_path / wrong)
        assert f"beside a folder of its name, not to {words[3]}" in only_line(capsys, words)


@pytest.mark.slow
def test_the_result_is_compared_with_its_teachers(recording: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "learned.safetensors"
    assert main(["clone", str(recording), "--out", str(out), "--epochs", "1", "--compare-episodes", "1"]) == 0
    facts = json.loads((tmp_path / "learned" / "comparison" / "comparison.json").read_text("utf-8"))
    assert [row["name"] for row in facts["rows"]] == ["none", "heuristic", "learned.safetensors"]


def only_line(capsys: Capture, words: list[str], code: int = 1) -> str:
    assert main(words) == code
    said = capsys.readouterr().err.strip()
    assert "\n" not in said
    return said


@pytest.mark.parametrize("command", ["clone", "offline"])
def test_what_cannot_be_used_ends_with_one_line(command: str, recording: Path, tmp_path: Path, capsys: Capture) -> None:
    assert "there is no recording" in only_line(capsys, [command, str(tmp_path / "nothing")])
    bad = tmp_path / "bad"
    bad.mkdir()
    assert "holds no recorded episodes" in only_line(capsys, [command, str(bad)])
    whole = next(recording.glob("*.safetensors")).read_bytes()
    file = bad / "episodes-000001-00000000.safetensors"
    for content in (whole[:-100], whole[:50], b"", pickle.dumps({"hostile": True}), b"\xff" * 64):
        file.write_bytes(content)
        assert f"esper {command}: {file} was refused" in only_line(capsys, [command, str(bad)])
    file.write_bytes(whole)
    assert "too few to learn from" in only_line(capsys, [command, str(bad)])


@pytest.mark.parametrize("command", ["clone", "offline"])
@pytest.mark.parametrize("name", ["observation.overall", "observation.slots", "observation.costs", "reward"])
def test_numbers_too_large_to_learn_from_are_refused(
    command: str, name: str, recording: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Their squares are infinite: the policy that was written could not be loaded, and the command said it was fine."""
    bad, out = tmp_path / "bad", tmp_path / "learned.safetensors"
    shutil.copytree(recording, bad)
    for path in bad.glob("*.safetensors"):  # in all: some are held out
        file = read_tensor_file(path, "esper-episodes")
        file.tensors[name].view(-1)[0] = 3e38
        write_tensor_file(path, file.tensors, "esper-episodes", json.loads(file.header or ""))
    words = [command, str(bad), "--out", str(out), "--epochs", "1", "--compare-episodes", "0"]
    assert f"{name} holds 3e+38, which is too large to learn from" in only_line(capsys, words)
    assert not out.exists()


@pytest.mark.parametrize(("option", "value"), [("temperature", "nan"), ("temperature", "inf"), ("conservative", "nan")])
def test_settings_that_are_no_numbers_are_refused(
    option: str, value: str, recording: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "learned.safetensors"
    assert option in only_line(capsys, ["offline", str(recording), "--out", str(out), f"--{option}", value])
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--noise", "1.5"], "--noise must be a number from 0 to 1"),
        (["--episodes", "0"], "episodes must be at least 1"),
        (["--controllers", "heuristik"], "did you mean 'heuristic'?"),
        (["--task", "digit"], "did you mean 'digits'?"),
    ],
)
def test_record_refuses_what_makes_no_sense(words: list[str], message: str, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "r"
    assert message in only_line(capsys, ["record", "--out", str(out), *words])
    assert not out.exists()


def test_a_damaged_recording_is_not_added_to(recording: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "episodes-000001-00000000.safetensors").write_bytes(b"no")
    assert "was refused" in only_line(capsys, ["record", "--task", "digits", "--out", str(tmp_path)])
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow
def test_training_starts_from_a_policy_and_resumes_with_its_teacher(recording: Path, tmp_path: Path) -> None:
    """Two updates in one go, or one, resumed after the first file is gone: the same weights, the same teacher."""
    policy = tmp_path / "clone.safetensors"
    words = ["--epochs", "1", "--compare-episodes", "0"]
    assert main(["clone", str(recording), "--out", str(policy), *words]) == 0
    quick = ["--workers", "1", "--compare-episodes", "0"]
    train = ["train", "--task", "digits", "--envs", "2", "--evaluate-every", "0", *quick]
    start = ["--init", str(policy), "--teacher-kl", "0.5"]
    assert main([*train, *start, "--updates", "2", "--run", str(tmp_path / "whole")]) == 0
    assert main([*train, *start, "--updates", "1", "--run", str(tmp_path / "halves")]) == 0
    policy.unlink()
    assert main(["train", "--resume", str(tmp_path / "halves"), "--updates", "2", *quick]) == 0
    ends = [load_checkpoint(RunFolder(tmp_path / name).checkpoint(2)).tensors for name in ("whole", "halves")]
    assert all(torch.equal(ends[0][name], tensor) for name, tensor in ends[1].items())
    first = load_checkpoint(RunFolder(tmp_path / "whole").start).tensors
    moved = (ends[0]["network/op_head.out.weight"] - first["network/op_head.out.weight"]).abs().max()
    assert 0.0 < float(moved) < 0.05  # it learnt, from there on


def test_a_teacher_is_not_recorded_under_the_name_of_another_rule(tmp_path: Path, capsys: Capture) -> None:
    """The clone was then compared with the rule of that name, as if that had taught it."""
    out = tmp_path / "recording"
    said = only_line(capsys, ["record", "--task", "digits", "--controllers", "heuristic=random", "--out", str(out)])
    assert "'heuristic' is the name of a rule: record random under another" in said
    assert not out.exists()


def test_a_start_that_cannot_be_used_leaves_no_run(tmp_path: Path, capsys: Capture) -> None:
    run = tmp_path / "run"
    words = ["train", "--task", "digits", "--run", str(run)]
    assert "there is no checkpoint" in only_line(capsys, [*words, "--init", str(tmp_path / "nothing.safetensors")])
    assert "needs a teacher" in only_line(capsys, [*words, "--teacher-kl", "0.1"])
    hostile = tmp_path / "hostile.safetensors"
    hostile.write_bytes(pickle.dumps({"version": 1}))
    assert "was not loaded" in only_line(capsys, [*words, "--init", str(hostile)])
    assert not run.exists()


def test_a_recording_that_is_stopped_before_its_first_episode_is_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """It was exit code 1: "holds no recorded episodes"."""
    requested = Interrupt()
    requested.requested = True
    monkeypatch.setattr("esper.cli.record.interruptible", lambda: nullcontext(requested))
    out = tmp_path / "recording"
    assert main(["record", "--task", "mixed/vector", "--episodes", "1", "--workers", "1", "--out", str(out)]) == 130
    assert "esper: interrupted" in capsys.readouterr().err
    assert not out.exists()

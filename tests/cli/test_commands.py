"""Every command of the `esper` program, from the shell's side: what it prints, writes, and returns."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from esper import __version__
from esper.cli import main
from esper.tasks.family import get_family
from esper.training.evaluation import Job, run_job

Capture = pytest.CaptureFixture[str]
ESPER = [sys.executable, "-m", "esper"]


def test_without_a_command_it_shows_the_commands(capsys: Capture) -> None:
    assert main([]) == 2
    assert "grow" in capsys.readouterr().out


def test_grow_writes_what_it_promises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["grow", "--epochs", "12", "--seed", "3", "--out", "kept", "--json", "--controller", "schedule"]) == 0
    facts = json.loads(capfd.readouterr().out)  # also of what libraries write to the file descriptor
    written = {path.name for path in (tmp_path / "kept").iterdir()}
    assert written == {
        "model.pt2",
        "model.safetensors",
        "model.py",
        "architecture.json",
        "history.json",
        "growth.png",
    }
    assert facts["parameters"] > facts["host_parameters"]
    assert facts["flops_per_example"] > facts["host_flops_per_example"]
    assert len(facts["seeds"]) == 3


def test_grow_shows_tables_to_a_person(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["grow", "--task", "digits", "--epochs", "2", "--controller", "none"]) == 0
    said = capsys.readouterr().out
    assert "Nothing was grown" in said
    assert "test accuracy" in said
    assert (tmp_path / "grown" / "digits-none-0" / "model.pt2").exists()


def test_grow_on_a_problem_of_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """The held-out problem that `esper compare` knows by this number, epoch by epoch the same."""
    monkeypatch.chdir(tmp_path)
    assert main(["grow", "--task", "mixed/vector", "--draw", "3", "--controller", "heuristic", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["out"] == "grown/mixed-vector-heuristic-draw-3"
    draw = get_family("mixed/vector").draw(3, held_out=True)
    history = json.loads((tmp_path / facts["out"] / "history.json").read_text())
    assert len(history["epochs"]) == draw.horizon
    assert (tmp_path / facts["out"] / "model.pt2").exists()
    (episode,) = run_job(Job("heuristic", "mixed/vector", "heuristic", (3,)))
    assert history["epochs"][-1]["val_accuracy"] == pytest.approx(episode.val_accuracy)
    assert facts["host_parameters"] == episode.host_parameters


def test_limits_of_a_problem_can_be_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["grow", "--task", "digits", "--draw", "0", "--epochs", "3", "--max-seeds", "1", "--json", "--no-control"]
    assert main([*words, "--controller", "random"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["out"] == "grown/digits-random-draw-0"  # not the place of `--task digits`, which is another problem
    assert len(json.loads((tmp_path / facts["out"] / "history.json").read_text())["epochs"]) == 3


def test_a_config_file_gives_defaults_that_options_override(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.toml").write_text('controller = "none"\nepochs = 1\ncontrol = false\nout = "from-file"\n')
    assert main(["grow", "--config", "my.toml", "--epochs", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["test_accuracy_not_grown"] is None
    history = json.loads((tmp_path / "from-file" / "history.json").read_text())
    assert len(history["epochs"]) == 2


def test_ctrl_c_saves_and_says_so(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*ESPER, "grow", "--epochs", "5000", "--out", "kept", "--no-control"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    assert "epoch 10/5000" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "what was grown so far is kept" in output
    assert (tmp_path / "kept" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("grow", "--task", "mnist2d"), "did you mean 'mnist1d'"),
        (("grow", "--controller", "heuristc"), "did you mean 'heuristic'"),
        (("grow", "--param-budget", "10"), "smaller than the host"),
        (("grow", "--task", "cifar10", "--data-dir", "nowhere"), "nowhere"),
        (("grow", "--device", "cuda:55"), "cannot be used here"),
        (("grow", "--config", "missing.toml"), "missing.toml"),
        (("grow", "--out", "/proc/esper"), "choose another folder"),
        (("grow", "--controller", "plan.toml"), "plan.toml"),
        (("grow", "--task", "mixed/vectr"), "no kind of mixed problem starts so"),
        (("grow", "--task", "mixed", "--draw", "-1"), "--draw must be at least 0, not -1"),
        (("grow", "--task", "mixed", "--seed", "1"), "choose another problem with --draw"),
        (("grow", "--task", "digits", "--epochs", "0"), "--epochs must be at least 1"),
        (("grow", "--task", "digits", "--max-seeds", "-1"), "--max-seeds must be at least 0, not -1"),
        (("grow", "--task", "digits", "--seed", "-1"), "--seed must be at least 0, not -1"),
        (("record", "--task", "digits", "--seed", "-1"), "--seed must be at least 0, not -1"),
        (("train", "--task", "digits", "--seed", "-1"), "--seed must be at least 0, not -1"),
        (("train", "--task", "digits", "--workers", "0"), "--workers must be at least 1, not 0"),
        (("train", "--task", "digits", "--compare-episodes", "-1"), "--compare-episodes must be at least 0, not -1"),
        (("grow", "--controller", "."), "holds no training run"),
    ],
)
def test_bad_input_ends_with_one_clear_line(
    words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert message in said
    assert list(tmp_path.iterdir()) == []


def test_the_version(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"esper {__version__}\n"
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8")
    assert __version__ == tomllib.loads(project)["project"]["version"]


def test_ctrl_c_while_a_module_is_imported(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Python 3.11 wraps what happens while a class is made into a RuntimeError."""

    class Impatient:
        def __set_name__(self, owner: type, name: str) -> None:
            raise KeyboardInterrupt

    def load(name: str) -> object:
        return type("Module", (), {"COMMAND": Impatient()})

    monkeypatch.setattr("esper.cli.importlib.import_module", load)
    assert main(["grow"]) == 130
    assert capsys.readouterr().err == "esper: interrupted\n"


def test_what_fails_after_a_ctrl_c_is_still_said(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def run(command: object) -> int:
        try:
            raise KeyboardInterrupt
        finally:
            raise OSError("the disk is full")

    monkeypatch.setattr("esper.cli.info.Info.run", run)
    assert main(["info"]) == 1
    assert capsys.readouterr().err == "esper info: the disk is full\n"


def test_bad_usage_returns_two(capsys: Capture) -> None:
    assert main(["grwo"]) == 2
    assert capsys.readouterr().err == "esper: unknown command 'grwo': did you mean 'grow'?\n"
    assert main(["xyz"]) == 2
    assert "the commands are train, grow, " in capsys.readouterr().err
    assert main(["grow", "--epochs", "many"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("esper grow: Error parsing --epochs: ")
    assert said.endswith("'many'; `esper grow --help` shows the options\n")
    assert main(["train", "--ppo.learning-rte", "1e-3"]) == 2
    assert (
        "Unrecognized options: --ppo.learning-rte, 1e-3; did you mean --ppo.learning-rate?" in capsys.readouterr().err
    )


def test_help_shows_the_values_that_will_be_used(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["grow", "--help"])
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "None" not in said
    assert "--param-budget INT Most parameters that the grown network may have. (default: none)" in said
    assert "--epochs INT Epochs of training; the controller acts once per epoch. (default: 40, or what" in said


def test_info_lists_what_there_is(capsys: Capture) -> None:
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {"mnist1d", "digits", "cifar10", "text", "stories"} <= set(facts["tasks"])
    assert {"none", "random", "schedule", "heuristic"} <= set(facts["controllers"])
    assert "conv2d" in facts["blueprints"]["depthwise"]
    assert main(["info"]) == 0
    assert "depthwise" in capsys.readouterr().out


def test_help_does_not_wait_for_torch(tmp_path: Path) -> None:
    code = "import sys, esper.cli; esper.cli.main(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("words", [["--help"], ["grow", "--help"]])
def test_a_reader_of_help_that_leaves_early_is_no_failure(words: list[str]) -> None:
    process = subprocess.Popen([sys.executable, "-m", "esper", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()  # as `| head` does
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait(60) == 0


def test_help_into_a_closed_output_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # as Python has it after `>&-`
    assert main(["--help"]) == 0
    with pytest.raises(SystemExit) as ended:
        main(["grow", "--help"])
    assert not ended.value.code

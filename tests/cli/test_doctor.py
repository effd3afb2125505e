"""`esper doctor` and `esper completion`."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from esper.cli import COMMANDS, doctor, main
from esper.cli.doctor import Finding
from esper.training.speed import Work, training_speed

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "EPOCHS", 2)
    monkeypatch.setattr(doctor, "EPISODES", 1)
    monkeypatch.setattr(doctor, "SECONDS", 0.01)


def test_a_sound_installation_is_one_line_for_each_check(capsys: Capture) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} <= {"ok", "note"}
    said = {line.split()[1].rstrip(":"): line for line in lines}
    assert {"esper", "python", "packages", "extras", "controllers", "threads", "folder", "cpu"} <= set(said)
    assert "torch 2." in said["packages"]
    assert "epochs a second" in said["cpu"]


def test_a_missing_package_is_broken(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    found = importlib.metadata.version

    def without_tyro(name: str) -> str:
        if name == "tyro":
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(importlib.metadata, "version", without_tyro)
    assert main(["doctor", "--json"]) == 1
    findings = {one["what"]: one for one in json.loads(capsys.readouterr().out)}
    assert findings["packages"]["verdict"] == "broken"
    assert "pip install tyro" in findings["packages"]["said"]


def test_a_check_that_fails_is_a_line_and_not_the_end(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def _devices() -> Iterator[Finding]:
        raise RuntimeError("no kernel image\nis available")
        yield

    monkeypatch.setattr(doctor, "CHECKS", (_devices, doctor._folder))
    assert main(["doctor"]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first == "broken  devices: RuntimeError: no kernel image is available"
    assert second.startswith("ok      folder: ")


@pytest.mark.parametrize(("alone", "verdict", "says"), [(60.0, "note", "6.0 times"), (11.0, "ok", "not train faster")])
def test_threads_that_slow_a_small_network_down_are_a_note(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, alone: float, verdict: str, says: str
) -> None:
    threads = [3]
    monkeypatch.setattr("torch.get_num_threads", lambda: threads[-1])
    monkeypatch.setattr("torch.set_num_threads", threads.append)
    monkeypatch.setattr("esper.training.speed.training_speed", lambda *_: alone if threads[-1] == 1 else 10.0)
    monkeypatch.setattr(doctor, "CHECKS", (doctor._threads,))
    assert main(["doctor"]) == 0
    line = capsys.readouterr().out
    assert line.startswith(verdict)
    assert says in line
    assert threads == [3, 1, 3]  # as it was


def test_a_small_network_is_timed_at_the_threads_of_now() -> None:
    assert training_speed(Work(channels=(2, 2, 2), size=4, batch=4, updates=1, validation=4), 0.01) > 0.0


def test_a_damaged_controller_is_broken(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def damaged(name: str) -> None:
        raise ValueError(f"{name} has another sha256")

    monkeypatch.setattr("esper.training.catalogue.make_controller", damaged)
    monkeypatch.setattr(doctor, "CHECKS", (doctor._controllers,))
    assert main(["doctor"]) == 1
    assert "broken  controllers: ValueError: small has another sha256" in capsys.readouterr().out


def test_completion_knows_commands_and_options(capsys: Capture) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in COMMANDS)
    assert "--param-budget" in script
    if shutil.which("bash"):
        asked = f"{script}\nCOMP_WORDS=(esper gr); COMP_CWORD=1; " + (
            'complete -p esper >/dev/null && f=$(complete -p esper | sed "s/.*-F \\([^ ]*\\).*/\\1/") && '
            '$f esper gr esper; echo "found: ${COMPREPLY[*]}"'
        )
        said = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=False, timeout=30)
        assert "found: grow" in said.stdout, said.stderr[-500:]


def test_a_shell_without_completion_is_refused(capsys: Capture) -> None:
    assert main(["completion", "fish"]) == 2
    assert "'bash', 'zsh'" in capsys.readouterr().err

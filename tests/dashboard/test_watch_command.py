"""`esper watch` and the --watch of other commands, from the shell to the answer."""

from __future__ import annotations

import ast
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from made_up_runs import make_run

import esper
from esper.cli import main
from esper.cli.watch import listen
from esper.dashboard.overview import overview
from esper.dashboard.source import Source
from esper.telemetry.store import STORE_NAME

pytest.importorskip("uvicorn", reason="the page needs esper[web]")
Capture = pytest.CaptureFixture[str]


def test_a_server_for_others_prints_its_token_once_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", updates=2)
    words = [sys.executable, "-m", "esper", "watch", str(run), "--host", "0.0.0.0", "--allow-host", "127.0.0.1"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        address, _, token = first.split()[-1].partition("?token=")
        port = address.rstrip("/").rpartition(":")[2]
        question = f"http://127.0.0.1:{port}/api/runs"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(question)
        asked = urllib.request.Request(question, headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(asked) as answer:
            assert json.load(answer) == [{"id": 0, "name": "r"}]
        process.send_signal(signal.SIGINT)
        said, complained = process.communicate(timeout=20)
    assert token not in said
    assert "Traceback" not in complained
    assert process.returncode == 130


def test_the_page_of_a_command_that_is_killed_ends_with_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", updates=2)
    words = f"""
import os, signal, sys
from pathlib import Path
from rich.console import Console
from esper.cli.watch import serving_page
with serving_page(True, Path({str(run)!r}), Console()):
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=False, timeout=60)
    port = int(killed.stdout.split()[3].rstrip("/").rpartition(":")[2])
    for _ in range(100):
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)):
                return
        time.sleep(0.1)
    pytest.fail("the page is still there")


def test_a_network_is_recorded_while_it_grows(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["grow", "--task", "digits", "--controller", "heuristic", "--epochs", "3", "--watch", "--out", "g"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "Watch it on http://127.0.0.1:" in said
    assert "to see it again: esper watch g" in said
    history = json.loads(Path("g/history.json").read_text())
    view = overview(Source.of(Path("g")))
    assert (view["kind"], view["update"], view["updates"], view["state"]["name"]) == ("growth", 3, 3, "finished")
    assert view["task"] == "digits"
    assert view["accuracy"] == history["epochs"][-1]["val_accuracy"]
    assert view["control_accuracy"] == history["control"][-1]
    assert view["result"] == history["result"]
    # The page of the folder without its store says the same.
    (Path("g") / STORE_NAME).unlink()
    again = overview(Source.of(Path("g")))
    for name in ("accuracy", "control_accuracy", "parameters", "host_parameters", "result", "controller"):
        assert again[name] == view[name], name


@pytest.mark.parametrize(
    "words", [["train", "--task", "digits", "--run", "r"], ["grow", "--task", "digits", "--out", "r"]]
)
def test_without_the_packages_nothing_is_begun(
    words: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "esper.dashboard.server", None)
    assert main([*words, "--watch"]) == 1
    said = capsys.readouterr().err
    assert "pip install 'esper[web]'" in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_port_that_is_taken(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "r", updates=1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr("esper.dashboard.server.serve", lambda *given: pytest.fail("it was served"))
        assert main(["watch", str(run), "--port", str(port)]) == 1
        assert f"port {port}" in capsys.readouterr().err
    with listen("127.0.0.1", None) as first, listen("127.0.0.1", None) as second:
        assert first.getsockname()[1] != second.getsockname()[1]


@pytest.mark.parametrize("host", ["nowhere.invalid", "256.1.1.1", "", "127.0.0.1:80"])
def test_a_host_that_cannot_be_had(tmp_path: Path, capsys: Capture, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "r", updates=1)
    monkeypatch.setattr("esper.dashboard.server.serve", lambda *given: pytest.fail("it was served"))
    assert main(["watch", str(run), "--host", host]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "--host" in said


def test_only_the_server_needs_the_packages_of_the_web() -> None:
    needing = set()
    for path in Path(esper.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(name.split(".")[0] in ("starlette", "uvicorn") for name in names):
                needing.add(path.name)
    assert needing == {"server.py"}

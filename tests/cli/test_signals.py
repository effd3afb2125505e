"""What ends a command from outside: Ctrl-C, SIGTERM, SIGHUP, a closed terminal. What was done is kept."""

from __future__ import annotations

import json
import os
import pty
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from esper.cli import main
from esper.telemetry.store import STORE_NAME, RunStore
from esper.training.interrupt import ended_by_signals, interruptible
from esper.training.run_folder import RunFolder

ESPER = [sys.executable, "-m", "esper"]
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
SIGNALS = pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)


def start(*words: str, cwd: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    out = subprocess.PIPE
    return subprocess.Popen([*ESPER, *words], cwd=cwd, stdout=out, stderr=subprocess.STDOUT, text=True, env=environment)


@pytest.mark.slow
def test_a_signal_ends_growing_as_ctrl_c_does(tmp_path: Path) -> None:
    words = ("grow", "--task", "digits", "--controller", "none", "--epochs", "5000", "--out", "kept", "--no-control")
    process = start(*words, cwd=tmp_path)
    assert process.stdout is not None
    assert "epoch 10/5000" in process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == CODES[signal.SIGTERM], output
    assert "what was grown so far is kept" in output
    assert (tmp_path / "kept" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_signal_to_all_processes_of_a_training_run_loses_nothing(tmp_path: Path) -> None:
    """As a batch system does it, to workers as well."""
    words = ("train", "--task", "digits", "--envs", "2", "--updates", "500", "--workers", "2", "--run", "r")
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [*ESPER, *words, "--evaluate-every", "0"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("eager engine: ")
    assert "update 1," in process.stdout.readline()
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    assert "continue with: esper train --resume r" in output
    assert RunFolder(tmp_path / "r").latest() is not None


@pytest.mark.slow
def test_a_closed_terminal_loses_nothing(tmp_path: Path) -> None:
    """The kernel sends SIGHUP, and from then on every line that is printed would be an error."""
    words = ["grow", "--task", "digits", "--controller", "none", "--epochs", "5000", "--out", "kept", "--no-control"]
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(tmp_path)
        os.execv(sys.executable, [*ESPER, *words])
    while b"growing" not in os.read(terminal, 10_000):
        pass
    os.close(terminal)
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 129
    assert (tmp_path / "kept" / "model.safetensors").exists()
    assert len(json.loads((tmp_path / "kept" / "history.json").read_text())["epochs"]) < 5000


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"


@SIGNALS
def test_a_long_query_can_be_interrupted(number: signal.Signals, tmp_path: Path) -> None:
    RunStore(tmp_path / STORE_NAME).close()
    process = start("query", ".", ENDLESS, cwd=tmp_path)
    while "sqlite" not in Path(f"/proc/{process.pid}/maps").read_text() or cpu_seconds(process.pid) < 1.0:
        time.sleep(0.05)
    process.send_signal(number)
    try:
        output, _ = process.communicate(timeout=20)
    finally:
        process.kill()
    assert output == "esper: interrupted\n"
    assert process.returncode == CODES[number]


def cpu_seconds(pid: int) -> float:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11]) / os.sysconf("SC_CLK_TCK")


def test_a_damaged_store_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / STORE_NAME
    RunStore(file).close()
    with sqlite3.connect(file) as store:
        store.execute("PRAGMA journal_mode = DELETE")
    store.close()
    whole, rng = file.read_bytes(), random.Random(22)
    for words in ([], ["SELECT * FROM v_progress"], ["SELECT * FROM sqlite_schema", "--json"]) * 40:
        content = bytearray(whole)
        for _ in range(rng.randint(1, 40)):
            content[rng.randrange(rng.choice([6_000, len(content)]))] = rng.randrange(256)
        file.write_bytes(content)
        code = main(["query", str(tmp_path), *words])
        assert (code, capsys.readouterr().err.count("\n")) in ((0, 0), (1, 1))


def test_a_program_of_ones_own_keeps_its_sigterm() -> None:
    """`esper.grow` in it takes Ctrl-C, and nothing else."""
    with interruptible():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with ended_by_signals() as ending, interruptible() as interrupt:
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        assert (ending.code(130), ending.code(1)) == (143, 1)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_what_is_ignored_stays_ignored() -> None:
    """`nohup esper train …`"""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ended_by_signals(), interruptible():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)

"""Small training runs in child processes whose disk may fail. As a program: forks a process for each job it is given.

A process is forked, not started: importing torch takes longer than the whole run. The one that forks is fresh, whatever
the process of the tests has done with its threads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
UPDATES = 3
SEED = 0
"""Its evaluations are best after update 1, better after 2, and not after 3: the best policy is an old one, too."""


@dataclass(frozen=True)
class Outcome:
    """Of one process."""

    code: int
    """−9: killed."""
    said: str
    """On standard error."""
    operations: list[str]
    """That were carried out."""


class Forker:
    """Trains in processes of its own, one at a time."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        scratch.mkdir()
        self._lock = threading.Lock()
        paths = [str(HERE), str(HERE.parent / "training"), *(path for path in sys.path if path)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def train(self, root: Path, mode: str = "count", at: int = 0, updates: int = UPDATES) -> Outcome:
        """Begin the run `root`/run, or resume it where it has begun. The disk fails at operation `at`."""
        run = root / "run"
        began = (run / "config.json").exists()
        words = ["train", *(["--resume", str(run)] if began else ["--run", str(run), *new_run(updates)])]
        job = {"root": str(root), "words": words, "mode": mode, "at": at, "scratch": str(self.scratch)}
        with self._lock:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            code = int(self._process.stdout.readline())
        operations = json.loads((self.scratch / "operations.json").read_text())
        return Outcome(code, (self.scratch / "stderr").read_text(), operations)

    @property
    def cut_file(self) -> Path:
        return self.scratch / "cut"

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def new_run(updates: int) -> list[str]:
    numbers = {"envs": 1, "updates": updates, "seed": SEED, "evaluate-every": 1, "compare-episodes": 0}
    words = [word for name, number in numbers.items() for word in (f"--{name}", str(number))]
    return ["--task", "tiny", *words, "--device", "cpu", "--workers", "1"]


# -- the program -------------------------------------------------------------------------------------------------------


def make_small() -> None:
    """The family of the tests under its name, and a preset that trains it in half a second."""
    from dataclasses import replace

    import torch
    from tiny_family import TinyFamily

    from esper.agent.config import PPOConfig
    from esper.training.train_config import PRESETS, TrainConfig

    torch.set_num_threads(1)
    TrainConfig.family = lambda self: TinyFamily(horizon=4)  # type: ignore[method-assign, assignment, return-value]
    small = PPOConfig(epochs=1, minibatches=1)
    PRESETS["mixed"] = replace(PRESETS["mixed"], evaluation_episodes=2, keep=1, ppo=small)


def child(job: dict[str, Any]) -> None:
    from faulty_disk import FaultyDisk

    from esper.cli import main

    scratch = Path(job["scratch"])
    for stream, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(scratch / name, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), stream)
    disk = FaultyDisk(Path(job["root"]), job["mode"], job["at"], scratch)
    disk.install()
    code = 99
    try:
        code = main(job["words"])
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        disk.tell(disk.operations)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve() -> None:
    make_small()
    from esper.cli import main

    answers = os.dup(1)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    with tempfile.TemporaryDirectory() as folder:  # what is imported late is imported once
        assert main(["train", "--run", f"{folder}/run", *new_run(1)]) == 0
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            child(json.loads(line))
        _, status = os.waitpid(process, 0)
        os.write(answers, f"{os.waitstatus_to_exitcode(status)}\n".encode())


if __name__ == "__main__":
    serve()

"""What tests of refused commands share: files to name, what a folder holds, and what must not begin."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from esper.cli import main
from esper.tasks.family import TaskFamily
from esper.telemetry.store import STORE_NAME, RunStore
from esper.training.run_folder import RunFolder
from esper.training.train_config import TrainConfig

NEEDED = {
    "clone": ["recording"],
    "offline": ["recording"],
    "checkpoint": ["inspect", "x.safetensors"],
    "completion": ["bash"],
    "query": ["run", "SELECT 1"],
    "sweep": ["sweep.toml"],
    "watch": ["run"],
    "report": ["run"],
}
"""Words without which a command is no command."""
WORK = (
    "cli.bench.measure_images",
    "cli.bench.measure_steps",
    "cli.clone.clone",
    "cli.offline.iql",
    "dashboard.server.serve",
    "training.comparison.compare",
    "training.evaluation.record_job",
    "training.loop.Trainer.run",
    "training.own.grow.run_growth",
    "training.tuning.run_jobs",
    "training.pools.run_each",
    "training.sweep.run_each",
    "training.workers.start_workers",
)
"""What a refused command never begins."""


def make_material(folder: Path) -> None:
    """A recording, a run, files of kinds that cannot be read, in `folder`."""
    before = Path.cwd()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TaskFamily.__init__, "__kwdefaults__", {**TaskFamily.__init__.__kwdefaults__, "horizon": 1})
        os.chdir(folder)
        try:
            words = ["record", "--task", "digits", "--episodes", "6", "--workers", "1", "--out", "recording"]
            assert main(words) == 0
            RunFolder.create(Path("run"), TrainConfig(task="digits"))
            RunStore(Path("run") / STORE_NAME).close()
            Path("a-file").write_text("no folder")
            Path("sweep.toml").write_text('seeds = [0]\n[settings.one]\ntask = "digits"\n')
        finally:
            os.chdir(before)


def copy_material(material: Path, folder: Path) -> None:
    shutil.copytree(material, folder, dirs_exist_ok=True)
    for name in ("fifo", "fifo.toml", "fifo.safetensors"):
        os.mkfifo(folder / name)


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """A command that waits for ever fails its test instead of blocking the suite."""

    def late(number: int, frame: object) -> None:
        pytest.fail("the command was not refused at once")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def replace_work(patch: pytest.MonkeyPatch, begin: Callable[[], object]) -> None:
    for work in WORK:
        patch.setattr(f"esper.{work}", lambda *arguments, **words: begin())


def contents(folder: Path) -> list[tuple[str, int]]:
    """Every path with its size, for files. Beside a store, SQLite itself keeps two files for its readers."""
    paths = [path for path in folder.rglob("*") if not path.name.endswith(("-shm", "-wal"))]
    return sorted((str(path.relative_to(folder)), path.stat().st_size if path.is_file() else 0) for path in paths)

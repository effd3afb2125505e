"""A run's folder: `config.json`, `run.sqlite`, `checkpoints/`. The last good checkpoint stays whole, come what may."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper.agent.ppo import PPOAgent
from esper.files import write_whole
from esper.training.train_config import TrainConfig, read_train_config


class RunFolderError(ValueError):
    """A folder that cannot be used for this run, with the reason."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where a run keeps everything."""

    path: Path

    @classmethod
    def create(cls, path: Path, config: TrainConfig) -> RunFolder:
        """A new run; a folder that holds one already is refused."""
        folder = cls(path)
        if folder.config_file.exists():
            raise RunFolderError(
                f"{path} holds a run already: continue it with --resume {path}, or choose another --run"
            )
        try:
            folder.checkpoints.mkdir(parents=True, exist_ok=True)
            if config.init is not None:
                shutil.copyfile(config.init, folder.start)
            write_whole(folder.config_file, json.dumps(config.to_json(), indent=1))
        except OSError as error:
            raise RunFolderError(
                f"cannot write to {path} ({error.strerror}): choose another folder with --run"
            ) from error
        return folder

    @classmethod
    def open(cls, path: Path) -> tuple[RunFolder, TrainConfig]:
        folder = cls(path)
        if not folder.config_file.exists():
            raise RunFolderError(f"{path} holds no training run: there is no config.json in it")
        return folder, read_train_config(folder.config_file)

    def keep_config(self, config: TrainConfig) -> None:
        """In place of what was kept before."""
        try:
            write_whole(self.config_file, json.dumps(config.to_json(), indent=1))
        except OSError as error:
            raise RunFolderError(f"cannot write {self.config_file} ({error.strerror})") from error

    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def start(self) -> Path:
        """What the policy started from, if it did not start fresh: a resumed run needs its teacher again."""
        return self.checkpoints / "start.safetensors"

    @property
    def best(self) -> Path:
        return self.checkpoints / "best.safetensors"

    def checkpoint(self, update: int) -> Path:
        return self.checkpoints / f"update-{update:06d}.safetensors"

    def latest(self) -> Path | None:
        """The newest checkpoint; a file that was being written when the run died does not have this name yet."""
        found = sorted(self.checkpoints.glob("update-*.safetensors"))
        return found[-1] if found else None

    def save(self, agent: PPOAgent, data: dict[str, Any], keep: int, *, best: bool) -> None:
        """Write the checkpoint of an update, then drop old ones: the last good one is never touched before."""
        agent.save(self.checkpoint(int(data["update"])), data)
        if best:
            agent.save(self.best, data)
        for old in sorted(self.checkpoints.glob("update-*.safetensors"))[:-keep]:
            old.unlink(missing_ok=True)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Two processes in one run would mix their histories. A process that dies lets go, however it dies."""
        handle = os.open(self.path / ".lock", os.O_CREAT | os.O_RDWR)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise RunFolderError(f"another process is training in {self.path}") from error
            yield
        finally:
            os.close(handle)

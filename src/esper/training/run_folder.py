"""A run's folder: `config.json`, `run.sqlite`, `checkpoints/`. The last good checkpoint stays whole, come what may.

Every checkpoint says which update was the best so far. `best.safetensors` is a copy of that update's checkpoint, made
before old ones are dropped: whenever a run dies, the best policy is in one of the two, and resuming restores the copy.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper.agent.checkpoints import CheckpointError, inspect_checkpoint, load_checkpoint
from esper.agent.ppo import PPOAgent
from esper.files import sync_folder, write_whole
from esper.training.train_config import TrainConfig, read_train_config


class RunFolderError(ValueError):
    """A folder that cannot be used for this run, with the reason."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where a run keeps everything."""

    path: Path

    @classmethod
    @contextmanager
    def begin(cls, path: Path, config: TrainConfig) -> Iterator[RunFolder]:
        """A new run, locked from before its configuration is written; a folder that holds one already is refused."""
        folder = cls(path)
        folder._refuse_another()  # before anything is written
        with _writing(path):
            _make_folder(folder.checkpoints)
        with folder.lock():
            folder._refuse_another()  # two commands may have found the folder empty at once
            with _writing(path):
                folder.remove_temporaries()
                if config.init is not None:
                    write_whole(folder.start, Path(config.init).read_bytes())
                write_whole(folder.config_file, json.dumps(config.to_json(), indent=1))
            yield folder

    @classmethod
    def create(cls, path: Path, config: TrainConfig) -> RunFolder:
        """A new run, to be trained in later."""
        with cls.begin(path, config) as folder:
            return folder

    def _refuse_another(self) -> None:
        if self.config_file.exists():
            raise RunFolderError(
                f"{self.path} holds a run already: continue it with --resume {self.path}, or choose another --run"
            )

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

    def saved(self) -> list[Path]:
        """Checkpoints, the newest first; a file that was being written when the run died has another name."""
        found = [path for path in self.checkpoints.glob("update-*.safetensors") if _number(path) is not None]
        return sorted(found, key=lambda path: _number(path) or 0, reverse=True)

    def latest(self) -> Path | None:
        return next(iter(self.saved()), None)

    # -- writing -------------------------------------------------------------------------------------------------------

    def save(self, agent: PPOAgent, data: dict[str, Any], keep: int) -> None:
        """Write the checkpoint of an update, which says what is best; then the copy of the best; then drop old ones."""
        update = int(data["update"])
        agent.save(self.checkpoint(update), data)
        if data["best_update"] == update:
            self._copy_best(update)
        self.drop_old(update, keep)

    def _copy_best(self, update: int) -> None:
        write_whole(self.best, self.checkpoint(update).read_bytes())

    def drop_old(self, update: int, keep: int) -> None:
        """Those before the newest `keep` up to `update`; what is newer was found damaged, and will be written again."""
        for old in [path for path in self.saved() if (_number(path) or 0) <= update][keep:]:
            old.unlink(missing_ok=True)

    def remove_temporaries(self) -> None:
        """What a process that died was writing. Only under the lock: a process that lives is writing, too."""
        for place in (self.path, self.checkpoints):
            for path in place.glob(".*.tmp"):
                path.unlink(missing_ok=True)

    # -- the best ------------------------------------------------------------------------------------------------------

    def restore_best(self, update: int) -> bool:
        """Whether the best policy, that of `update`, is there; a copy that is missing or damaged is made again.

        A copy of a later update is left alone: its checkpoint was damaged, and the run will come to it again.
        """
        if (self.best_update() or 0) >= update:
            return True
        if _update_in(self.checkpoint(update), whole=True) != update:
            return False
        self._copy_best(update)
        return True

    def best_update(self) -> int | None:
        """Of the copy of the best policy; None if there is none, or it is damaged."""
        return _update_in(self.best, whole=True)

    def policy(self) -> Path:
        """The best policy by the run's own evaluations; the newest, if it has made none."""
        newest = self.latest()
        if newest is None and not self.best.exists():
            raise RunFolderError(f"the run {self.path} has no checkpoint yet")
        try:
            kept = {} if newest is None else inspect_checkpoint(newest).data.get("caller", {})
        except CheckpointError:
            kept = {}  # resuming falls back to the one before; for a policy the best is good
        update, score = kept.get("best_update"), kept.get("best_score")
        if self.best.exists() and (
            not isinstance(update, int) or (_update_in(self.best, whole=False) or update) >= update
        ):
            return self.best
        if isinstance(update, int) and self.checkpoint(update).exists():
            return self.checkpoint(update)  # the run died, or is, between the two files
        if newest is None or isinstance(update, int) or (isinstance(score, float) and math.isfinite(score)):
            raise RunFolderError(
                f"the best policy of the run {self.path} is lost ({self.best.name} is not in it); the newest one is "
                f"{newest}"
            )
        return newest

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Two processes in one run would mix their histories. The lock ends with its process, however that ends."""
        try:
            handle = os.open(self.path / ".lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise RunFolderError(f"cannot lock {self.path} ({error.strerror})") from error
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise RunFolderError(f"another process is training in {self.path}") from error
            yield
        finally:
            os.close(handle)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunFolderError(f"cannot write to {path} ({error.strerror}): choose another folder with --run") from error


def _make_folder(path: Path) -> None:
    """With its parents, each known to the disk: after a power cut a run must not lie in a folder that is gone."""
    if path.is_dir():
        return
    _make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync_folder(path.parent)


def _number(path: Path) -> int | None:
    """The update of a checkpoint, by its name."""
    digits = path.stem.removeprefix("update-")
    return int(digits) if digits.isascii() and digits.isdecimal() else None


def _update_in(path: Path, *, whole: bool) -> int | None:
    """The update that a checkpoint says it is of; None if it cannot be read, or must be `whole` and is damaged."""
    try:
        data = load_checkpoint(path).data if whole else inspect_checkpoint(path).data
    except CheckpointError:
        return None
    update = data.get("caller", {}).get("update")
    return update if isinstance(update, int) else None

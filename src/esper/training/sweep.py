"""Many training runs at once: seeds × settings, on processes or on a cluster, and one table at the end.

A job is the next few updates of one run. It is given the files of the run's folder and gives them back, so it can be
done anywhere, and again if it is lost: a run that continues from its checkpoint is the same run. Between jobs all runs
are in the sweep's folder; a sweep that was killed goes on from there.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from esper.config import COUNTS, ConfigError, check_number, read_table, settings_from
from esper.env.rent import RENT_RATE
from esper.env.rents import judged_rent
from esper.errors import did_you_mean, shown
from esper.files import write_whole
from esper.rollout.play import never
from esper.telemetry.recorder import StoreRecorder
from esper.telemetry.store import STORE_NAME, RunStore
from esper.training.catalogue import with_start
from esper.training.evaluation import one_thread
from esper.training.loop import Trainer
from esper.training.pools import Executor, run_each
from esper.training.results import Results
from esper.training.run_folder import RunFolder, RunFolderError
from esper.training.session import begin_session
from esper.training.statistics import Estimate, bootstrap_table
from esper.training.train_config import COMMAND_ONLY, PRESETS, TrainConfig

UPDATES_PER_JOB = 5
"""Updates of a job: what a lost actor can lose."""
KEYS = ("preset", "seeds", "common", "settings")
PLAN = "sweep.json"


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a sweep."""

    setting: str
    seed: int
    config: TrainConfig

    @property
    def name(self) -> str:
        return f"{self.setting}-{self.seed}"


@dataclass(frozen=True, slots=True)
class SweepJob:
    """A job: the files of a run, to be trained until so many updates are done."""

    name: str
    files: Mapping[str, bytes]
    until: int


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting in the table. Intervals (95 %) resample seeds and draws."""

    name: str
    seeds: int
    score: Estimate
    by_seed: tuple[float, ...]
    vs_first: Estimate | None
    """Score minus that of the first setting, paired by seed and draw."""


# -- what to run -------------------------------------------------------------------------------------------------------


def read_sweep(path: Path) -> list[Run]:
    """The runs that a TOML file asks for: every setting with every seed.

    `preset` names what they begin with, `common` is a table of settings for all, `settings` one table for each.
    """
    data = read_table(path)
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a table")
    for key in data:
        if key not in KEYS:
            raise ConfigError(
                f"{path}: unknown {shown(key)}; {did_you_mean(key, KEYS, 'it may have ' + ', '.join(KEYS))}"
            )
    preset, seeds, tables = data.get("preset", "mixed"), data.get("seeds"), data.get("settings")
    if preset not in PRESETS:
        raise ConfigError(f"{path}: preset must be one of {', '.join(PRESETS)}, not {shown(preset)}")
    if not isinstance(seeds, list) or not seeds or len(set(map(str, seeds))) < len(seeds):
        raise ConfigError(f"{path}: seeds must be a list of different whole numbers, not {shown(seeds)}")
    for seed in seeds:
        check_number(f"{path}: a seed", seed, COUNTS["seed"])
    if not isinstance(tables, dict) or not tables or not all(isinstance(one, dict) for one in tables.values()):
        raise ConfigError(
            f"{path}: settings must be tables, [settings.NAME] for each; an empty one is the preset itself"
        )
    common = data.get("common", {})
    runs = [
        Run(name, seed, _configured(path, name, seed, PRESETS[preset], common, table))
        for name, table in tables.items()
        for seed in seeds
    ]
    if len({(run.config.task, run.config.data_dir, run.config.text_file) for run in runs}) > 1:
        raise ConfigError(f"{path}: all settings must have one task, or there is nothing to compare them on")
    return runs


def _configured(
    path: Path, name: str, seed: int, preset: TrainConfig, common: Any, table: dict[str, Any]
) -> TrainConfig:
    where = f"{path}: settings.{name}"
    if not name.replace("-", "").replace("_", "").isalnum():
        raise ConfigError(f"{where}: a name is letters, digits, - and _")
    if not isinstance(common, dict) or "seed" in common or "seed" in table:
        raise ConfigError(f"{where}: common must be a table, and seeds are given by seeds = […]")
    for option in (key.replace("-", "_") for key in {**common, **table}):
        if option in COMMAND_ONLY:
            raise ConfigError(
                f"{where}: a sweep does nothing with {option}: leave it out; --episodes is for its comparison, and "
                "esper watch shows its runs"
            )
    # Read as one table: what follows from a setting of `common`, or does not fit it, may be otherwise here.
    both = {**common, **table, "seed": seed}
    for name in ("ppo", "reward"):
        if isinstance(common.get(name), dict) and isinstance(table.get(name), dict):
            both[name] = common[name] | table[name]
    return settings_from(both, TrainConfig, where, default=preset)


# -- running -----------------------------------------------------------------------------------------------------------


class Sweep:
    """The runs in a folder."""

    def __init__(self, folder: Path, runs: Sequence[Run]) -> None:
        """Begins the runs, or finds them as they were left; a folder of another sweep is refused."""
        self.folder, self.runs = folder, runs
        plan = json.dumps({run.name: run.config.to_json() for run in runs}, indent=1)
        kept = folder / PLAN
        if kept.exists() and kept.read_text("utf-8") != plan:
            raise RunFolderError(f"{folder} holds another sweep: choose another folder with --out")
        new = [(self.of(run).path, with_start(run.config)) for run in runs if not self.of(run).config_file.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(kept, plan)
        for path, config in new:
            RunFolder.create(path, config)

    def of(self, run: Run) -> RunFolder:
        return RunFolder(self.folder / run.name)

    def done(self, run: Run) -> int:
        """Updates that it has made."""
        newest = self.of(run).latest()
        return 0 if newest is None else int(newest.stem.removeprefix("update-"))

    def train(
        self,
        executor: Executor,
        *,
        device: str = "cpu",
        progress: Callable[[int, int, str], None] | None = None,
        stop: Callable[[], bool] = never,
    ) -> bool:
        """All runs to their ends; False if `stop` said so first. They go on together, some updates at a time."""
        total = sum(run.config.updates for run in self.runs)
        while not stop() and (unfinished := [run for run in self.runs if self.done(run) < run.config.updates]):
            parts = [self._part(run) for run in unfinished]
            for part, files in run_each(partial(advance, device=device), parts, executor, stop):
                _write(self.folder / part.name, files)
                if progress is not None:
                    progress(sum(map(self.done, self.runs)), total, part.name)
        return all(self.done(run) >= run.config.updates for run in self.runs)

    def _part(self, run: Run) -> SweepJob:
        until = min(self.done(run) + UPDATES_PER_JOB, run.config.updates)
        return SweepJob(run.name, read_files(self.of(run).path), until)


def advance(part: SweepJob, device: str = "cpu") -> dict[str, bytes]:
    """The files of a run that has been trained further, in a folder of this machine."""
    with one_thread(), tempfile.TemporaryDirectory(prefix="esper-sweep-") as place:
        path = Path(place) / part.name
        _write(path, part.files)
        folder, config = RunFolder.open(path)
        store = RunStore(path / STORE_NAME)
        trainer = Trainer(config, folder, StoreRecorder(store), device=device)
        try:
            trainer.resume()
            begin_session(trainer, store)
            trainer.run(stop=lambda: trainer.update >= part.until)
        finally:
            trainer.close()
        return read_files(path)


def read_files(folder: Path) -> dict[str, bytes]:
    """By name, those of folders in it as FOLDER/NAME; without locks and unfinished files."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith(".")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    """The store before the checkpoints: what it holds of updates without a checkpoint is removed when a run goes on."""
    for leftover in (f"{STORE_NAME}-wal", f"{STORE_NAME}-shm"):  # of a killed process: SQLite would replay it
        (folder / leftover).unlink(missing_ok=True)
    for name in sorted(files, key=lambda name: name.startswith("checkpoints/")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(folder / name, files[name])
    for old in RunFolder(folder).saved():
        if str(old.relative_to(folder)) not in files:
            old.unlink(missing_ok=True)


# -- judging -----------------------------------------------------------------------------------------------------------


def judged_at(runs: Sequence[Run]) -> float:
    """The rent of the comparison: that of all runs, as `esper train` judges one; the usual one where they differ."""
    rents = {judged_rent(run.config.rent) for run in runs}
    return rents.pop() if len(rents) == 1 else RENT_RATE


def setting_rows(runs: Sequence[Run], results: Results) -> list[SettingRow]:
    """From the results on the same draws, by name of the run; settings in their order."""
    tables: dict[str, list[list[float]]] = {}
    for run in runs:
        scores = [results[run.name][number].score for number in sorted(results[run.name])]
        tables.setdefault(run.setting, []).append(scores)
    first = np.array(next(iter(tables.values())))  # [seeds, draws]
    return [
        SettingRow(
            name=name,
            seeds=len(rows),
            score=bootstrap_table(np.array(rows)),
            by_seed=tuple(float(np.mean(row)) for row in rows),
            vs_first=None if i == 0 else bootstrap_table(np.array(rows) - first),
        )
        for i, (name, rows) in enumerate(tables.items())
    ]

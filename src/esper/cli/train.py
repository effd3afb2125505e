"""`esper train`: train a controller with PPO, watch it, interrupt it, continue it; at the end, judge it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
import tyro
from rich.console import Console

from esper.cli.clusters import ActorKind, device_of_jobs, opened_cluster
from esper.cli.compare import Compare
from esper.cli.options import (
    ConfigOptions,
    by_default,
    check_input,
    claim,
    discard_run,
    file_name,
    no_empty_folder,
    option_name,
)
from esper.cli.terminal import clock, print_dim, wide_console
from esper.cli.train_view import TrainWatch
from esper.cli.watch import check_watchable, serving_page
from esper.engine.gc_control import deferred_gc
from esper.env.rents import judged_rent
from esper.telemetry import sinks
from esper.telemetry.profiler import profiling
from esper.telemetry.recorder import FanOut, RunRecorder, StoreRecorder
from esper.telemetry.store import STORE_NAME, RunStore
from esper.training.catalogue import with_start
from esper.training.engines import ONE_AT_A_TIME, check_gpu_options, check_memory, players, stack_size
from esper.training.interrupt import interruptible
from esper.training.loop import Trainer, UpdateReport, engine_of
from esper.training.own.grow import pick_device
from esper.training.progress import progress_of
from esper.training.run_folder import RunFolder
from esper.training.session import begin_session, duration_of
from esper.training.train_config import PRESETS, TrainConfig

CHANGED_ON_RESUME = {"updates", "data_dir", "text_file", "compare_episodes", "tensorboard", "wandb"}
"""A run may go on longer, its files may have moved, and others may watch; anything else would make it another run."""


@dataclass(frozen=True, kw_only=True)
class Train(ConfigOptions, TrainConfig):
    """Train a controller on a family of growth problems; everything about the run is kept in its folder."""

    preset: Literal["small", "demo", "mixed", "mnist1d", "cifar10", "text"] = "mixed"
    """A complete configuration, which the other options change; with --preset NAME --help, its values are shown."""
    run_dir: Annotated[Path | None, tyro.conf.arg(name="run"), by_default("runs/TASK-SEED")] = None
    """Folder of the run."""
    resume: Path | None = None
    """Continue the run in this folder, exactly where it stopped."""
    device: str = "auto"
    """cpu, cuda, …; auto is a GPU if there is one."""
    workers: Annotated[int | None, by_default("one per CPU core; on a GPU without MPS one")] = None
    """Processes that share the environments; on a GPU, of the stacked engine alone. The results do not change."""
    cluster: str | None = None
    """Play on the nodes of a Ray cluster: auto is the one that this machine is in, HOST:PORT names its head. --workers
    is then the most actors. The results do not change."""
    actors: ActorKind = "cpu"
    """What each actor of a cluster has for itself: a core, or a GPU. The agent learns on --device."""
    profile: Path | None = None
    """Write torch profiler traces of the first updates to this folder."""
    watch: bool = False
    """Also show the run on a page in the browser while it goes on; needs esper[web]."""

    SHORT: ClassVar[dict[str, str]] = {"reward": "reward.mode", "teacher_kl": "ppo.teacher_kl"}
    """Options that have a short name, too."""

    @classmethod
    def base(cls, preset: str | None, resume: str | None) -> Train:
        """What the options change: a preset, or the configuration of the run that is resumed."""
        if resume is None:
            config = PRESETS.get(preset or "mixed", TrainConfig())  # an unknown preset is refused with the options
        elif preset is not None:
            raise ValueError("a resumed run keeps its configuration: leave out --preset")
        else:
            check_input("resume", Path(resume))
            config = RunFolder.open(Path(resume))[1]
        return cls(**{field.name: getattr(config, field.name) for field in fields(config)})

    def run(self) -> int:
        torch.set_num_threads(1)  # small nets: threads that spin cost several times the work
        console = wide_console(stderr=False)
        device = pick_device(self.device)
        started = time.perf_counter()
        cluster_of = partial(opened_cluster, self.cluster, self.actors, self.workers)
        with self._begin(device) as (folder, config, undo), cluster_of() as cluster, deferred_gc(device):
            store = RunStore(folder.path / STORE_NAME)
            recorder = FanOut(StoreRecorder(store), *_sinks(folder.path, config))
            workers, remarks = self._plan(config, device)
            print_dim(console, *remarks)
            trainer = Trainer(config, folder, recorder, workers=workers, device=str(device), cluster=cluster)
            if cluster is None and (duration := duration_of(config, trainer.engine.name, device, workers)):
                console.print(duration, highlight=False, soft_wrap=True)
            try:
                with serving_page(self.watch, folder.path, console):
                    finished = self._train(console, trainer, store, undo)
            finally:
                trainer.close()
        if not finished:
            again = shlex.join(["esper", "train", "--resume", str(folder.path)])
            console.print(f"Stopped after update {trainer.update}; continue with: {again}", soft_wrap=True)
            return 130
        return self._judge(console, folder, config, clock(time.perf_counter() - started))

    def _train(self, console: Console, trainer: Trainer, store: RunStore, undo: ExitStack) -> bool:
        """Whether it went on to the last update."""
        trainer.resume()
        if trainer.update > trainer.config.updates:
            raise ValueError(f"--updates {self.updates} is too few: the run has made {trainer.update} already")
        if self.resume is not None and trainer.folder is not None:
            trainer.folder.keep_config(trainer.config)  # the next resume goes on with these settings
        begin_session(trainer, store)
        with (
            interruptible() as interrupt,
            TrainWatch(console, trainer) as show,
            profiling(self.profile) as profile,
        ):

            def on_update(report: UpdateReport) -> None:
                show(report)
                profile.step()

            undo.pop_all()  # from the first step on, what the run wrote is kept
            return trainer.run(on_update, stop=lambda: interrupt.requested)

    # -- what to do, and where -----------------------------------------------------------------------------------------

    @contextmanager
    def _begin(self, device: torch.device) -> Iterator[tuple[RunFolder, TrainConfig, ExitStack]]:
        """The run's folder, locked; its configuration, which is read and written under the lock; and what removes a new
        run again, unless it is popped. What cannot be used is found out before there is a folder.
        """
        if self.resume is not None:
            folder, _ = RunFolder.open(self.resume)  # refuses what is no run before a lock is made in it
            with folder.lock():
                config = self._resumed(RunFolder.open(self.resume)[1])
                self._check(config, device)
                yield folder, config, ExitStack()
            return
        config = self._config()
        self._check(config, device)
        path = self.run_dir or Path("runs") / f"{file_name(config.task)}-{config.seed}"
        with (
            no_empty_folder(path / "checkpoints"),
            RunFolder.begin(path, config) as folder,
            ExitStack() as undo,  # under the run's lock: the files of another process must not be taken for one's own
        ):
            undo.callback(discard_run, path, had_tensorboard=(path / "tensorboard").exists())
            yield folder, config, undo

    def _check(self, config: TrainConfig, device: torch.device) -> None:
        """Refuse what this machine cannot run, and places where nothing can be written."""
        check_gpu_options(config.precision, config.compiled, device, resumed=self.resume is not None)
        config.family().draw(config.draw_ids(1)[0])
        self._plan(config, device)
        _check_sinks(config)
        check_watchable(self.watch)
        if self.profile is not None:
            claim(self.profile)

    def _plan(self, config: TrainConfig, device: torch.device) -> tuple[int, list[str]]:
        """How many workers there are, and lines about the engine and its memory. What cannot be had is refused."""
        family = config.family()
        engine = engine_of(config, family, str(device_of_jobs(str(device), self.cluster, self.actors)))
        workers = min(players(self.workers, engine.name, device), config.envs)
        if engine.name != "stacked" or self.cluster is not None:  # the memory of other machines is not known
            return workers, [str(engine)]
        together = min(config.envs, stack_size(config.envs, device) * workers)
        remarks = [str(engine), check_memory(family, together, device, first=config.draw_ids(1)[0])]
        if device.type != "cpu" and workers == 1:
            remarks.append(ONE_AT_A_TIME)
        return workers, remarks

    def _config(self) -> TrainConfig:
        return replace(with_start(self.config_as(TrainConfig)), **self._files())

    def _files(self) -> dict[str, Any]:
        """Absolute: a run is resumed from anywhere."""
        given = {"data_dir": self.data_dir, "text_file": self.text_file}
        return {name: str(Path(path).absolute()) for name, path in given.items() if path is not None}

    def _resumed(self, kept: TrainConfig) -> TrainConfig:
        """The run's own configuration with the changes that it allows."""
        changed = {name: value for name, value in _flat(self) if value != dict(_flat(kept))[name]}
        refused = [*(changed.keys() - CHANGED_ON_RESUME), *(["run_dir"] if self.run_dir is not None else [])]
        if refused:
            raise ValueError(
                "a resumed run keeps its configuration; only --updates (to go on longer), --data-dir and --text-file "
                "(if files have moved), --compare-episodes, --tensorboard and --wandb may be given, not "
                + ", ".join(sorted(map(option_name, refused)))
            )
        return replace(kept, **{**changed, **self._files()})

    # -- the end -------------------------------------------------------------------------------------------------------

    def _judge(self, console: Console, folder: RunFolder, config: TrainConfig, took: str) -> int:
        """What was learnt: by its returns, and beside the rules on problems that are not for training."""
        episodes = config.updates * config.envs
        console.print(
            f"Trained {config.updates} update{'s' * (config.updates != 1)}, {episodes} episodes, in {took}: "
            f"{folder.path}",
            soft_wrap=True,
        )
        progress = progress_of(folder.path / STORE_NAME)
        if progress is not None:
            console.print(str(progress), soft_wrap=True, highlight=False)
        code = 0
        if config.compare_episodes:
            code = Compare(
                task=config.task,
                controllers=f"none,random,schedule,heuristic,learned={folder.path}",
                episodes=config.compare_episodes,
                workers=self.workers,
                controls=False,
                data_dir=None if config.data_dir is None else Path(config.data_dir),
                text_file=None if config.text_file is None else Path(config.text_file),
                device=self.device,
                engine=config.engine,
                cluster=self.cluster,
                actors=self.actors,
                rent=judged_rent(config.rent),
            ).into(folder.path / "comparison")  # or comparison-2: a run that goes on is judged again
        files = [("--data-dir", config.data_dir), ("--text-file", config.text_file)]
        words = ["esper", "grow", "--task", config.task, "--controller", str(folder.path)]
        words += [word for option, path in files if path is not None for word in (option, path)]
        console.print(f"Grow with it: {shlex.join(words)}", soft_wrap=True, highlight=False)
        return code


def _flat(config: TrainConfig) -> Iterator[tuple[str, Any]]:
    """Settings by name, those of a table as TABLE.NAME."""
    for field in fields(TrainConfig):
        value = getattr(config, field.name)
        if field.name in ("ppo", "reward"):
            yield from ((f"{field.name}.{inner.name}", getattr(value, inner.name)) for inner in fields(value))
        else:
            yield field.name, value


def _check_sinks(config: TrainConfig) -> None:
    if config.tensorboard:
        sinks.tensorboard()
    if config.wandb is not None:
        sinks.wandb()


def _sinks(folder: Path, config: TrainConfig) -> Iterator[RunRecorder]:
    if config.tensorboard:
        yield sinks.TensorBoardSink(folder / "tensorboard")
    if config.wandb is not None:
        yield sinks.WandbSink(config.wandb, name=folder.name, folder=folder, settings=config.to_json())


COMMAND = Train

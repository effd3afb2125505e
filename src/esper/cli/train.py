"""`esper train`: train a controller with PPO, watch it, interrupt it, continue it; at the end, judge it."""

from __future__ import annotations

import shlex
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from esper.cli.episodes import PrecisionName, check_gpu_options, clock, pick_workers, wide_console
from esper.cli.leftovers import NewRun, discarded_unless_begun, no_empty_folder
from esper.cli.options import option_name
from esper.cli.places import claim, file_name
from esper.cli.train_watch import TrainWatch

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from rich.console import Console

    from esper.telemetry.recorder import Recorder
    from esper.training.loop import Trainer, UpdateReport
    from esper.training.run_folder import RunFolder
    from esper.training.train_config import TrainConfig

COUNTED = ("envs", "updates", "seed", "evaluate_every", "compare_episodes")
CHANGED = (*COUNTED, "task", "init", "floor", "data_dir", "text_file", "wandb")
"""Options that replace the preset's setting of the same name."""
CHANGED_ON_RESUME = {"updates", "data_dir", "text_file", "compare_episodes", "tensorboard", "wandb"}
"""A run may go on longer, its files may have moved, and others may watch; anything else would make it another run."""


@dataclass(frozen=True)
class Train:
    """Train a controller on a family of growth problems; everything about the run is kept in its folder."""

    preset: Literal["demo", "mixed", "mnist1d", "cifar10", "text"] | None = None
    """A complete configuration, mixed if not given; the options below change parts of it."""
    task: str | None = None
    """Family of problems: mixed, mixed/vector, natural, …, or one task."""
    envs: int | None = None
    """Networks that grow side by side."""
    updates: int | None = None
    """Rollouts and PPO updates in all."""
    seed: int | None = None
    """Decides the agent's start, its choices, and which problems it sees."""
    init: str | None = None
    """Start from a policy: small-conv, small-dense, a checkpoint (of esper clone, of esper offline), a run."""
    teacher_kl: float | None = None
    """With --init: weight of the distance to that policy in the loss; it falls to zero over 20 updates."""
    floor: float | None = None
    """Least probability of a legal choice in every head, 0 if not given: for runs that stop trying something."""
    reward: Literal["shaped", "simplified", "sparse", "minimal"] | None = None
    """How much the reward says before the end of an episode."""
    evaluate_every: int | None = None
    """Updates between evaluations on held-out problems, whose best policy is kept; 0 is never."""
    run_dir: Annotated[Path | None, tyro.conf.arg(name="run")] = None
    """Folder of the run; the default is runs/TASK-SEED."""
    resume: Path | None = None
    """Continue the run in this folder, exactly where it stopped."""
    data_dir: Path | None = None
    """Where the data files are, for tasks that read some."""
    text_file: Path | None = None
    """The text to learn, for the task `text`."""
    device: str = "auto"
    """cpu, cuda, …; auto is a GPU if there is one."""
    workers: int | None = None
    """Processes that share the environments; the default is one per CPU core. On a GPU one plays all of them. The
    results do not change."""
    precision: PrecisionName | None = None
    """How precisely a GPU trains the growing networks; the default is fp32."""
    compiled: bool = False
    """Compile the growing networks with torch.compile, for a GPU: worth it in long runs whose hosts are alike."""
    profile: Path | None = None
    """Write torch profiler traces of the first updates to this folder."""
    tensorboard: bool = False
    """Also write TensorBoard files into the run's folder."""
    wandb: str | None = None
    """Also send metrics to this project of Weights & Biases."""
    compare_episodes: int | None = None
    """Held-out problems for the comparison at the end, 16 if not given; 0 leaves it out."""
    ppo: Annotated[dict[str, Any] | None, tyro.conf.Suppress] = None
    """A table `[ppo]` of the --config file: settings of the agent (`PPOConfig`) in place of the preset's."""

    def run(self) -> int:
        import torch

        from esper.engine.quiet import quiet_collector
        from esper.training.growing import pick_device
        from esper.training.loop import Trainer

        torch.set_num_threads(1)  # small nets: threads that spin cost several times the work
        console = wide_console(stderr=False)
        device = pick_device(self.device)
        workers = pick_workers(self.workers, device.type)
        started = time.perf_counter()
        with self._begin(device) as (folder, config, run), quiet_collector(device):
            recorder = self._recorder(folder, config)
            trainer = Trainer(config, folder, recorder, workers=min(workers, config.envs), device=str(device))
            try:
                finished = self._train(console, folder, trainer, run)
            finally:
                trainer.close()
        if not finished:
            again = shlex.join(["esper", "train", "--resume", str(folder.path)])
            console.print(f"Stopped after update {trainer.update}; continue with: {again}", soft_wrap=True)
            return 130
        return self._judge(console, folder, config, workers, clock(time.perf_counter() - started))

    def _train(self, console: Console, folder: RunFolder, trainer: Trainer, run: NewRun) -> bool:
        """Whether it went on to the last update."""
        from esper.telemetry.profiler import profiling
        from esper.training.interrupt import interruptible

        trainer.resume()
        if trainer.update > trainer.config.updates:
            raise ValueError(f"--updates {self.updates} is too few: the run has made {trainer.update} already")
        if self.resume is not None:
            folder.keep_config(trainer.config)  # the next resume goes on with what this one was told
        _begin_session(trainer)
        with interruptible() as interrupt, TrainWatch(console, trainer) as show, profiling(self.profile) as profile:

            def on_update(report: UpdateReport) -> None:
                show(report)
                profile.step()

            run.begun = True
            return trainer.run(on_update, stop=lambda: interrupt.requested)

    # -- what to do, and where -----------------------------------------------------------------------------------------

    @contextmanager
    def _begin(self, device: torch.device) -> Iterator[tuple[RunFolder, TrainConfig, NewRun]]:
        """The run's folder, locked, and its configuration, which is read and written under the lock.

        What cannot be used is found out before there is a folder.
        """
        from esper.agent.controller import LearnedController
        from esper.training.run_folder import RunFolder

        if self.resume is not None:
            folder, _ = RunFolder.open(self.resume)  # refuses what is no run before a lock is made in it
            with folder.lock():
                config = self._resumed(RunFolder.open(self.resume)[1])
                self._check(config, device)
                yield folder, config, NewRun()
            return
        config = self._config()
        self._check(config, device)
        if config.init is not None:
            LearnedController.load(Path(config.init))
        path = self.run_dir or Path("runs") / f"{file_name(config.task)}-{config.seed}"
        with (
            no_empty_folder(path / "checkpoints"),
            RunFolder.begin(path, config) as folder,
            discarded_unless_begun(path, new=True) as run,
        ):
            yield folder, config, run

    def _check(self, config: TrainConfig, device: torch.device) -> None:
        """Refuse what this machine cannot run, and places where nothing can be written."""
        check_gpu_options(config.precision, config.compiled, device, resumed=self.resume is not None)
        config.family().draw(config.draw_ids(1)[0])
        _check_sinks(config)
        if self.profile is not None:
            claim(self.profile)

    def _changes(self) -> dict[str, Any]:
        from esper.engine.precision import Precision
        from esper.training.catalogue import policy_file

        given = {name: getattr(self, name) for name in CHANGED if getattr(self, name) is not None}
        given |= {name: True for name in ("compiled", "tensorboard") if getattr(self, name)}
        if self.precision is not None:
            given["precision"] = Precision(self.precision)
        if self.init is not None:
            given["init"] = policy_file(self.init)
        return {name: str(value.absolute()) if isinstance(value, Path) else value for name, value in given.items()}

    def _config(self) -> TrainConfig:
        from esper.agent.config import PPOConfig
        from esper.config import checked
        from esper.training.train_config import PRESETS

        preset = PRESETS[self.preset or "mixed"]
        ppo = replace(preset.ppo, **checked(self.ppo or {}, PPOConfig, "ppo"))
        if self.teacher_kl is not None:
            if self.init is None:
                raise ValueError("--teacher-kl needs a teacher: name its checkpoint with --init")
            ppo = replace(ppo, teacher_kl=self.teacher_kl)
        reward = replace(preset.reward, gamma=ppo.discount)  # shaping is neutral for the agent's own discount only
        if self.reward is not None:
            reward = replace(reward, mode=self.reward)
        return replace(preset, reward=reward, ppo=ppo, **self._changes())

    def _resumed(self, config: TrainConfig) -> TrainConfig:
        changes = self._changes()
        others = {name: getattr(self, name) for name in ("preset", "reward", "ppo", "teacher_kl", "run_dir")}
        refused = set(changes) - CHANGED_ON_RESUME | {name for name, value in others.items() if value is not None}
        if refused:
            raise ValueError(
                "a resumed run keeps its configuration; only --updates (to go on longer), --data-dir and --text-file "
                "(if files have moved), --compare-episodes, --tensorboard and --wandb may be given, not "
                + ", ".join(sorted(map(option_name, refused)))
            )
        return replace(config, **changes)

    # -- the record ----------------------------------------------------------------------------------------------------

    def _recorder(self, folder: RunFolder, config: TrainConfig) -> Recorder:
        from esper.telemetry.recorder import FanOut, StoreRecorder
        from esper.telemetry.store import STORE_NAME, RunStore

        sinks: list[Recorder] = []
        if config.tensorboard:
            from esper.telemetry.tensorboard import TensorBoardSink

            sinks.append(TensorBoardSink(folder.path / "tensorboard"))
        if config.wandb is not None:
            from esper.telemetry.wandb import WandbSink

            sinks.append(WandbSink(config.wandb, name=folder.path.name, folder=folder.path, settings=config.to_json()))
        return FanOut(StoreRecorder(RunStore(folder.path / STORE_NAME)), *sinks)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _judge(self, console: Console, folder: RunFolder, config: TrainConfig, workers: int, took: str) -> int:
        """What was learnt: by its returns, and beside the rules on problems that nobody trained on."""
        from esper.cli.compare import Compare
        from esper.telemetry.store import STORE_NAME
        from esper.training.progress import progress_of

        episodes = config.updates * config.envs
        console.print(
            f"Trained {config.updates} updates, {episodes} episodes, in {took}: {folder.path}", soft_wrap=True
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
                workers=workers,
                controls=False,
                data_dir=None if config.data_dir is None else Path(config.data_dir),
                text_file=None if config.text_file is None else Path(config.text_file),
                device=self.device,
            ).into(folder.path / "comparison")  # or comparison-2: a run that goes on is judged again
        files = [("--data-dir", config.data_dir), ("--text-file", config.text_file)]
        words = ["esper", "grow", "--task", config.task, "--controller", str(folder.path)]
        words += [word for option, path in files if path is not None for word in (option, path)]
        console.print(f"Grow with it: {shlex.join(words)}", soft_wrap=True, highlight=False)
        return code


def _check_sinks(config: TrainConfig) -> None:
    from esper.telemetry import optional

    if config.tensorboard:
        optional.tensorboard()
    if config.wandb is not None:
        optional.wandb()


def _begin_session(trainer: Trainer) -> None:
    """Forget what a killed run recorded after its last checkpoint: it will be done again."""
    from esper.telemetry.recorder import FanOut, StoreRecorder

    assert isinstance(trainer.recorder, FanOut)
    assert isinstance(trainer.recorder.main, StoreRecorder)
    store = trainer.recorder.main.store
    store.rewind(trainer.update)
    store.describe({"config": trainer.config.to_json()})
    store.begin_session(trainer.update)


COMMAND = Train

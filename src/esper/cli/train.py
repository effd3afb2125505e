"""`esper train`: train a controller with PPO, watch it, interrupt it, continue it; at the end, judge it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from esper.cli.episodes import clock, pick_workers, wide_console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from esper.telemetry.recorder import Recorder
    from esper.training.loop import Trainer, UpdateReport
    from esper.training.run_folder import RunFolder
    from esper.training.train_config import TrainConfig


@dataclass(frozen=True)
class Train:
    """Train a controller on a family of growth problems; everything about the run is kept in its folder."""

    preset: Literal["demo", "mixed", "mnist1d", "cifar10", "text"] = "mixed"
    """A complete configuration; the options below change parts of it."""
    task: str | None = None
    """Family of problems: mixed, natural, or one task."""
    envs: int | None = None
    """Networks that grow side by side."""
    updates: int | None = None
    """Rollouts and PPO updates in all."""
    seed: int | None = None
    """Decides the agent's start, its choices, and which problems it sees."""
    reward: Literal["shaped", "simplified", "sparse", "minimal"] | None = None
    """How much the reward says before the end of an episode."""
    run_dir: Annotated[Path | None, tyro.conf.arg(name="run")] = None
    """Folder of the run; the default is runs/TASK-SEED."""
    resume: Path | None = None
    """Continue the run in this folder, exactly where it stopped."""
    device: str = "auto"
    """cpu, cuda, …; auto is a GPU if there is one."""
    workers: int | None = None
    """Processes that share the environments; the default is one per CPU core. The results do not change."""
    profile: Path | None = None
    """Write torch profiler traces of the first updates to this folder."""
    tensorboard: bool = False
    """Also write TensorBoard files into the run's folder."""
    compare_episodes: int = 16
    """Held-out problems for the comparison at the end; 0 leaves it out."""

    def run(self) -> int:
        import torch

        from esper.telemetry.profiler import profiling
        from esper.training.growing import pick_device
        from esper.training.interrupt import interruptible
        from esper.training.loop import Trainer

        torch.set_num_threads(1)  # small nets: threads that spin cost several times the work
        console = wide_console(stderr=False)
        device = pick_device(self.device)
        workers = pick_workers(self.workers, device.type)
        folder, config = self._folder()
        folder.lock()
        recorder = _recorder(folder, tensorboard=self.tensorboard)
        trainer = Trainer(config, folder, recorder, workers=min(workers, config.envs), device=str(device))
        try:
            trainer.resume()
            _begin_session(recorder, trainer)
            with interruptible() as interrupt, _watch(console, trainer) as show, profiling(self.profile) as profile:

                def on_update(report: UpdateReport) -> None:
                    show(report)
                    profile.step()

                finished = trainer.run(on_update, stop=lambda: interrupt.requested)
        finally:
            trainer.close()
        if not finished:
            console.print(f"Stopped after update {trainer.update}; continue with: esper train --resume {folder.path}")
            return 130
        return self._judge(console, folder, config, workers)

    def _folder(self) -> tuple[RunFolder, TrainConfig]:
        from esper.training.run_folder import RunFolder
        from esper.training.train_config import PRESETS

        changes = {name: getattr(self, name) for name in ("task", "envs", "updates", "seed")}
        changes = {name: value for name, value in changes.items() if value is not None}
        if self.resume is not None:
            folder, config = RunFolder.open(self.resume)
            if set(changes) - {"updates"} or self.reward is not None:
                raise ValueError("a resumed run keeps its configuration; only --updates may be given, to go on longer")
            return folder, replace(config, **changes)
        config = replace(PRESETS[self.preset], **changes)
        if self.reward is not None:
            config = replace(config, reward=replace(config.reward, mode=self.reward))
        path = self.run_dir or Path("runs") / f"{config.task}-{config.seed}"
        return RunFolder.create(path, config), config

    def _judge(self, console: Console, folder: RunFolder, config: TrainConfig, workers: int) -> int:
        """The frozen policy beside the rules, on problems that nobody trained on."""
        from esper.cli.compare import Compare

        console.print(f"Trained: {folder.path}", soft_wrap=True)
        code = 0
        if self.compare_episodes:
            code = Compare(
                task=config.task,
                controllers=f"none,random,schedule,heuristic,{folder.path}",
                episodes=self.compare_episodes,
                workers=workers,
                controls=False,
                out=folder.path / "comparison",
                device=self.device,
            ).run()
        console.print(f"Grow with it: esper grow --controller {folder.path}", soft_wrap=True)
        return code


def _recorder(folder: RunFolder, *, tensorboard: bool) -> Recorder:
    from esper.telemetry.recorder import FanOut, StoreRecorder
    from esper.telemetry.store import STORE_NAME, RunStore

    main = StoreRecorder(RunStore(folder.path / STORE_NAME))
    if not tensorboard:
        return main
    from esper.telemetry.tensorboard import TensorBoardSink

    return FanOut(main, TensorBoardSink(folder.path / "tensorboard"))


def _begin_session(recorder: Recorder, trainer: Trainer) -> None:
    """Forget what a killed run recorded after its last checkpoint: it will be done again."""
    from esper.telemetry.recorder import FanOut, StoreRecorder

    main = recorder.main if isinstance(recorder, FanOut) else recorder
    assert isinstance(main, StoreRecorder)
    main.store.rewind(trainer.update)
    main.store.describe({"config": trainer.config.to_json()})
    main.store.begin_session(trainer.update)


class _watch:  # noqa: N801  (used as a function: `with _watch(...) as show`)
    """A live table of the last updates for a person; a line per update in a file."""

    ROWS = 8

    def __init__(self, console: Console, trainer: Trainer) -> None:
        self.console, self.trainer = console, trainer
        self.started, self.first = time.perf_counter(), trainer.update
        self.reports: list[UpdateReport] = []

    def __enter__(self) -> _watch:
        from rich.live import Live

        self.live = Live(console=self.console, transient=True) if self.console.is_terminal else None
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live:
            self.live.stop()
        if self.console.is_terminal and self.reports:
            self.console.print(self._table())

    def __call__(self, report: UpdateReport) -> None:
        self.reports.append(report)
        for message in report.anomalies:
            self.console.print(f"[yellow]update {report.update}: {message}[/yellow]", soft_wrap=True)
        if self.live:
            self.live.update(self._table())
        else:
            cells = ", ".join(f"{name} {value}" for name, value in _cells(report).items())
            self.console.print(f"{cells}, {self._left()} left", soft_wrap=True)

    def _left(self) -> str:
        done = self.reports[-1].update - self.first
        remaining = self.trainer.config.updates - self.reports[-1].update
        return clock((time.perf_counter() - self.started) / done * remaining)

    def _table(self) -> Table:
        from rich.table import Table

        done, total = self.reports[-1].update, self.trainer.config.updates
        table = Table(title=f"update {done} of {total}, {self._left()} left", box=None, pad_edge=False, padding=(0, 2))
        rows = [_cells(report) for report in self.reports[-self.ROWS :]]
        for name in rows[0]:
            table.add_column(name, justify="right")
        for row in rows:
            table.add_row(*row.values())
        return table


def _cells(report: UpdateReport) -> dict[str, str]:
    m = report.metrics
    seeds = "/".join(f"{m[f'episode/{fate}']:.0f}" for fate in ("germinated", "fossilized", "pruned"))
    return {
        "update": str(report.update),
        "return": f"{m['episode/return']:.1f}",
        "score": f"{m['episode/score']:.1f}",
        "accuracy": f"{m['episode/accuracy']:.1f}",
        "size": f"×{m['episode/growth']:.2f}",
        "entropy": f"{m['entropy']:.2f}",
        "KL": f"{m['kl']:.4f}",
        "explained": f"{m['explained_variance']:.2f}",
        "grown/kept/pruned": seeds,
        "held-out score": "–" if report.evaluation is None else f"{report.evaluation:.1f}{' *' * report.best}",
    }


COMMAND = Train

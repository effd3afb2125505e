"""`esper grow`: one command, a network that grows while it trains, and a plain model to keep."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from esper.agent.shipped import DEFAULT_CONTROLLER
from esper.cli.episodes import file_name, wide_console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from esper.engine.eager import EpochRecord
    from esper.tasks.family import Draw
    from esper.tasks.registry import Task
    from esper.training.growing import Grown

EPOCHS = 40
"""Of a task, which has no horizon of its own."""


@dataclass(frozen=True)
class Grow:
    """Train the host of a task while a controller grows it; keep the plain model, its history and a picture."""

    task: str = "mnist1d"
    """What to learn; `esper info` lists the tasks. Or a family of problems (mixed, mixed/vector, natural)."""
    draw: int | None = None
    """Number of the held-out problem of a family, which brings its own data, host, epochs and limits; 0 if not given.
    The same numbers are those of `esper compare`."""
    controller: str = DEFAULT_CONTROLLER
    """Who decides: none, random, schedule, heuristic, a learned one by name (`esper info` lists them), or the path of a
    .toml, a checkpoint, or a run."""
    epochs: int | None = None
    """Epochs of training; the controller acts once per epoch. The default is 40, or what the family's problem has."""
    seed: int = 0
    """Decides the data split, the host's start, its minibatches and its seeds."""
    device: str = "auto"
    """cpu, cuda, cuda:1, …; auto is a GPU if there is one."""
    out: Path | None = None
    """Folder for the results; the default is grown/TASK-CONTROLLER-SEED, or -draw-DRAW."""
    param_budget: int | None = None
    """Most parameters that the grown network may have."""
    max_seeds: int | None = None
    """Most seeds at a time, kept ones counted."""
    data_dir: Path | None = None
    """Where the data files are, for tasks that read some."""
    text_file: Path | None = None
    """The text to learn, for the task `text`."""
    control: bool = True
    """Also train the same host without growth, for comparison."""
    json: bool = False
    """Print the result as JSON instead of tables."""

    def run(self) -> int:
        import torch

        from esper.training.catalogue import make_controller
        from esper.training.growing import grow_task, pick_device

        torch.set_num_threads(1)  # small nets: threads that spin cost several times the work
        console = wide_console(stderr=self.json)
        controller = make_controller(self.controller)
        problem = self._problem()
        task = problem.task.to(pick_device(self.device))
        out = self._folder()
        claim(out)
        control_accuracies: list[float] = []
        with _progress(console, task, problem.horizon, control_accuracies) as on_epoch:
            grown = grow_task(
                task,
                controller=controller,
                epochs=problem.horizon,
                seed=problem.seed,
                budget=problem.budget,
                max_seeds=problem.max_seeds,
                control=self.control,
                on_epoch=on_epoch,
            )
        remarks = list(grown.save(out).warnings)
        remarks += _plot(out / "growth.png", grown, control_accuracies, task)
        if self.json:
            print(json.dumps(_facts(grown, task, out), indent=2))
        else:
            _show(console, grown, task, out, remarks)
        return 130 if grown.interrupted else 0

    def _problem(self) -> Draw:
        """A task as it is, or one held-out problem of a family; with the limits that were asked for."""
        from esper.tasks import load_task, task_names
        from esper.tasks.family import Draw, family_of

        if self.draw is None and self.task in task_names():
            task = load_task(self.task, seed=self.seed, data_dir=self.data_dir, text_file=self.text_file)
            found = Draw(task, self.seed, EPOCHS, None, None, {})
        elif self.seed != 0:
            raise ValueError("a problem of a family brings its own seed: choose another problem with --draw")
        else:
            family = family_of(self.task, data_dir=self.data_dir, text_file=self.text_file)
            found = family.draw(self.draw or 0, held_out=True)
        return replace(
            found,
            horizon=found.horizon if self.epochs is None else self.epochs,
            budget=found.budget if self.param_budget is None else self.param_budget,
            max_seeds=found.max_seeds if self.max_seeds is None else self.max_seeds,
        )

    def _folder(self) -> Path:
        from esper.tasks import task_names

        is_task = self.draw is None and self.task in task_names()
        which = str(self.seed) if is_task else f"draw-{self.draw or 0}"
        return self.out or Path("grown") / f"{file_name(self.task)}-{Path(self.controller).stem}-{which}"


def claim(out: Path) -> None:
    """Find out before the training, not after it, whether the results can be kept."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".write-test"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise OSError(f"cannot write to {out} ({error.strerror}): choose another folder with --out") from error


class _progress:  # noqa: N801  (used as a function: `with _progress(...) as on_epoch`)
    """A live table while a person watches; a line every few epochs when the output goes to a file."""

    def __init__(self, console: Console, task: Task, epochs: int, control_accuracies: list[float]) -> None:
        self.console, self.task, self.epochs = console, task, epochs
        self.control = control_accuracies

    def __enter__(self) -> Callable[[EpochRecord, EpochRecord | None], None]:
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.bar = Progress(
            TextColumn("growing {task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        )
        self.job = self.bar.add_task(self.task.name, total=self.epochs)
        self.live = Live(self.bar, console=self.console, transient=True) if self.console.is_terminal else None
        if self.live:
            self.live.start()
        return self.on_epoch

    def __exit__(self, *error: object) -> None:
        if self.live:
            self.live.stop()

    def on_epoch(self, record: EpochRecord, control: EpochRecord | None) -> None:
        if control is not None:
            self.control.append(control.measured.accuracy)
        self.bar.advance(self.job)
        if record.verdict is not None:
            self.console.print(f"epoch {record.epoch + 1} broke and was undone: {record.verdict.message}")
        if self.live:
            from rich.console import Group

            self.live.update(Group(self.bar, self._table(record, control)))
        elif record.epoch % 10 == 9 or record.epoch + 1 == self.epochs:
            self.console.print(
                f"epoch {record.epoch + 1}/{self.epochs}: loss {record.trained.loss:.3f}, "
                f"val accuracy {record.measured.accuracy:.1f} %, {record.parameters:,} parameters"
            )

    def _table(self, record: EpochRecord, control: EpochRecord | None) -> Table:
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        for name in ("train loss", "val loss", "val accuracy", "not grown", "parameters", *self.task.slots):
            table.add_column(name)
        table.add_row(
            f"{record.trained.loss:.3f}",
            f"{record.measured.loss:.3f}",
            f"{record.measured.accuracy:.1f} %",
            f"{control.measured.accuracy:.1f} %" if control else "–",
            f"{record.parameters:,}",
            *(f"{stage.name.lower()} {alpha:.2f}" for stage, alpha in zip(record.stages, record.alphas, strict=True)),
        )
        return table


def _plot(path: Path, grown: Grown, control: list[float], task: Task) -> list[str]:
    from esper.training.plot import PlotUnavailableError, plot_history

    try:
        title = f"{task.name}: {task.description}; controller: {grown.history.controller}"
        plot_history(path, grown.history, control, title=title)
    except PlotUnavailableError as error:
        return [str(error)]
    return []


def _facts(grown: Grown, task: Task, out: Path) -> dict[str, object]:
    from esper.growth.export import flops_per_example

    assert grown.test is not None
    return {
        "task": task.name,
        "controller": grown.history.controller,
        "test_accuracy": grown.test.accuracy,
        "test_accuracy_not_grown": grown.control.accuracy if grown.control else None,
        "val_accuracy": grown.validation.accuracy,
        "parameters": grown.parameters,
        "host_parameters": grown.history.host_parameters,
        "flops_per_example": flops_per_example(grown.model, grown.example),
        "host_flops_per_example": flops_per_example(task.make_host().to(grown.example.device), grown.example),
        "interrupted": grown.interrupted,
        "out": str(out),
        "seeds": grown.history.to_json()["seeds"],
    }


def _show(console: Console, grown: Grown, task: Task, out: Path, remarks: list[str]) -> None:
    from rich.table import Table

    facts = _facts(grown, task, out)
    stories = grown.history.seeds()
    if stories:
        table = Table("slot", "seed", "epochs", "planted because", "became", "because", title="What grew")
        for story in stories:
            last = min(story.ended + 1, len(grown.history.records))  # what ends with the run ends after its last epoch
            span = f"{story.born + 1}–{last}"
            table.add_row(story.slot, story.blueprint, span, story.why_born, story.fate.name.lower(), story.why_ended)
        console.print(table)
    else:
        console.print("Nothing was grown.")
    table = Table("", "test accuracy", "parameters", "FLOPs per example", title=f"{task.name}: {task.description}")
    not_grown = facts["test_accuracy_not_grown"]
    table.add_row(
        "same host, not grown",
        "not trained" if not_grown is None else f"{not_grown:.1f} %",
        f"{facts['host_parameters']:,}",
        f"{facts['host_flops_per_example']:,}",
    )
    table.add_row(
        "grown", f"{facts['test_accuracy']:.1f} %", f"{facts['parameters']:,}", f"{facts['flops_per_example']:,}"
    )
    console.print(table)
    if grown.interrupted:
        console.print(f"Stopped after {len(grown.history.records)} epochs; what was grown so far is kept.")
    for remark in remarks:
        console.print(f"note: {remark}")
    names = ", ".join(sorted(path.name for path in out.iterdir()))
    console.print(f"Saved in {out}: {names}", soft_wrap=True)


COMMAND = Grow

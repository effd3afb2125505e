"""`esper grow`: one command, a network that grows while it trains, and a plain model to keep."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from esper.agent.shipped import DEFAULT_CONTROLLER
from esper.cli.options import by_default, file_name, refuse_if_it_holds, results_folder
from esper.cli.terminal import Watch, fits, show_rows, wide_console
from esper.cli.watching import check_watchable, watching
from esper.env.rent import RENT_RATE
from esper.lifecycle import Contrast
from esper.telemetry.store import STORE_NAME

if TYPE_CHECKING:
    from esper.dashboard.grown import GrowthRecorder
    from esper.engine.eager import EpochRecord
    from esper.tasks.family import Draw
    from esper.tasks.registry import Task
    from esper.training.own.history import History, SeedStory
    from esper.training.own.run import Grown

EPOCHS = 40
"""Of a task, which has no horizon of its own."""
MODEL_FILES = ("architecture.json", "model.safetensors", "model.pt2")
"""A folder with one of these holds a grown model, or what a full disk left of one."""


@dataclass(frozen=True)
class Grow:
    """Train the host of a task while a controller grows it; keep the plain model, its history and a picture."""

    task: str = "mnist1d"
    """What to learn; `esper info` lists the tasks. Or a family of problems (mixed, mixed/vector, natural)."""
    draw: Annotated[int | None, by_default("0")] = None
    """Number of the held-out problem of a family, which brings its own data, host, epochs and limits. The same
    numbers are those of `esper compare`."""
    controller: str = DEFAULT_CONTROLLER
    """Who decides: none, random, schedule, heuristic, a learned one by name (`esper info` lists them), or the path of a
    .toml, a checkpoint, or a run."""
    epochs: Annotated[int | None, by_default(f"{EPOCHS}, or what the family's problem has")] = None
    """Epochs of training; the controller acts once per epoch."""
    seed: int = 0
    """Decides the data split, the host's start, its minibatches and its seeds."""
    device: str = "auto"
    """cpu, cuda, cuda:1, …; auto is a GPU if there is one."""
    out: Annotated[Path | None, by_default("grown/TASK-CONTROLLER-SEED or -draw-DRAW, or with -2, … after it")] = None
    """Folder for the results, which must not hold a grown model yet."""
    param_budget: int | None = None
    """Most parameters that the grown network may have."""
    max_seeds: int | None = None
    """Most seeds at a time, kept ones counted."""
    rent: float = RENT_RATE
    """The price of size: points of accuracy that one more host-size of parameters must earn. Rules, what is kept at the
    end and the score use it; learned controllers were trained with the default and cannot read another one yet."""
    data_dir: Path | None = None
    """Where the data files are, for tasks that read some."""
    text_file: Path | None = None
    """The text to learn, for the task `text`."""
    control: bool = True
    """Also train the same host without growth, for comparison."""
    watch: bool = False
    """Also show it on a page in the browser while it grows; needs esper[web], and keeps run.sqlite in the folder."""
    json: bool = False
    """Print the result as JSON instead of tables."""

    def run(self) -> int:
        import torch

        from esper.training.catalogue import make_controller
        from esper.training.own.grow import grow_task, pick_device
        from esper.training.plots import drawn, plot_history

        refuse_if_it_holds(self.out, MODEL_FILES, "a grown model")
        check_watchable(self.watch)
        torch.set_num_threads(1)  # small nets: threads that spin cost several times the work
        console = wide_console(stderr=self.json)
        controller = make_controller(self.controller)
        problem = self._problem()
        task = problem.task.to(pick_device(self.device))
        control_accuracies: list[float] = []
        with results_folder(self.out, self._usual_folder) as out, self._recording(out, problem, console) as recorder:
            with GrowWatch(console, task, problem.horizon, control_accuracies, recorder) as on_epoch:
                grown = grow_task(
                    task,
                    controller=controller,
                    epochs=problem.horizon,
                    seed=problem.seed,
                    budget=problem.budget,
                    max_seeds=problem.max_seeds,
                    rent=self.rent,
                    control=self.control,
                    on_epoch=on_epoch,
                    on_remark=partial(note, console),
                )
            if recorder is not None:
                recorder.end({**grown.history.to_json(), "result": grown.result()})
            remarks = [*grown.remarks, *grown.save(out).warnings]
        title = f"{task.name}: {task.description}; controller: {grown.history.controller}"
        if missing := drawn(plot_history, out / "growth.png", grown.history, control_accuracies, title):
            remarks.append(missing)
        if self.json:
            print(json.dumps(facts_of(grown, task, out), indent=2))
        else:
            show(console, grown, task, out, remarks)
        return 130 if grown.interrupted else 0

    @contextmanager
    def _recording(self, out: Path, problem: Draw, console: Console) -> Iterator[GrowthRecorder | None]:
        """With --watch: a store in the folder, and the page that reads it."""
        if not self.watch:
            yield None
            return
        from esper.dashboard.grown import GrowthRecorder

        host = sum(parameter.numel() for parameter in problem.task.make_host().parameters())
        facts = {"controller": self.controller, "slots": list(problem.task.slots), "host_parameters": host}
        facts |= {"epochs": problem.horizon, "rent": self.rent, "task": problem.task.name}
        with GrowthRecorder(out / STORE_NAME, facts) as recorder, watching(True, out, console, stay=True):
            yield recorder

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

    @property
    def _usual_folder(self) -> Path:
        from esper.tasks import task_names

        is_task = self.draw is None and self.task in task_names()
        which = str(self.seed) if is_task else f"draw-{self.draw or 0}"
        return Path("grown") / f"{file_name(self.task)}-{Path(self.controller).stem}-{which}"


# -- what a person sees of a network while it grows, and when it has grown ---------------------------------------------


class GrowWatch(Watch):
    """A live table while a person watches; a line every few epochs when the output goes to a file."""

    def __init__(
        self,
        console: Console,
        task: Task,
        epochs: int,
        control_accuracies: list[float],
        recorder: GrowthRecorder | None = None,
    ) -> None:
        what = TextColumn("growing {task.description}", markup=False)
        self.bar = Progress(what, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.job = self.bar.add_task(task.name, total=epochs)
        super().__init__(console, self.bar)
        self.task, self.epochs, self.control, self.recorder = task, epochs, control_accuracies, recorder

    def __call__(self, record: EpochRecord, control: EpochRecord | None) -> None:
        if self.recorder is not None:
            self.recorder.note(record, control)
        if control is not None:
            self.control.append(control.measured.accuracy)
        self.bar.advance(self.job)
        if record.verdict is not None:
            self.console.print(f"epoch {record.epoch + 1} broke and was undone: {record.verdict.message}")
        if self.live:
            table = self._table(record, control)
            self.live.update(Group(self.bar, table) if fits(self.console, table) else self.bar)
        elif record.epoch % 10 == 9 or record.epoch + 1 == self.epochs:
            self.console.print(
                f"epoch {record.epoch + 1}/{self.epochs}: loss {record.trained.loss:.3f}, "
                f"val accuracy {record.measured.accuracy:.1f} %, {record.parameters:,} parameters"
            )

    def _table(self, record: EpochRecord, control: EpochRecord | None) -> Table:
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


def facts_of(grown: Grown, task: Task, out: Path) -> dict[str, Any]:
    from esper.growth.export import flops_per_example

    assert grown.test is not None
    return {
        "task": task.name,
        "controller": grown.history.controller,
        "test_accuracy": grown.test.accuracy,
        "test_accuracy_not_grown": grown.control.accuracy if grown.control else None,
        "val_accuracy": grown.validation.accuracy,
        "score": grown.score,
        "score_not_grown": grown.control_score,
        "rent": grown.rent,
        "parameters": grown.parameters,
        "host_parameters": grown.history.host_parameters,
        "flops_per_example": flops_per_example(grown.model, grown.example),
        "host_flops_per_example": flops_per_example(task.make_host().to(grown.example.device), grown.example),
        "interrupted": grown.interrupted,
        "remarks": list(grown.remarks),
        "out": str(out),
        "seeds": [
            {**told, "worth": None if (found := worth(grown.history, story)) is None else asdict(found)}
            for told, story in zip(grown.history.to_json()["seeds"], grown.history.seeds(), strict=True)
        ],
    }


def show(console: Console, grown: Grown, task: Task, out: Path, remarks: list[str]) -> None:
    _show_seeds(console, grown.history)
    _show_values(console, grown.history)
    _show_result(console, facts_of(grown, task, out), f"{task.name}: {task.description}")
    if grown.interrupted:
        console.print(f"Stopped after {len(grown.history.records)} epochs; what was grown so far is kept.")
    for remark in remarks:
        note(console, remark)
    names = ", ".join(sorted(path.name for path in out.iterdir()))
    console.print(f"Saved in {out}: {names}", soft_wrap=True)


def note(console: Console, remark: str) -> None:
    console.print(f"note: {remark}", markup=False, highlight=False)  # slots and blueprints are named by their users


def _show_seeds(console: Console, history: History) -> None:
    stories = history.seeds()
    if not stories:
        console.print("Nothing was grown.")
        return
    headings = ("slot", "seed", "epochs", "planted because", "became", "because", "worth")
    rows = [_cells(history, story) for story in stories]
    show_rows(console, "What grew", headings, rows, wrapping=("planted because", "because"))
    console.print(
        "worth: points of validation accuracy with the seed over without it, ± standard error, "
        "when it last worked at its fullest",
        style="dim",
        highlight=False,
    )


def _show_values(console: Console, history: History) -> None:
    """What the seeds that act in the final network contribute to it."""
    acting = [(story, story.value) for story in history.seeds() if story.value is not None]
    if not acting:
        return
    rows = [(s.slot, s.blueprint, _points(value.contribution), _points(value.shapley)) for s, value in acting]
    total = sum(value.shapley.accuracy for _, value in acting)
    rows.append(("all together", "", "", f"{total:+.1f}"))
    headings = ("slot", "seed", "leave-one-out", "Shapley value")
    show_rows(console, "What the seeds of the final network contribute", headings, rows, wrapping=())
    console.print(
        "leave-one-out: points of validation accuracy lost without this seed, ± standard error; Shapley value: its "
        "gain averaged over the orders in which the seeds could be added, so that the values sum to the gain of all",
        style="dim",
        highlight=False,
    )


def _points(contrast: Contrast) -> str:
    return f"{contrast.accuracy:+.1f} ± {contrast.error:.1f}"


def _cells(history: History, story: SeedStory) -> tuple[str, ...]:
    last = min(story.ended + 1, len(history.records))  # what ends with the run ends after its last epoch
    found = worth(history, story)
    measured = "not measured" if found is None else _points(found)
    span, fate = f"{story.born + 1}–{last}", story.fate.name.lower()
    return (story.slot, story.blueprint, span, story.why_born, fate, story.why_ended, measured)


def worth(history: History, story: SeedStory) -> Contrast | None:
    """The last measurement of a seed at its fullest strength: what became of the reasons.

    While a seed is taken out it is measured, too, at less and less strength; that says nothing about its worth.
    """
    slot = history.slots.index(story.slot)
    best: tuple[float, Contrast] | None = None
    for record in history.records[story.born : story.ended + 1]:
        found = record.measured.contributions.get(slot) or record.measured.shadow_benefits.get(slot)
        if found is not None and (best is None or record.alphas[slot] >= best[0]):
            best = (record.alphas[slot], found)
    return None if best is None else best[1]


def _show_result(console: Console, facts: dict[str, Any], title: str) -> None:
    headings = ("", "test accuracy", "score", "parameters", "FLOPs per example")
    rows = [_result("same host, not grown", facts, "_not_grown", "host_"), _result("grown", facts, "", "")]
    show_rows(console, title, headings, rows, wrapping=headings[:1])
    console.print(
        f"score: test accuracy minus rent, {facts['rent']:g} points per extra host-size of parameters",
        style="dim",
        highlight=False,
    )


def _result(name: str, facts: dict[str, Any], measured: str, sized: str) -> tuple[str, ...]:
    """A row: what was measured has a suffix of its own, what was counted a prefix."""
    accuracy, score = facts[f"test_accuracy{measured}"], facts[f"score{measured}"]
    return (
        name,
        "not trained" if accuracy is None else f"{accuracy:.1f} %",
        "–" if score is None else f"{score:.1f}",
        f"{facts[f'{sized}parameters']:,}",
        f"{facts[f'{sized}flops_per_example']:,}",
    )


COMMAND = Grow

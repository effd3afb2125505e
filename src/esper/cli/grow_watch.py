"""What a person sees of a network while it grows, and when it has grown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esper.cli.episodes import fits, show_rows

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from esper.engine.eager import EpochRecord
    from esper.lifecycle import Contrast
    from esper.tasks.registry import Task
    from esper.training.growth_run import Grown
    from esper.training.history import History, SeedStory


class GrowWatch:
    """A live table while a person watches; a line every few epochs when the output goes to a file."""

    def __init__(self, console: Console, task: Task, epochs: int, control_accuracies: list[float]) -> None:
        self.console, self.task, self.epochs = console, task, epochs
        self.control = control_accuracies

    def __enter__(self) -> Callable[[EpochRecord, EpochRecord | None], None]:
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.bar = Progress(
            TextColumn("growing {task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
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

            table = self._table(record, control)
            self.live.update(Group(self.bar, table) if fits(self.console, table) else self.bar)
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


def plot(path: Path, grown: Grown, control: list[float], task: Task) -> list[str]:
    from esper.training.plots import PlotUnavailableError, plot_history

    try:
        title = f"{task.name}: {task.description}; controller: {grown.history.controller}"
        plot_history(path, grown.history, control, title=title)
    except PlotUnavailableError as error:
        return [str(error)]
    return []


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


def _cells(history: History, story: SeedStory) -> tuple[str, ...]:
    last = min(story.ended + 1, len(history.records))  # what ends with the run ends after its last epoch
    found = worth(history, story)
    measured = "not measured" if found is None else f"{found.accuracy:+.1f} ± {found.error:.1f}"
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

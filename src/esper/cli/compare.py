"""`esper compare`: controllers and static controls side by side on held-out draws."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from esper.cli.clusters import ActorOption, ClusterOption, DeviceOption, EngineChoice, chosen_executor, device_of_jobs
from esper.cli.options import (
    by_default,
    claim_file,
    file_name,
    pick_engine,
    refuse_if_it_holds,
    results_folder,
)
from esper.cli.terminal import ProgressDisplay, clock, print_dim, styled, wide_console, with_interval
from esper.env.rent import RENT_RATE
from esper.files import write_whole
from esper.training.interrupt import interruptible

if TYPE_CHECKING:
    import torch

    from esper.config import EngineName
    from esper.tasks.family import Family
    from esper.training.comparison import Comparison, ComparisonRow
    from esper.training.statistics import Estimate


@dataclass(frozen=True)
class Compare:
    """Judge frozen controllers on the same held-out draws, with intervals, and against networks that do not grow."""

    task: str = "mixed"
    """A family of tasks (mixed, natural) or one task; `esper info` lists the tasks."""
    controllers: str = "none,random,schedule,heuristic"
    """Names and paths, separated by commas: none, random, schedule, heuristic, a .toml file, a checkpoint, a run.
    NAME=PATH says what to call it in the table."""
    episodes: int = 32
    """Held-out draws; every controller works on all of them."""
    seed: int = 0
    """Another seed, other draws."""
    rent: float = RENT_RATE
    """The price of size: points of accuracy that one more host-size of parameters must earn."""
    workers: Annotated[int | None, by_default("one per CPU core; one with a GPU")] = None
    """Processes that share the work. The results do not change."""
    controls: bool = True
    """Also train static networks: wider hosts, and the best controller's final networks from scratch."""
    out: Annotated[Path | None, by_default("compared/TASK-SEED, or the same with -2, -3, … after it")] = None
    """Folder for the table as JSON and the plot, without an earlier comparison in it."""
    json: str | None = None
    """Also write the JSON to this file, whatever it held; - is the standard output, in place of the table."""
    data_dir: Path | None = None
    """Where the data files are, for tasks that read some."""
    text_file: Path | None = None
    """The text to learn, for the task `text`."""
    device: DeviceOption = "auto"
    engine: EngineChoice = "auto"
    cluster: ClusterOption = None
    actors: ActorOption = "cpu"

    def run(self) -> int:
        return self.into(Path("compared") / f"{file_name(self.task)}-{self.seed}")

    def into(self, usual: Path) -> int:
        """`usual`: where results go, or beside it, unless a folder was chosen."""
        from esper.tasks.draws import comparison_draws
        from esper.tasks.family import family_of
        from esper.training.comparison import comparison_json, summarise
        from esper.training.plots import drawn, plot_comparison

        refuse_if_it_holds(self.out, ("comparison.json",), "a comparison")
        numbers = comparison_draws(self.episodes, self.seed)
        controllers = labelled(self.controllers)
        family = family_of(self.task, data_dir=self.data_dir, text_file=self.text_file)
        family.draw(numbers[0], held_out=True)  # find out now, not in a worker, what cannot be drawn
        device = device_of_jobs(self.device, self.cluster, self.actors)
        engine, remarks = pick_engine(self.engine, family, device, numbers, self.workers, here=self.cluster is None)
        if self.json not in (None, "-"):
            claim_file(Path(str(self.json)), "--json")
        console = wide_console(stderr=self.json == "-")
        print_dim(console, *remarks)
        with results_folder(self.out, usual) as out:
            found = self._play(family, controllers, numbers, device, engine, console)
            rows = summarise(found)
            facts = comparison_json(found, rows)
            written = _write(out, self.json, facts)
        picture = out / "comparison.png"
        if rows and (problem := drawn(plot_comparison, picture, found, rows)):
            console.print(f"note: {problem}")
        elif rows:
            written.append(str(picture))
        if self.json == "-":
            print(json.dumps(facts, indent=1))
        _show(console, found, rows)
        console.print(f"Written: {', '.join(written)}", soft_wrap=True)
        return 130 if found.interrupted else 0

    def _play(
        self,
        family: Family,
        controllers: dict[str, str],
        numbers: Sequence[int],
        device: torch.device,
        engine: EngineName,
        console: Console,
    ) -> Comparison:
        from esper.training.comparison import compare

        chosen = chosen_executor(self.cluster, self.actors, self.workers, device.type, console)
        with chosen as executor, interruptible() as interrupt, ProgressDisplay(console) as watch:
            return compare(
                family if self.data_dir or self.text_file else self.task,
                controllers,
                numbers,
                controls=self.controls,
                executor=executor,
                device=device,
                engine=engine,
                rent=self.rent,
                progress=watch.note,
                stop=lambda: interrupt.requested,
            )


def labelled(words: str) -> dict[str, str]:
    """By the name in the table: the controller's name or path. Each must be one that can be made."""
    from esper.training.catalogue import make_controller
    from esper.training.comparison import check_label

    found: dict[str, str] = {}
    for word in filter(None, (part.strip() for part in words.split(","))):
        name, named, rest = word.partition("=")
        given, path = (name, rest) if named and not Path(word).exists() else ("", word)
        made = make_controller(path)
        label = given or (path if Path(path).name in found else Path(path).name)
        check_label(label, made)
        if label in found:
            raise ValueError(f"the controller {label!r} is named twice")
        found[label] = path
    if not found:
        raise ValueError("no controller is named: give --controllers some names or paths, separated by commas")
    return found


def _write(out: Path, also: str | None, facts: dict[str, Any]) -> list[str]:
    text = json.dumps(facts, indent=1)
    kept = out / "comparison.json"
    write_whole(kept, text)
    if also in (None, "-"):
        return [str(kept)]
    Path(str(also)).write_text(text, "utf-8")  # as it is, because it may be a pipe or a link
    return [str(kept), str(also)]


# -- the table --------------------------------------------------------------------------------------------------------


def _show(console: Console, found: Comparison, rows: list[ComparisonRow]) -> None:
    if found.interrupted:
        console.print("Interrupted: this is what was completed.")
    if not rows:
        console.print("No draw was completed by every controller: there is nothing to compare.")
        return
    count = len(found.common)
    title = f"{found.family}: {count} held-out draw{'s' * (count != 1)}, the same for all"
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), leading=1
    )
    columns = {heading: cell for heading, cell in _columns(found).items() if any(cell(row) != "–" for row in rows)}
    table.add_column("", min_width=13)
    for heading in columns:
        table.add_column(styled(heading), justify="right", no_wrap=True)
    for i, row in enumerate(rows):
        last_of_kind = i + 1 < len(rows) and rows[i + 1].is_control != row.is_control
        cells = (_name(row, count), *(cell(row) for cell in columns.values()))
        table.add_row(*map(styled, cells), end_section=last_of_kind)
    console.print(table)
    print_dim(console, *_legend(found, rows))


def _columns(found: Comparison) -> dict[str, Callable[[ComparisonRow], str]]:
    """Heading → cell of up to three lines, as markup. A column that has nothing to say in any row is left out."""
    rule = found.best_rule()

    def against_rule(row: ComparisonRow) -> str:
        return with_interval(row.vs_best_rule, "+.1f", _chance(row.better_than_best_rule))

    # Where no growth is the best rule, its column is there already.
    versus = {} if rule == "none" else {f"vs {escape(str(rule))}\n[dim]interval\nP(better)[/dim]": against_rule}
    return {
        "test\naccuracy\n[dim]interval[/dim]": lambda row: with_interval(row.test_accuracy),
        "size\n[dim]FLOPs\ntraining[/dim]": lambda row: (
            f"×{row.parameters_ratio:.2f}\n[dim]×{row.flops_ratio:.2f}\n×{row.training_flops_ratio:.2f}[/dim]"
        ),
        "score\n[dim]interval\nIQM[/dim]": lambda row: with_interval(row.score, note=f"{row.score_iqm.value:.1f}"),
        "vs none\n[dim]interval\nP(better)[/dim]": lambda row: with_interval(
            row.vs_none, "+.1f", _chance(row.better_than_none)
        ),
        **versus,
        "capacity\nregret\n[dim]interval[/dim]": lambda row: (
            "–" if row.name.startswith("static") else with_interval(row.regret, "+.1f")
        ),
    }


def _chance(estimate: Estimate | None) -> str:
    return "" if estimate is None else f"{estimate.value:.2f}"


def _name(row: ComparisonRow, draws: int) -> str:
    star = " *" if row.on_front else ""
    part = f"\n[dim]{row.episodes} of {draws} draws[/dim]" if row.episodes != draws else ""
    head, colon, rest = escape(row.name).partition(": ")
    if colon:
        what, _, how = rest.partition(", ")
        return f"{head}{star}\n{what}\n{how}{part}"
    return (head if row.is_control else f"[bold]{head}[/bold]") + star + part


def _legend(found: Comparison, rows: list[ComparisonRow]) -> list[str]:
    rule = found.best_rule()
    lines = [
        f"score: test accuracy − {found.rent:g} points per extra host-size of parameters; IQM: its inter-quartile mean",
        "size, FLOPs (forward pass) and training (FLOPs): relative to the host, not grown",
        "vs: difference of score, paired by draw; P(better): probability of improvement; intervals: bootstrap, 95 %",
        "*: on the Pareto front of accuracy against parameters",
    ]
    if rule not in (None, "none"):
        lines.append(f"{rule} is the rule-based controller with the best mean score")
    if any(row.regret is not None for row in rows):
        lines.append(
            "capacity regret: points of accuracy below the best static width of the same size; lower is better"
        )
    governed = {row.name: row.governed for row in rows if row.governed}
    if governed:
        ended = ", ".join(f"{name} {count}" for name, count in governed.items())
        lines.append(f"the governor ended episodes early: {ended}")
    lines.append(f"took {clock(found.seconds)}")
    return lines


COMMAND = Compare

"""`esper tune-heuristic`: a strong heuristic for a family of tasks, found under a stated budget."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.table import Table

from esper.cli.clusters import ActorOption, ClusterOption, DeviceOption, EngineChoice, chosen_executor, device_of_jobs
from esper.cli.options import by_default, claim_file, pick_engine
from esper.cli.terminal import ProgressDisplay, print_dim, styled, wide_console, with_interval
from esper.files import write_whole
from esper.training.interrupt import interruptible

if TYPE_CHECKING:
    import torch

    from esper.config import EngineName
    from esper.training.comparison import ComparisonRow
    from esper.training.pools import Executor
    from esper.training.tuning import Tuned


@dataclass(frozen=True)
class TuneHeuristic:
    """Search settings for the heuristic on training draws; write them as a controller, judged on held-out draws."""

    task: str = "mixed"
    """A family of tasks (mixed, natural) or one task."""
    budget_steps: int = 20_000
    """Env-steps that the search may spend: one is one epoch of one network. Judging afterwards is not counted."""
    seed: int = 0
    """Decides the candidates and the draws."""
    episodes: int = 16
    """Held-out draws on which the choice and the default settings are judged."""
    workers: Annotated[int | None, by_default("one per CPU core; one with a GPU")] = None
    """Processes that share the work. The choice does not change."""
    out: Path = Path("heuristic.toml")
    """Where to write the settings: a controller for --controller and --controllers. No file may be there."""
    json: bool = False
    """Print the result as JSON instead of a table."""
    device: DeviceOption = "auto"
    engine: EngineChoice = "auto"
    cluster: ClusterOption = None
    actors: ActorOption = "cpu"

    def run(self) -> int:
        from esper.tasks.draws import comparison_draws
        from esper.tasks.family import get_family

        numbers = comparison_draws(self.episodes, self.seed)
        family = get_family(self.task)
        family.draw(numbers[0])
        if self.out.suffix != ".toml":
            raise ValueError(f"the settings go to a .toml file, not to {self.out}")
        claim_file(self.out, "--out", new=True)
        device = device_of_jobs(self.device, self.cluster, self.actors)
        engine, remarks = pick_engine(self.engine, family, device, numbers, self.workers, here=self.cluster is None)
        console = wide_console(stderr=self.json)
        with chosen_executor(self.cluster, self.actors, self.workers, device.type, console) as executor:
            tuned = self._search(console, executor, device, engine)
            print_dim(console, *remarks)  # not before: the budget may be refused
            rows = [] if tuned.interrupted else self._judge(console, numbers, executor, device, engine)
        if self.json:
            print(json.dumps(_facts(tuned, rows, self.out), indent=1))
        else:
            _show(console, tuned, rows, self.out)
        return 130 if tuned.interrupted else 0

    def _search(self, console: Console, executor: Executor, device: torch.device, engine: EngineName) -> Tuned:
        """The settings, which are written as a controller."""
        from esper.training.tuning import as_toml, tune

        with interruptible() as interrupt, ProgressDisplay(console) as watch:
            tuned = tune(
                self.task,
                self.budget_steps,
                seed=self.seed,
                executor=executor,
                device=device,
                engine=engine,
                progress=watch.note,
                stop=lambda: interrupt.requested,
            )
        remarks = [
            f"esper tune-heuristic --task {self.task} --budget-steps {self.budget_steps} --seed {self.seed}",
            f"best of {tuned.candidates} candidates; {tuned.steps:,} env-steps on training draws",
        ]
        write_whole(self.out, as_toml(tuned.settings, self.out.stem, remarks))
        return tuned

    def _judge(
        self, console: Console, numbers: Sequence[int], executor: Executor, device: torch.device, engine: EngineName
    ) -> list[ComparisonRow]:
        from esper.training.comparison import compare, summarise

        with ProgressDisplay(console) as watch:
            found = compare(
                self.task,
                {"heuristic": "heuristic", "tuned": str(self.out)},
                numbers,
                controls=False,
                executor=executor,
                device=device,
                engine=engine,
                progress=watch.note,
            )
        return summarise(found)


def _facts(tuned: Tuned, rows: list[ComparisonRow], out: Path) -> dict[str, Any]:
    return {
        "out": str(out),
        "settings": asdict(tuned.settings),
        "train_score": tuned.score,
        "train_score_default": tuned.default_score,
        "train_draws": tuned.draws,
        "candidates": tuned.candidates,
        "steps": tuned.steps,
        "interrupted": tuned.interrupted,
        "held_out": {row.name: asdict(row) for row in rows},
    }


def _show(console: Console, tuned: Tuned, rows: list[ComparisonRow], out: Path) -> None:
    console.print(
        f"Best of {tuned.candidates} candidates after {tuned.steps:,} env-steps: score {tuned.score:.1f} on validation "
        f"data of {tuned.draws} training draws"
        + ("." if tuned.default_score is None else f" (the default settings: {tuned.default_score:.1f}).")
    )
    if rows:
        draws = rows[0].episodes
        table = Table(
            "", "score", "test accuracy", "parameters", title=f"On {draws} held-out draws", title_justify="left"
        )
        for row in rows:
            measured = (styled(with_interval(estimate)) for estimate in (row.score, row.test_accuracy))
            table.add_row(row.name, *measured, f"×{row.parameters_ratio:.2f}")
        console.print(table)
    if tuned.interrupted:
        console.print("Interrupted: the choice is that of the last complete round, and was not judged.")
    console.print(f"Written: {out}, a controller for --controller and --controllers")


COMMAND = TuneHeuristic

"""`esper grow`: one command, a network that grows while it trains, and a plain model to keep."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from esper.agent.shipped import DEFAULT_CONTROLLER
from esper.cli.episodes import at_least, wide_console
from esper.cli.grow_watch import GrowWatch, facts_of, note, plot, show
from esper.cli.places import file_name, refuse_if_it_holds, results_folder
from esper.env.rent import RENT_RATE, check_rent

if TYPE_CHECKING:
    from esper.tasks.family import Draw

EPOCHS = 40
"""Of a task, which has no horizon of its own."""
MODEL_FILES = ("architecture.json", "model.safetensors", "model.pt2")
"""A folder with one of these holds a grown model, or what a full disk left of one."""


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
    """Folder for the results, which must not hold a grown model yet. The default is a new one every time:
    grown/TASK-CONTROLLER-SEED or grown/TASK-CONTROLLER-draw-DRAW, then the same with -2, -3, … after it."""
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
    json: bool = False
    """Print the result as JSON instead of tables."""

    def run(self) -> int:
        import torch

        from esper.training.catalogue import make_controller
        from esper.training.own.grow import grow_task, pick_device

        self._check()
        torch.set_num_threads(1)  # small nets: threads that spin cost several times the work
        console = wide_console(stderr=self.json)
        controller = make_controller(self.controller)
        problem = self._problem()
        task = problem.task.to(pick_device(self.device))
        control_accuracies: list[float] = []
        with results_folder(self.out, self._usual_folder) as out:
            with GrowWatch(console, task, problem.horizon, control_accuracies) as on_epoch:
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
            remarks = [*grown.remarks, *grown.save(out).warnings]
        remarks += plot(out / "growth.png", grown, control_accuracies, task)
        if self.json:
            print(json.dumps(facts_of(grown, task, out), indent=2))
        else:
            show(console, grown, task, out, remarks)
        return 130 if grown.interrupted else 0

    def _check(self) -> None:
        """What is wrong with the options themselves is said before anything is loaded."""
        at_least("--seed", self.seed, 0)
        at_least("--epochs", self.epochs, 1)
        at_least("--max-seeds", self.max_seeds, 0)
        check_rent(self.rent, "--rent")
        refuse_if_it_holds(self.out, MODEL_FILES, "a grown model")

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


COMMAND = Grow

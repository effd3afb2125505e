"""`esper grow`: one command, a network that grows while it trains, and a plain model to keep."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from rich.console import Console
from torch import nn

from esper.agent.shipped import DEFAULT_CONTROLLER
from esper.cli.clusters import DeviceOption
from esper.cli.options import by_default, file_name, refuse_if_it_holds, results_folder
from esper.cli.terminal import wide_console
from esper.cli.user_code import user_errors, user_function
from esper.cli.watch import check_watchable, serving_page
from esper.dashboard.growth_recorder import GrowthRecorder
from esper.engine.precision import Precision
from esper.env.rent import RENT_RATE
from esper.errors import GrowthWarning
from esper.tables import Report
from esper.tasks import load_task, task_names
from esper.tasks.family import Draw, family_of
from esper.telemetry.store import STORE_NAME
from esper.training.catalogue import make_controller
from esper.training.engines import check_gpu_options
from esper.training.own.grow import grow, grow_task, pick_device
from esper.training.own.grown import Grown
from esper.training.own.summary import notes_of, result_table, seed_tables, worth
from esper.training.plots import drawn, plot_history

AUTO = "auto"
TASK = "mnist1d"
EPOCHS = 40
"""Where nothing else says how long."""
MODEL_FILES = ("architecture.json", "model.safetensors", "model.pt2")
"""A folder with one of these holds a grown model, or what a full disk left of one."""


@dataclass(frozen=True)
class Grow:
    """Train the host of a task, or a model of your own, while a controller grows it; keep the plain model, its history
    and a picture."""

    SHELL_ONLY: ClassVar = ("model", "data")
    """What a --config file must not set: it is data, and these run code."""

    task: Annotated[str | None, by_default(TASK)] = None
    """What to learn; `esper info` lists the tasks. Or a family of problems (mixed, mixed/vector, natural)."""
    model: str | None = None
    """A model of your own in place of a task: FILE.py:FUNCTION, such as my.py:make_model. The function takes no
    arguments and returns a torch.nn.Module. Your file is run, with all your rights."""
    data: str | None = None
    """Its data: FILE.py:FUNCTION. The function returns (train, validation) or (train, validation, test), each as
    `esper.grow` takes them: (inputs, targets) as tensors or arrays, or a DataLoader."""
    slots: str = AUTO
    """Where your model may grow: module paths or patterns, with commas between (layer1,layer2 or "h.*"); auto chooses
    blocks, stage ends or hidden layers."""
    draw: Annotated[int | None, by_default("0")] = None
    """Number of the held-out problem of a family, which brings its own data, host, epochs and limits. `esper
    compare` uses the same numbers."""
    controller: str = DEFAULT_CONTROLLER
    """The controller: none, random, schedule, heuristic, a learned one by name (`esper info` lists them), or the path
    of a .toml, a checkpoint, or a run."""
    epochs: Annotated[int | None, by_default(f"{EPOCHS}, or what the family's problem has")] = None
    """Epochs of training; the controller acts once per epoch."""
    batch_size: Annotated[int | None, by_default("128; a task has its own")] = None
    """Examples of an update, for --model with tensors or arrays. Few examples want small batches: 1,000 of them make 8
    updates an epoch at 128, and 32 at 32."""
    seed: int = 0
    """Decides the data split, the host's start, its minibatches and its seeds."""
    device: DeviceOption = "auto"
    precision: Precision = Precision.FP32
    """How a GPU calculates: fp32, tf32 (rounded products), bf16 (passes in bfloat16, weights in single precision)."""
    compiled: bool = False
    """On a GPU, compile what lies between the slots (torch.compile)."""
    cuda_graphs: bool = False
    """On a GPU, replay whole epochs as CUDA graphs: faster where networks are small. The forward pass must do the same
    each time; data must be tensors. What cannot be captured is trained without, and a note says why."""
    out: Annotated[Path | None, by_default("grown/TASK-CONTROLLER-SEED or -draw-DRAW, or with -2, … after it")] = None
    """Folder for the results, which must not hold a grown model yet."""
    param_budget: int | None = None
    """Most parameters that the grown network may have."""
    max_seeds: int | None = None
    """Most seeds at a time, kept ones counted."""
    rent: float = RENT_RATE
    """The price of size: points of accuracy that one more host-size of parameters must earn. Rules, what is kept at the
    end, the score and the controller `small` use it: 0 is accuracy at any size."""
    data_dir: Path | None = None
    """Where the data files are, for tasks that read some."""
    text_file: Path | None = None
    """The text to learn, for the task `text`."""
    control: bool = True
    """Also train the same host without growth, for comparison."""
    patience: int | None = None
    """End after so many epochs in a row without a better validation accuracy, but not while a seed is on its way."""
    keep_best: bool = False
    """Keep the network of the epoch with the best validation accuracy, not that of the last one."""
    checkpoint: Path | None = None
    """Folder for the state after every epoch: the same command goes on from there after it was killed."""
    watch: bool = False
    """Also show it on a page in the browser while it grows; needs esper[web], and keeps run.sqlite in the folder."""
    json: bool = False
    """Print the result as JSON instead of tables."""

    def run(self) -> int:
        refuse_if_it_holds(self.out, MODEL_FILES, "a grown model")
        check_watchable(self.watch)
        device = pick_device(self.device)
        check_gpu_options(self.precision, self.compiled, device, cuda_graphs=self.cuda_graphs)
        console = wide_console(stderr=self.json)
        controller = make_controller(self.controller)
        problem = self._own_model() if self.model or self.data else self._task()
        with results_folder(self.out, self._usual_folder) as out, self._recording(out, problem, console) as recorder:
            grown = problem.grow(
                controller=controller,
                rent=self.rent,
                control=self.control,
                patience=self.patience,
                keep_best=self.keep_best,
                checkpoint=self.checkpoint,
                precision=self.precision,
                compiled=self.compiled,
                cuda_graphs=self.cuda_graphs,
                progress=console,
                on_epoch=None if recorder is None else recorder.note,
                on_remark=partial(note, console),
            )
            if recorder is not None:
                recorder.end({**grown.history.to_json(), "result": grown.result()})
            remarks = [*grown.save(out).warnings]
        title = f"{problem.title}; controller: {grown.history.controller}"
        if missing := drawn(plot_history, out / "growth.png", grown.history, title):
            remarks.append(missing)
        if self.json:
            print(json.dumps(facts_of(grown, problem, out), indent=2))
        else:
            show(console, grown, problem, out, remarks)
        return 130 if grown.interrupted else 0

    def _task(self) -> GrowthProblem:
        for option, given in (("--slots", self.slots != AUTO), ("--batch-size", self.batch_size is not None)):
            if given:
                raise ValueError(f"{option} is for --model: a task has its own")
        torch.set_num_threads(1)  # small nets: threads that spin cost several times the work
        found = self._problem()
        task = found.task.to(pick_device(self.device))
        settings: dict[str, Any] = {"epochs": found.horizon, "seed": found.seed}
        limits: dict[str, Any] = {"budget": found.budget, "max_seeds": found.max_seeds}
        host = task.host_parameters
        facts = {"task": task.name, "slots": list(task.slots), "host_parameters": host, "epochs": found.horizon}
        title = f"{task.name}: {task.description}"
        return GrowthProblem(task.name, title, partial(grow_task, task, **settings, **limits), facts)

    def _own_model(self) -> GrowthProblem:
        """What the functions of the user's files give."""
        others = {"--task": self.task, "--draw": self.draw, "--data-dir": self.data_dir, "--text-file": self.text_file}
        if wrong := [option for option, value in others.items() if value is not None]:
            raise ValueError(f"--model and --data are a problem of their own: leave {wrong[0]} out")
        if self.model is None or self.data is None:
            missing = "--data" if self.data is None else "--model"
            raise ValueError(f"--model and --data belong together: add {missing} FILE.py:FUNCTION")
        if self.watch:
            raise ValueError("--watch is for tasks: of a model of your own, look at the report (esper report FOLDER)")
        make_model, make_data = user_function("--model", self.model), user_function("--data", self.data)
        torch.manual_seed(self.seed)
        model, data = make_model(), make_data()
        if not isinstance(model, torch.nn.Module):
            raise ValueError(f"--model {self.model} must return a torch.nn.Module, and returned {_kind(model)}")
        if not isinstance(data, tuple | list) or len(data) not in (2, 3):
            raise ValueError(
                f"--data {self.data} must return (train, validation) or (train, validation, test), each in a form that "
                f"esper.grow takes, and returned {_kind(data)}"
            )
        return GrowthProblem(
            self.model, f"{type(model).__name__} of {self.model}", partial(self._grow_own, model, data)
        )

    def _grow_own(
        self, model: nn.Module, data: Sequence[Any], *, on_remark: Callable[[str], None], **settings: Any
    ) -> Grown:
        train, validation, *test = data
        slots = AUTO if self.slots == AUTO else [path.strip() for path in self.slots.split(",")]
        chosen: dict[str, Any] = {} if self.batch_size is None else {"batch_size": self.batch_size}
        with warnings.catch_warnings(), user_errors(f"--model {self.model}"):
            usual = warnings.showwarning

            def shown(message: Warning | str, category: type[Warning], *place: Any) -> None:
                if issubclass(category, GrowthWarning):
                    on_remark(str(message))
                else:
                    usual(message, category, *place)

            warnings.simplefilter("always", GrowthWarning)
            warnings.showwarning = shown  # type: ignore[assignment]
            return grow(
                model,
                train,
                validation,
                slots=slots,
                test_data=test[0] if test else None,
                epochs=EPOCHS if self.epochs is None else self.epochs,
                seed=self.seed,
                device=self.device,
                budget=self.param_budget,
                max_seeds=self.max_seeds,
                **chosen,
                **settings,
            )

    @contextmanager
    def _recording(self, out: Path, problem: GrowthProblem, console: Console) -> Iterator[GrowthRecorder | None]:
        """With --watch: a store in the folder, and the page that reads it."""
        if not self.watch:
            yield None
            return
        facts = {**problem.facts, "controller": self.controller, "rent": self.rent}
        with GrowthRecorder(out / STORE_NAME, facts) as recorder, serving_page(True, out, console, stay=True):
            yield recorder

    def _problem(self) -> Draw:
        """A task as it is, or one held-out problem of a family; with the limits that were asked for."""
        name = self.task or TASK
        if self.draw is None and name in task_names():
            task = load_task(name, seed=self.seed, data_dir=self.data_dir, text_file=self.text_file)
            found = Draw(task, self.seed, EPOCHS, None, None, {})
        elif self.seed != 0:
            raise ValueError("a problem of a family brings its own seed: choose another problem with --draw")
        else:
            family = family_of(name, data_dir=self.data_dir, text_file=self.text_file)
            found = family.draw(self.draw or 0, held_out=True)
        return replace(
            found,
            horizon=found.horizon if self.epochs is None else self.epochs,
            budget=found.budget if self.param_budget is None else self.param_budget,
            max_seeds=found.max_seeds if self.max_seeds is None else self.max_seeds,
        )

    @property
    def _usual_folder(self) -> Path:
        if self.model:
            name = f"{Path(self.model.rpartition(':')[0]).stem}-{Path(self.controller).stem}-{self.seed}"
            return Path("grown") / name
        name = self.task or TASK
        which = str(self.seed) if self.draw is None and name in task_names() else f"draw-{self.draw or 0}"
        return Path("grown") / f"{file_name(name)}-{Path(self.controller).stem}-{which}"


@dataclass(frozen=True)
class GrowthProblem:
    """What is to be learnt, and how that begins."""

    name: str
    title: str
    grow: Callable[..., Grown]
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What `--watch` shows before the first epoch; of a task."""


def _kind(value: object) -> str:
    """In a message about what a function returned."""
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


# -- what a person sees of a network while it grows, and when it has grown ---------------------------------------------


def facts_of(grown: Grown, problem: GrowthProblem, out: Path) -> dict[str, Any]:
    return {
        "task": problem.name,
        "controller": grown.history.controller,
        "test_accuracy": None if grown.test is None else grown.test.accuracy,
        "test_accuracy_not_grown": grown.control.accuracy if grown.control and grown.test else None,
        "val_accuracy": grown.validation.accuracy,
        "val_accuracy_not_grown": grown.control_validation.accuracy if grown.control_validation else None,
        "score": grown.score,
        "score_not_grown": grown.control_score,
        "paid": grown.paid,
        "rent": grown.rent,
        "parameters": grown.parameters,
        "host_parameters": grown.history.host_parameters,
        "flops_per_example": grown.flops,
        "host_flops_per_example": grown.history.host_flops,
        "epochs": len(grown.history.records),
        "kept_epochs": len(grown.history.kept_records),
        "interrupted": grown.interrupted,
        "remarks": list(grown.remarks),
        "out": str(out),
        "seeds": [
            {**told, "worth": None if (found := worth(grown.history, story)) is None else asdict(found)}
            for told, story in zip(grown.history.to_json()["seeds"], grown.history.seeds(), strict=True)
        ],
    }


def show(console: Console, grown: Grown, problem: GrowthProblem, out: Path, remarks: Sequence[str]) -> None:
    Report((*seed_tables(grown.history), result_table(grown, problem.title))).show(console)
    for remark in (*notes_of(grown), *remarks):
        note(console, remark)
    names = ", ".join(sorted(path.name for path in out.iterdir()))
    console.print(f"Saved in {out}: {names}", soft_wrap=True)


def note(console: Console, remark: str) -> None:
    console.print(f"note: {remark}", markup=False, highlight=False)  # slots and blueprints are named by their users


COMMAND = Grow

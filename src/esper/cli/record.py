"""`esper record`: episodes of controllers, kept for `esper clone` and `esper offline`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.table import Table

from esper.cli.clusters import ActorOption, ClusterOption, DeviceOption, EngineChoice, chosen_executor, device_of_jobs
from esper.cli.options import by_default, claim, pick_engine
from esper.cli.terminal import ProgressDisplay, print_dim, wide_console
from esper.training.interrupt import interruptible

if TYPE_CHECKING:
    from esper.rollout.episodes import Episodes
    from esper.training.evaluation import Job
    from esper.training.pools import Executor

EPISODES_PER_FILE = 32
"""What a killed recording can lose; Ctrl-C loses nothing."""


@dataclass(frozen=True)
class Record:
    """Let controllers play training problems, and add the episodes to a recording. Safe to interrupt and to repeat."""

    task: str = "mixed"
    """A family of tasks (mixed, natural) or one task."""
    controllers: str = "heuristic"
    """Names and paths, separated by commas: heuristic, random, a .toml file, a checkpoint, a run."""
    episodes: int = 64
    """Problems; every controller plays each of them. Repeated, the command goes on with new problems."""
    noise: float = 0.0
    """Probability that a random legal decision is taken in place of the controller's."""
    seed: int = 0
    """Another seed, other problems."""
    out: Path = Path("recording")
    """Folder of the recording; it is made, or added to."""
    workers: Annotated[int | None, by_default("one per CPU core, or one with a GPU")] = None
    """Processes that share the work. The episodes do not change."""
    device: DeviceOption = "auto"
    engine: EngineChoice = "auto"
    cluster: ClusterOption = None
    actors: ActorOption = "cpu"

    def run(self) -> int:
        import torch

        from esper.cli.compare import labelled
        from esper.offline.recording import growth_schema, next_draw
        from esper.tasks.draws import TRAINING_DRAWS_PER_SEED
        from esper.tasks.family import get_family
        from esper.training.catalogue import RULES, make_controller
        from esper.training.evaluation import PackedController, batch_size, jobs_for

        torch.set_num_threads(1)  # small nets: threads that spin cost several times the work
        named = labelled(self.controllers)
        for name, path in named.items():
            if name in RULES and path != name:  # what learns from it would be compared with the rule
                raise ValueError(f"{name!r} is the name of a rule: record {path} under another, NAME={path}")
        made = {name: PackedController.of(make_controller(path)) for name, path in named.items()}
        claim(self.out)
        first = next_draw(self.out, growth_schema(), self.seed * TRAINING_DRAWS_PER_SEED)
        family = get_family(self.task)
        family.draw(first)  # find out now, not in a worker, what cannot be drawn
        draws = range(first, first + self.episodes)
        device = device_of_jobs(self.device, self.cluster, self.actors)
        engine, remarks = pick_engine(self.engine, family, device, draws, self.workers, here=self.cluster is None)
        batch = batch_size(engine, self.episodes, device)
        jobs = jobs_for(self.task, made, draws, held_out=False, noise=self.noise, batch=batch, engine=engine)
        console = wide_console(stderr=False)
        print_dim(console, *remarks)
        chosen = chosen_executor(self.cluster, self.actors, self.workers, device.type, console)
        with chosen as executor, interruptible() as interrupt, ProgressDisplay(console) as watch:
            total, done = self.episodes * len(made), 0
            for part in _files(jobs, executor, str(device), lambda: interrupt.requested):
                self._append(part)
                done += len(part)
                watch.note(done, total, part.controllers[-1])
        if interrupt.requested and not done:
            raise KeyboardInterrupt  # the recording may hold nothing that could be shown
        _show(console, self.out)
        return 130 if interrupt.requested else 0

    def _append(self, episodes: Episodes) -> None:
        import torch

        from esper.env.reward import RewardConfig
        from esper.offline.recording import append, growth_schema

        provenance: dict[str, Any] = {
            "command": f"esper record --task {self.task} --controllers {self.controllers} --noise {self.noise}",
            "task": self.task,
            "noise": self.noise,
            "reward_mode": RewardConfig().mode,
            "discount": RewardConfig().discount,
            "esper": version("esper"),
            "torch": str(torch.__version__),
        }
        append(self.out, episodes, growth_schema(), provenance)


def _files(jobs: list[Job], executor: Executor, device: str, stop: Callable[[], bool]) -> Iterator[Episodes]:
    """What the jobs give, a few dozen episodes at a time, and the rest at the end."""
    from esper.rollout.episodes import join
    from esper.training.evaluation import record_job
    from esper.training.pools import run_each

    waiting: list[Episodes] = []
    for _, episodes in run_each(partial(record_job, device=device), jobs, executor, stop):
        waiting.append(episodes)
        if sum(map(len, waiting)) >= EPISODES_PER_FILE:
            yield join(waiting)
            waiting.clear()
    if waiting:
        yield join(waiting)


def _show(console: Console, out: Path) -> None:
    """What the recording holds now, and how different the actions in it are."""
    from esper.offline.diversity import diversity
    from esper.offline.recording import growth_schema, read

    episodes = read(out, growth_schema()).episodes
    returns = episodes.returns()
    for number, name in enumerate(episodes.controllers):
        own = returns[episodes.controller == number]
        spread = f" ± {float(own.std()):.1f}" if len(own) > 1 else ""
        console.print(f"{name}: {len(own)} episodes, mean return {float(own.mean()):.1f}{spread}", highlight=False)
    table = Table("similar states", "progress", "operations", "decisions", "explored", box=None, pad_edge=False)
    groups = diversity(episodes)
    for group in groups:
        cells = (f"{group.steps} steps", f"{group.progress:.0%}", f"{group.ops:.1f}", f"{group.decisions:.1f}")
        table.add_row(*cells, f"{group.explored:.0%}")
    console.print(table)
    console.print(
        "progress: how much of the episode is over; operations, decisions: effective number of different ones in "
        "similar states, 1 is always the same; explored: decisions that --noise replaced"
    )
    if len(episodes.controllers) == 1 and not any(group.explored for group in groups):
        console.print(
            "One controller without exploration: enough to clone it, but esper offline has nothing to improve on. "
            "Add --noise, or other controllers."
        )
    console.print(f"Recorded: {len(episodes)} episodes, {episodes.steps} steps, in {out}", soft_wrap=True)
    console.print(f"Next: esper clone {out}, or esper offline {out}", soft_wrap=True)


COMMAND = Record

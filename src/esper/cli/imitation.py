"""What `esper clone` and `esper offline` share: progress, the result on disk, its judgement."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esper.cli.episodes import clock, wide_console
from esper.cli.places import claim_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from esper.cli.compare import Compare
    from esper.offline.agreement import HeadAgreement
    from esper.offline.cloning import CloneConfig
    from esper.offline.fitting import Learned
    from esper.offline.iql import IQLConfig
    from esper.offline.recording import Recording

SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """A bar for a person, a line now and then in a file."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.started, self.said = time.perf_counter(), -SECONDS_BETWEEN_LINES

    def __enter__(self) -> Progress:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bars

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("epochs"),
        )
        self.bars = Bars(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        self.rows: dict[str, Any] = {}
        self.bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bars.stop()

    def __call__(self, what: str, done: int, of: int, loss: float) -> None:
        if what not in self.rows:
            self.rows[what] = self.bars.add_task(what, total=of)
        self.bars.update(self.rows[what], completed=done, description=f"{what}, held-out loss {loss:.3f}")
        spent = time.perf_counter() - self.started
        if not self.console.is_terminal and (spent - self.said > SECONDS_BETWEEN_LINES or done == of):
            self.said = spent
            self.console.print(f"{what}: epoch {done} of {of}, held-out loss {loss:.3f}, {clock(spent)}")


def learn_and_judge(
    command: str,
    recording: Recording,
    config: CloneConfig | IQLConfig,
    teach: Callable[[Progress], Learned],
    out: Path,
    task: str | None,
    episodes: int,
) -> int:
    """Learn, write the policy, and show how well it agrees with its teachers and does in the environment."""
    if out.suffix != ".safetensors" or out.with_suffix("").is_file():
        raise ValueError(f"the policy goes to a .safetensors file beside a folder of its name, not to {out}")
    judged = _planned(recording, task, episodes, config.seed)
    claim_file(out, "--out", new=True)
    console = wide_console(stderr=False)
    with Progress(console) as progress:
        learned = teach(progress)
    claim_file(out, "--out", new=True)  # another command may have been quicker
    save(out, learned, command, config, recording)
    show_agreement(console, learned)
    return judge(console, out, recording, judged)


def save(path: Path, learned: Learned, how: str, config: CloneConfig | IQLConfig, recording: Recording) -> None:
    """An ordinary checkpoint that says where it comes from."""
    from esper.agent.policies import save_policy
    from esper.growth.blueprints import blueprint_names

    data = {
        "learned_by": how,
        "config": asdict(config),
        "episodes": len(recording.episodes),
        "controllers": list(recording.episodes.controllers),
        "recorded": list(recording.provenance),
        "blueprints": list(blueprint_names()),
    }
    save_policy(path, learned.network, learned.units.observations, learned.units.values, data)


def show_agreement(console: Console, learned: Learned) -> None:
    """Accuracy per head on problems that were not learnt from, and what was taken for what."""
    from rich.table import Table

    found = learned.agreement
    console.print(f"Agreement with the recorded controllers on {found.episodes} held-out episodes")
    table = Table("head", "steps", "accuracy", "balanced", box=None, pad_edge=False)
    for name, head in found.heads.items():
        table.add_row(name, str(head.count), *(_percent(x) for x in (head.accuracy, head.balanced_accuracy)))
    console.print(table)
    console.print(
        f"whole decisions: {_percent(found.decisions)}; steps: where the controller's operation uses the head"
    )
    for name, head in found.heads.items():
        _show_confusion(console, name, head)


def _show_confusion(console: Console, name: str, head: HeadAgreement) -> None:
    from rich.table import Table

    names = _choices(name, len(head.confusion))
    seen = [i for i, row in enumerate(head.confusion) if sum(row) or any(other[i] for other in head.confusion)]
    if len(seen) < 2:
        return
    table = Table(f"{name}: it did ↓", *(names[i] for i in seen), box=None, pad_edge=False, padding=(0, 2))
    for i in seen:
        table.add_row(names[i], *(str(head.confusion[i][j] or "·") for j in seen))
    console.print(table)


def _choices(head: str, count: int) -> list[str]:
    from esper.actions import BLENDS, Op
    from esper.growth.blueprints import blueprint_names

    named = {"op": [op.name for op in Op], "blend": list(BLENDS), "blueprint": list(blueprint_names())}
    return named.get(head, [str(i) for i in range(count)])


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def _planned(recording: Recording, task: str | None, episodes: int, seed: int) -> Compare | None:
    """The comparison at the end, which is found out to be possible before anything is learnt; None if there is none."""
    from esper.cli.compare import Compare, labelled
    from esper.tasks.draws import comparison_draws
    from esper.tasks.family import family_of
    from esper.training.catalogue import RULES

    task = task or recording.task
    if not episodes or task is None:
        return None
    family_of(task).draw(comparison_draws(episodes, seed)[0], held_out=True)
    rules = ["none", *(name for name in recording.episodes.controllers if name != "none")]
    known = ",".join(name for name in rules if name in RULES or Path(name).exists())
    labelled(known)
    return Compare(task=task, controllers=known, episodes=episodes, seed=seed, controls=False, device="cpu")


def judge(console: Console, out: Path, recording: Recording, planned: Compare | None) -> int:
    """The result in the environment, beside its teachers, on held-out problems: agreement alone proves little."""
    console.print(f"Written: {out}", soft_wrap=True)
    code = 0
    if planned is not None:
        everyone = f"{planned.controllers},{out}"
        code = replace(planned, controllers=everyone).into(out.with_suffix("") / "comparison")
    elif recording.task is None:
        console.print("The recording is of several tasks: compare with esper compare --task TASK --controllers …")
    console.print(f"Grow with it: esper grow --controller {out}", soft_wrap=True)
    console.print(f"Train on from it: esper train --init {out}", soft_wrap=True)
    return code

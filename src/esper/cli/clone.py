"""`esper clone`: a policy that does what a recorded controller did; and what `esper offline` shares with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console
from rich.table import Table

from esper.actions import BLENDS, Op
from esper.agent.policies import growth_network_config, save_policy
from esper.cli.compare import Compare, labelled
from esper.cli.options import ConfigOptions, by_default, claim_file
from esper.cli.terminal import ProgressDisplay, wide_console
from esper.growth.blueprints import blueprint_names
from esper.offline.agreement import HeadAgreement
from esper.offline.cloning import CloneConfig, clone
from esper.offline.fitting import Learned
from esper.offline.recording import Recording, growth_schema, of_controller, read
from esper.tasks.draws import comparison_draws
from esper.tasks.family import family_of
from esper.training.catalogue import RULES


@dataclass(frozen=True, kw_only=True)
class FromRecording(ConfigOptions):
    """A policy learnt from a recording, judged by agreement with its teachers and in the environment."""

    recording: Annotated[Path, tyro.conf.Positional]
    """A folder that esper record wrote."""
    out: Path
    """Where the policy goes: a controller for --controller and --controllers, and a start for esper train --init.
    No file may be there."""
    compare_episodes: int = 16
    """Held-out problems for the comparison at the end; 0 leaves it out."""
    task: Annotated[str | None, by_default("the recording's own")] = None
    """Family for that comparison."""

    def _learn(self, how: str, recording: Recording, config: Any, method: Callable[..., Learned]) -> int:
        """Learn, write the policy, and show how well it agrees with its teachers and does in the environment."""
        torch.set_num_threads(1)  # small nets: threads that spin cost several times the work
        if self.out.suffix != ".safetensors" or self.out.with_suffix("").is_file():
            raise ValueError(f"the policy goes to a .safetensors file beside a folder of its name, not to {self.out}")
        planned = self._planned(recording, config.seed)
        claim_file(self.out, "--out", new=True)
        console = wide_console()
        with ProgressDisplay(console, "epochs") as progress:
            learned = method(
                recording.episodes,
                growth_network_config(),
                config,
                lambda what, done, of, loss: progress.note(done, of, f"{what}, held-out loss {loss:.3f}"),
            )
        claim_file(self.out, "--out", new=True)  # another command may have been quicker
        save_learned(self.out, learned, how, config, recording)
        show_agreement(console, learned)
        return self._judge(console, recording, planned)

    def _planned(self, recording: Recording, seed: int) -> Compare | None:
        """The comparison at the end, found to be possible before anything is learnt; None if there is none."""
        task, episodes = self.task or recording.task, self.compare_episodes
        if not episodes or task is None:
            return None
        family_of(task).draw(comparison_draws(episodes, seed)[0], held_out=True)
        rules = ["none", *(name for name in recording.episodes.controllers if name != "none")]
        known = ",".join(name for name in rules if name in RULES or Path(name).exists())
        labelled(known)
        return Compare(task=task, controllers=known, episodes=episodes, seed=seed, controls=False, device="cpu")

    def _judge(self, console: Console, recording: Recording, planned: Compare | None) -> int:
        """The result in the environment, beside its teachers, on held-out problems: agreement alone proves little."""
        out, code = self.out, 0
        console.print(f"Written: {out}", soft_wrap=True)
        if planned is not None:
            everyone = f"{planned.controllers},{out}"
            code = replace(planned, controllers=everyone).into(out.with_suffix("") / "comparison")
        elif recording.task is None:
            console.print("The recording is of several tasks: compare with esper compare --task TASK --controllers …")
        console.print(f"Grow with it: esper grow --controller {out}", soft_wrap=True)
        console.print(f"Train on from it: esper train --init {out}", soft_wrap=True)
        return code


@dataclass(frozen=True, kw_only=True)
class Clone(FromRecording, CloneConfig):
    """Learn to imitate the controllers of a recording; judge the result by agreement and in the environment."""

    out: Path = Path("clone.safetensors")
    teacher: Annotated[str | None, by_default("all that were recorded, alike")] = None
    """Imitate this controller only."""

    def run(self) -> int:
        recording = read(self.recording, growth_schema())
        if self.teacher is not None:
            recording = replace(recording, episodes=of_controller(recording.episodes, self.teacher))
        return self._learn("esper clone", recording, self.config_as(CloneConfig), clone)


def save_learned(path: Path, learned: Learned, how: str, config: Any, recording: Recording) -> None:
    """An ordinary checkpoint that says where it comes from."""
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
    names = _choices(name, len(head.confusion))
    seen = [i for i, row in enumerate(head.confusion) if sum(row) or any(other[i] for other in head.confusion)]
    if len(seen) < 2:
        return
    table = Table(f"{name}: it did ↓", *(names[i] for i in seen), box=None, pad_edge=False, padding=(0, 2))
    for i in seen:
        table.add_row(names[i], *(str(head.confusion[i][j] or "·") for j in seen))
    console.print(table)


def _choices(head: str, count: int) -> list[str]:
    named = {"op": [op.name for op in Op], "blend": list(BLENDS), "blueprint": list(blueprint_names())}
    return named.get(head, [str(i) for i in range(count)])


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


COMMAND = Clone

"""`esper clone`: a policy that does what a recorded controller did."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class Clone:
    """Learn to imitate the controllers of a recording; judge the result by agreement and in the environment."""

    recording: Annotated[Path, tyro.conf.Positional]
    """A folder that esper record wrote."""
    out: Path = Path("clone.safetensors")
    """Where the policy goes: a controller for --controller and --controllers, and a start for esper train --init.
    No file may be there."""
    teacher: str | None = None
    """Imitate this controller only; the default is all that were recorded, alike."""
    epochs: int = 25
    """Passes over the episodes."""
    balance: float = 0.2
    """0 counts every step alike, 1 every choice alike however rare, and between is between."""
    seed: int = 0
    """Decides the first weights and which problems are held out."""
    compare_episodes: int = 16
    """Held-out problems for the comparison at the end; 0 leaves it out."""
    task: str | None = None
    """Family for that comparison; the default is the recording's own."""

    def run(self) -> int:
        import torch

        from esper.agent.controller import growth_network_config
        from esper.cli.imitation import learn_and_judge
        from esper.offline.cloning import CloneConfig, clone
        from esper.offline.recording import growth_schema, of_controller, read

        torch.set_num_threads(1)  # small nets: threads that spin cost several times the work
        config = CloneConfig(epochs=self.epochs, balance=self.balance, seed=self.seed)
        recording = read(self.recording, growth_schema())
        if self.teacher is not None:
            recording = replace(recording, episodes=of_controller(recording.episodes, self.teacher))
        teach = partial(clone, recording.episodes, growth_network_config(), config)
        return learn_and_judge("esper clone", recording, config, teach, self.out, self.task, self.compare_episodes)


COMMAND = Clone

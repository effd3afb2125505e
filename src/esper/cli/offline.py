"""`esper offline`: a policy that does what paid in a recording, not merely what was done."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class Offline:
    """Learn from recorded episodes and their rewards by implicit Q-learning; judge the result in the environment."""

    recording: Annotated[Path, tyro.conf.Positional]
    """A folder that esper record wrote, with several controllers or with exploration noise."""
    out: Path = Path("offline.safetensors")
    """Where the policy goes: a controller for --controller and --controllers, and a start for esper train --init.
    No file may be there."""
    epochs: int = 25
    """Passes over the episodes, for the values and again for the policy."""
    expectile: float = 0.7
    """0.5 values what the data do on average, towards 1 what their best actions reach."""
    temperature: float = 0.5
    """In standard deviations of the advantage: small copies the best actions only, large copies all."""
    conservative: float = 0.0
    """Weight of the term that keeps the values of actions nobody took low; 0 is plain IQL."""
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
        from esper.offline.iql import IQLConfig, iql
        from esper.offline.recording import growth_schema, read

        torch.set_num_threads(1)  # small nets: threads that spin cost several times the work
        config = IQLConfig(
            epochs=self.epochs,
            expectile=self.expectile,
            temperature=self.temperature,
            conservative=self.conservative,
            seed=self.seed,
        )
        recording = read(self.recording, growth_schema())
        teach = partial(iql, recording.episodes, growth_network_config(), config)
        return learn_and_judge("esper offline", recording, config, teach, self.out, self.task, self.compare_episodes)


COMMAND = Offline

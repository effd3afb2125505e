"""`esper checkpoint`: look into a checkpoint, or bring an old one up to date."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from esper.cli.options import by_default, claim_file


@dataclass(frozen=True)
class CheckpointCommand:
    """Show what a checkpoint holds, or rewrite an old one in the current format. Nothing in the file is executed."""

    action: Annotated[Literal["inspect", "upgrade"], tyro.conf.Positional]
    """inspect or upgrade."""
    path: Annotated[Path, tyro.conf.Positional]
    """The checkpoint."""
    out: Annotated[Path | None, by_default("in place")] = None
    """Where the upgraded one goes. No other file may be there."""

    def run(self) -> int:
        from esper.agent.checkpoints import (
            CHECKPOINT_VERSION,
            inspect_checkpoint,
            load_checkpoint,
            upgrade_checkpoint,
        )

        if self.action == "upgrade":
            if self.out is not None and self.out.absolute() != self.path.absolute():
                claim_file(self.out, "--out", new=True)
            had, written = upgrade_checkpoint(self.path, self.out)
            is_new = had == CHECKPOINT_VERSION
            print(f"{written}: version {had} is {'current' if is_new else f'now version {CHECKPOINT_VERSION}'}")
            return 0
        info = inspect_checkpoint(self.path)
        add = f"without a digest; add one with: esper checkpoint upgrade {self.path}"
        print(f"{self.path}: version {info.version} ({'current' if info.version == CHECKPOINT_VERSION else add})")
        caller = info.data.get("caller", {})
        for key in ("update", "best_score"):
            if key in caller:
                print(f"  {key}: {caller[key]}")
        network = info.data.get("network", {})
        print("  network: " + ", ".join(f"{key} {value}" for key, value in network.items() if key != "space"))
        sizes = [math.prod(shape) for name, shape in info.shapes.items() if name.startswith("network/")]
        print(f"  {len(info.shapes)} tensors, {sum(sizes):,} network parameters")
        load_checkpoint(self.path)  # what is damaged beyond the header is said, too
        return 0


COMMAND = CheckpointCommand

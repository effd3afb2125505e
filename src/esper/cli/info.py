"""`esper info`: what there is."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

import esper
from esper.agent.shipped import provenance, shipped_names
from esper.cli.terminal import wide_console


@dataclass(frozen=True)
class Info:
    """Show the tasks, controllers, blueprints and devices that this installation has."""

    json: bool = False
    """Print JSON instead of tables."""

    def run(self) -> int:
        import torch

        from esper.growth.blueprints import LAYOUTS, blueprint_names
        from esper.tasks import task_names
        from esper.tasks.family import family_names
        from esper.training.catalogue import RULES

        fits = {name: _layouts(name) for name in blueprint_names()}
        devices = ["cpu", *(f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count()))]
        facts: dict[str, Any] = {
            "version": esper.__version__,
            "torch": str(torch.__version__),
            "devices": devices,
            "tasks": list(task_names()),
            "families": [name for name in family_names() if name not in task_names()],
            "controllers": [*RULES, *shipped_names()],
            "learned": {name: asdict(provenance(name)) for name in shipped_names()},
            "layouts": dict(LAYOUTS),
            "blueprints": fits,
        }
        print(json.dumps(facts, indent=2)) if self.json else _show(facts)
        return 0


def _layouts(name: str) -> dict[str, str]:
    """Layout → one-line summary of what grows there under this name."""
    from esper.growth.blueprints import LAYOUTS, SlotShape, fitting

    found = {layout: b for layout in LAYOUTS for b in fitting(SlotShape(layout, 8)) if b.name == name}
    return {layout: entry.summary for layout, entry in found.items()}


def _show(facts: dict[str, Any]) -> None:
    console = wide_console()
    console.print(f"esper {facts['version']}, torch {facts['torch']}")
    for key in ("devices", "tasks", "families", "controllers"):
        console.print(Text.assemble((key, "bold"), f": {', '.join(facts[key])}"))
    for name in shipped_names():
        console.print(Text.assemble((name, "bold"), f": {provenance(name)}"), highlight=False)
    table = Table("blueprint", "grows in", "what it is", box=None, pad_edge=False)
    for name, layouts in facts["blueprints"].items():
        table.add_row(name, ", ".join(layouts), next(iter(layouts.values()), ""))
    console.print(table)


COMMAND = Info

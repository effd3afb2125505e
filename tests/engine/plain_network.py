"""One network of a stack as a plain module: the host's class with its weights, and the seeds that act in it.

The obvious form of what the stacked engine computes, for tests that compare the two.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from esper.actions import BLENDS
from esper.engine.stacked.engine import StackedEngine
from esper.engine.stacked.stack import Stack
from esper.growth.blueprints import blueprint_names
from esper.growth.graft import graft
from esper.growth.seed import Seed
from esper.tasks.stacking import plain_host, slot_shapes


def exported(engine: StackedEngine, group: int, row: int) -> nn.Module:
    """The network of a row of a group, as it is now."""
    stack, place, columns, names = (
        engine.stacks[group],
        int(engine.places[group][row]),
        engine.columns,
        blueprint_names(),
    )
    kept = [
        (
            int(slot),
            names[int(columns.blueprint[place, slot])],
            BLENDS[int(columns.blend[place, slot])],
            float(columns.alpha[place, slot]),
        )
        for slot in np.flatnonzero(engine._states().acting[place, : stack.slots])
    ]
    return plain_network(stack, row, kept)


def plain_network(stack: Stack, row: int, kept: list[tuple[int, str, str, float]]) -> nn.Module:
    """On the CPU, in the mode for evaluation; `kept` are (slot, blueprint, blend, alpha) of the acting seeds."""
    shapes = slot_shapes(stack.problems, row)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        host = plain_host(stack.problems, row).to(stack.dtype)
        bodies = [
            (slot, Seed(blueprint, shapes[slot], blend).body.to(stack.dtype)) for slot, blueprint, blend, _ in kept
        ]
    _load(host, stack.hosts.table.state_dict(stack.host.weights, row) | _statistics(stack, row))
    places: list[tuple[str, nn.Module, float, dict[str, Any]]] = []
    for (slot, blueprint, blend, alpha), (_, body) in zip(kept, bodies, strict=True):
        _load(body, _seed(stack, row, slot, blueprint, gated=blend == "gated"))
        places.append((f"stages.{slot}", body, alpha, {}))
    graft(host, places)
    return host.eval()


def _seed(stack: Stack, row: int, slot: int, blueprint: str, *, gated: bool) -> dict[str, Tensor]:
    table, gates = stack.tables[slot][blueprint], stack.gate_tables[slot]
    weights = table.state_dict(stack.seeds[slot].weights[:, : table.width], row)
    if not gated:
        return weights
    return {f"body.{name}": w for name, w in weights.items()} | gates.state_dict(stack.gates[slot].weights, row)


def _statistics(stack: Stack, row: int) -> dict[str, Tensor]:
    found = {}
    for stage, running in enumerate(stack.running):
        width = int(stack.problems.widths[row, stage])
        found[f"stages.{stage}.1.running_mean"] = running.mean[row, :width]
        found[f"stages.{stage}.1.running_var"] = running.variance[row, :width]
    return found


def _load(module: nn.Module, weights: dict[str, Tensor]) -> None:
    """Every tensor of the module but the count of batches, which a norm of fixed momentum does not use."""
    there = {
        name: weight.cpu() for name, weight in weights.items() if weight.numel()
    }  # what other networks have is empty
    missing, unknown = module.load_state_dict(there, strict=False)
    wrong = [name for name in missing if not name.endswith("num_batches_tracked")] + list(unknown)
    if wrong:
        raise RuntimeError(f"a {type(module).__name__} and its stacked form differ in {', '.join(wrong)}")

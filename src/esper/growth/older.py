"""Weights of folders that were saved before seeds had keys of their own (formats 1 to 3).

There a module with a seed was wrapped: its own weights were called `layer1.host.weight`, the seed's `layer1.seed.…`. A
module that had grown twice was wrapped twice, the later growth outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from esper.growth.graft import SEEDS, Grafted
from esper.growth.plain import grafted


def renamed(
    model: nn.Module, tensors: Mapping[str, Tensor], tied: Mapping[str, str]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Old weights and shared names, by the names that the grafted `model` has for them."""
    grown: dict[nn.Module, list[Grafted]] = {}
    for path, seed in grafted(model):
        grown.setdefault(model.get_submodule(path), []).append(seed)
    names = {name: _new_name(model, grown, name) for name in (*tensors, *tied)}
    pairs = {names[name]: names[other] for name, other in tied.items() if other in names}
    return {names[name]: tensor for name, tensor in tensors.items()}, {a: b for a, b in pairs.items() if a != b}


def _new_name(model: nn.Module, grown: Mapping[nn.Module, list[Grafted]], name: str) -> str:
    module: Any = model
    path: list[str] = []
    rest = name.split(".")
    while module is not None and rest:
        for seed in reversed(grown.get(module, [])):
            if rest[:1] == ["seed"]:
                return ".".join([*_place(model, seed, path), *rest])
            if rest[:1] != ["host"]:
                raise ValueError(f"the weights do not fit the architecture: {name[:60]!r} is of no seed and no host")
            del rest[0]
        if rest:
            module = module._modules.get(rest[0])
            path.append(rest.pop(0))
    return ".".join([*path, *rest])


def _place(model: nn.Module, seed: Grafted, path: list[str]) -> list[str]:
    """Where a seed is registered, seen from one of the names of its module."""
    listed = model.get_submodule(f"{seed.holder}.{SEEDS}".removeprefix("."))._modules
    number = next(name for name, one in listed.items() if one is seed)
    slot, holder = str(seed.grown["path"]), seed.holder
    inside = holder == slot or holder.startswith(f"{slot}.")
    where = [*path, *holder[len(slot) :].split(".")] if inside else holder.split(".")
    return [*(part for part in where if part), SEEDS, number]

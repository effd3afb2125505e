"""Problems that were made in parts (by several processes, or in several chunks) as if they had been made at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from esper.tasks.problems import Form, Problems
from esper.tasks.stacking import HostUniforms, Plans, SeedUniforms

Groups = list[tuple[list[int], Problems]]
"""For each form the places of its draws among all, and the problems."""


def join_groups(parts: Sequence[Groups], device: torch.device | str = "cpu") -> Groups:
    """The groups of consecutive parts of a list of draws, as `stack_draws` of the whole list makes them, on `device`.

    Each large tensor is allocated once, on the device, and every part is copied into its rows.
    """
    found: dict[tuple[Form, int, int], list[tuple[list[int], Problems]]] = {}
    start = 0
    for groups in parts:
        for places, problems in groups:
            key = (problems.form, problems.val_x.shape[1], problems.test_x.shape[1])
            found.setdefault(key, []).append(([start + place for place in places], problems))
        start += sum(len(places) for places, _ in groups)
    where = torch.device(device)
    return [
        ([place for places, _ in some for place in places], _join([problems for _, problems in some], where))
        for some in found.values()
    ]


def _join(parts: Sequence[Problems], device: torch.device) -> Problems:
    joined: dict[str, Any] = {}
    for field in fields(Problems):
        columns = [getattr(part, field.name) for part in parts]
        if all(isinstance(column, Tensor) for column in columns):
            joined[field.name] = _padded(columns, 0, device)
    plans = [part.minibatches for part in parts]
    uniforms = [part.host_uniforms for part in parts]
    if not all(isinstance(plan, Plans) for plan in plans) or not all(isinstance(u, HostUniforms) for u in uniforms):
        raise TypeError("only problems that were drawn one by one can be joined")
    seeds = [seed for one in uniforms if isinstance(one, HostUniforms) for seed in one.seeds]
    return replace(
        parts[0],
        **joined,
        minibatches=Plans(_padded([plan.plan for plan in plans if isinstance(plan, Plans)], 2, device)),
        host_uniforms=HostUniforms(seeds, device),
        seed_uniforms=SeedUniforms(seeds, device),
        facts=tuple(facts for part in parts for facts in part.facts),
    )


def _padded(parts: Sequence[Tensor], axis: int, device: torch.device) -> Tensor:
    """One after the other along `axis`, with zeros up to the largest along all others."""
    shape = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
    shape[axis] = sum(part.shape[axis] for part in parts)
    made, start = torch.zeros(shape, dtype=parts[0].dtype, device=device), 0
    for part in parts:
        rows = made.narrow(axis, start, part.shape[axis])
        rows[tuple(slice(size) for size in part.shape)] = part
        start += part.shape[axis]
    return made

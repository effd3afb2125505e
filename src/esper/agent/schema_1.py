"""What was made when observations had no rent (schema 1): policies, whole agents and recordings, read as schema 2.

The rent is the last field of a run. A policy of schema 1 gets zero weights for it, so it decides as before; a recording
gets the rent that all its episodes had. Nothing but the field was added, so nothing else changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from esper.env.observation import DEAR, OVERALL_FIELDS, squash
from esper.env.rent import RENT_RATE

OLD, NEW = "growth observation 1", "growth observation 2"
RENT = OVERALL_FIELDS.index("rent")
READS = "network/features.first.linear.weight"
"""The weights that read the fields of a run, first, and what is pooled of its slots, after them: [hidden, inputs]."""


def is_old(data: Mapping[str, Any]) -> bool:
    """Of a network's configuration, or of a recording's schema."""
    return data.get("layout") == OLD and data.get("overall_features") == RENT


def with_rent(data: Mapping[str, Any]) -> dict[str, Any]:
    """The same configuration or schema, of schema 2."""
    return {**data, "layout": NEW, "overall_features": RENT + 1}


def policy_with_rent(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a policy, or of a whole agent, with room for the rent; it weighs nothing."""
    found = dict(tensors)
    weights = found.get(READS)
    if weights is None or weights.dim() != 2:
        return found  # damaged: the checks that follow say so
    found[READS] = _column(weights, 0.0)
    for name in ("exp_avg", "exp_avg_sq"):
        for key in [key for key in found if key.startswith("optimizer/") and key.endswith(f"/{name}")]:
            if found[key].shape == weights.shape:
                found[key] = _column(found[key], 0.0)
    for name, neutral in (("mean", 0.0), ("variance", 1.0)):
        key = f"observations/overall/{name}"
        if key in found and found[key].dim() == 1:
            found[key] = torch.cat((found[key], found[key].new_full((1,), neutral)))
    return found


def overall_with_rent(overall: Tensor) -> Tensor:
    """[..., fields] of a recording."""
    paid = squash(torch.tensor(RENT_RATE, dtype=torch.float64), DEAR).to(overall)
    return torch.cat((overall, paid.expand(*overall.shape[:-1], 1)), -1)


def _column(weights: Tensor, value: float) -> Tensor:
    """One more column where the rent is."""
    return torch.cat((weights[:, :RENT], weights.new_full((len(weights), 1), value), weights[:, RENT:]), 1)

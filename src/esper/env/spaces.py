"""The tensors that pass between the decision process and a policy: what it sees, what is legal, what it does.

Leading dimensions are written `...`: [N] in a rollout step, [N, T] in an update. S slots, O operations, B blueprints,
K blends. Environments with fewer slots are padded; `present` says which are real.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Observation:
    """What a policy sees. All features are bounded."""

    overall: Tensor
    """[..., G] float32: the run as a whole."""
    slots: Tensor
    """[..., S, F] float32: each slot."""
    blueprints: Tensor
    """[..., S] int64: blueprint in the slot, as index + 1; 0 is an empty slot."""
    costs: Tensor
    """[..., S, B] float32: relative parameter cost of each blueprint at each slot."""
    present: Tensor
    """[..., S] bool: False for padding."""

    def to(self, device: torch.device) -> Observation:
        return Observation(*(getattr(self, field.name).to(device) for field in fields(self)))


@dataclass(frozen=True, slots=True)
class ActionMasks:
    """True where a choice is possible. Slots depend on the operation, blueprints and blends on the slot."""

    op: Tensor
    """[..., O] bool; WAIT is always True."""
    slot: Tensor
    """[..., O, S] bool."""
    blueprint: Tensor
    """[..., S, B] bool."""
    blend: Tensor
    """[..., S, K] bool."""

    def to(self, device: torch.device) -> ActionMasks:
        return ActionMasks(*(getattr(self, field.name).to(device) for field in fields(self)))

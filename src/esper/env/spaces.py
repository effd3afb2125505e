"""The tensors that pass between the decision process and a policy: what it sees, what is legal, what it does.

Leading dimensions are written `...`: [N] in a rollout step, [N, T] in an update. S slots, O operations, B blueprints,
K blends. Environments with fewer slots are padded; `present` says which are real.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
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

    def map(self, f: Callable[[Tensor], Tensor]) -> Observation:
        return Observation(*(f(getattr(self, field.name)) for field in fields(self)))

    def to(self, device: torch.device) -> Observation:
        return self.map(lambda tensor: tensor.to(device))


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

    def map(self, f: Callable[[Tensor], Tensor]) -> ActionMasks:
        return ActionMasks(*(f(getattr(self, field.name)) for field in fields(self)))

    def to(self, device: torch.device) -> ActionMasks:
        return self.map(lambda tensor: tensor.to(device))


def stack_rows(rows: Sequence[tuple[Observation, ActionMasks]]) -> tuple[Observation, ActionMasks]:
    """Rows of other batches as one batch [N, …], padded to the most slots among them with what is absent or illegal."""
    slots = max(seen.present.shape[-1] for seen, _ in rows)

    def joined(name: str, axis: int, parts: Sequence[object]) -> Tensor:
        tensors = [getattr(part, name) for part in parts]
        if not axis:
            return torch.cat(tensors)
        return torch.cat([F.pad(t, (0, 0) * (-axis - 1) + (0, slots - t.shape[axis])) for t in tensors])

    seen, legal = zip(*rows, strict=True)
    axes = {"slots": -2, "blueprints": -1, "costs": -2, "present": -1, "slot": -1, "blueprint": -2, "blend": -2}
    return (
        Observation(*(joined(field.name, axes.get(field.name, 0), seen) for field in fields(Observation))),
        ActionMasks(*(joined(field.name, axes.get(field.name, 0), legal) for field in fields(ActionMasks))),
    )

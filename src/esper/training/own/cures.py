"""What to say of a loss that cannot be used: the cure, in the words of the person's own code."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from esper.engine.measure import Loss
from esper.errors import shown
from esper.growth.probe import described, input_tensors
from esper.tasks.batches import LABELS
from esper.training.own.default_metrics import ObjectiveError, fits

NAMED = {
    "bce": "BCEWithLogitsLoss",
    "binary": "BCEWithLogitsLoss",
    "cross": "CrossEntropyLoss",
    "mae": "L1Loss",
    "l1": "L1Loss",
    "huber": "HuberLoss",
}
"""Losses of torch by parts of their names elsewhere."""


def check_loss(loss: Any) -> None:
    """Refuse what is no function, and what would have to be trained itself."""
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        raise ValueError(f"loss= is the class {loss.__name__}: pass an object of it, {loss.__name__}()")
    if loss is not None and not callable(loss):
        meant = next((known for word, known in NAMED.items() if word in str(loss).lower()), "MSELoss")
        raise ValueError(
            f"loss= must be a loss of torch, such as torch.nn.{meant}(), or a function of (outputs, targets), not "
            f"{shown(loss)}"
        )
    if isinstance(loss, nn.Module) and any(parameter.requires_grad for parameter in loss.parameters()):
        raise ValueError(
            "the loss has parameters of its own, which would not be trained: put them into the model, or freeze them "
            "with requires_grad_(False)"
        )


def tried_loss(loss: Loss, outputs: Any, targets: Tensor, *, copied: bool) -> Tensor:
    """What the loss gives, if it leaves its targets as they are and follows nothing but outputs and targets."""
    given: tuple[Any, Tensor] = tree_map_only(Tensor, lambda leaf: leaf.detach().clone(), (outputs, targets))
    with torch.enable_grad():
        found = loss(*given)
    if not isinstance(found, Tensor) or found.dim() > 0:
        raise ObjectiveError(f"the loss must give one number, a tensor without axes, not {described(found)}")
    if not torch.equal(given[1], targets):
        raise ObjectiveError(
            "the loss changes the targets in place, and they are needed again when seeds learn and are measured: let "
            "it begin with targets = targets.clone()"
        )
    if copied and found.requires_grad:
        raise ObjectiveError(
            "the loss follows parameters that are not in the model's outputs, such as those of the model that you "
            "passed, and a copy of that is trained: pass in_place=True, or use esper.Growth; or, of another network "
            "that the loss only reads, freeze them with requires_grad_(False)"
        )
    return found


def copies(inputs: Any, targets: Tensor) -> bool:
    """One of the inputs is the targets. (That both are constant, as masks and labels may be, says nothing.)"""
    others = {**inputs, LABELS: None} if isinstance(inputs, dict) else inputs
    same = any(part.shape == targets.shape and bool((part == targets).all()) for part in input_tensors(others))
    return same and bool(targets.min() != targets.max())


def cure(loss: Any, kind: str | None, logits: Any, targets: Tensor) -> str:
    """Of a loss of torch that fails for these; empty where none is known."""
    weight = loss.keywords.get("weight") if isinstance(loss, partial) else getattr(loss, "weight", None)
    if isinstance(weight, Tensor) and isinstance(logits, Tensor) and weight.dtype != logits.dtype:
        wanted = str(logits.dtype).removeprefix("torch.")
        return f" (the weight of the loss is {described(weight)} and the outputs are {wanted}: pass it as {wanted})"
    if kind == "classes" and isinstance(logits, Tensor):
        if targets.is_floating_point() and targets.dim() < logits.dim():
            return " (class numbers must be integers: pass the targets as y.long())"
        if logits.dim() > 2 and fits(logits, targets, -1):
            return " (torch wants the classes on axis 1: for cross-entropy over the last axis, leave loss= out)"
    return " (wrap the loss in a function of (outputs, targets), and pass metric=)" if kind == "other" else ""


def if_one_hot(targets: Tensor) -> str:
    """About targets of which each row has a single 1."""
    if targets.dim() != 2 or targets.shape[1] < 2 or not bool((targets.sum(1) == 1).all()):
        return ""
    return "; if they are classes in one-hot form, pass targets.argmax(1)"

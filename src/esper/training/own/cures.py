"""What to say of a loss that cannot be used: the cure, in the words of the person's own code."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from esper.errors import shown
from esper.growth.probe import described
from esper.training.own.default_metrics import fits

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

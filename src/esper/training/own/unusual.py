"""What is unusual about a model and its data before a run, as remarks: no mistake for sure, and seldom meant so."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor, nn

from esper.tasks.data import Split


def ignored_batch_size(batch_size: int, usual: int, train: Any) -> str:
    """Empty where it counts."""
    if batch_size == usual or isinstance(train, Split):
        return ""
    return f"batch_size={batch_size} has no effect: the training data are a loader, which makes its own batches."


def thawed(model: nn.Module) -> str:
    """About batch norms that somebody put into evaluation mode in a model that trains. Empty if there are none."""
    frozen = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not module.training
    ]
    if not model.training or not frozen:
        return ""
    return (
        f"The batch norm {frozen[0]} is in evaluation mode, and will be trained again ({len(frozen)} such): esper.grow "
        "puts the whole model into training mode. In a loop of your own (esper.Growth) it stays as it is."
    )


def reads_model(what: str, function: Any, model: nn.Module) -> str:
    """About a loss or metric that names the person's own model, of which a copy is trained. Empty if it does not."""
    function = function.func if isinstance(function, partial) else function
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    if code is None:
        return ""
    known = [function.__globals__.get(name) for name in code.co_names]
    for name, cell in zip(code.co_freevars, cells, strict=True):
        with suppress(ValueError):  # nothing is in it yet
            known += [cell.cell_contents] if name != "self" else []
    if not any(one is part for one in known if isinstance(one, nn.Module) for part in model.modules()):
        return ""
    return (
        f"The {what} reads the model that you passed, and a copy of it is trained: what changes in training is not "
        "seen. If it reads more than constants, pass in_place=True, or use esper.Growth."
    )


def validates_on_training(train: Any, val: Any) -> str:
    """Empty where the data are not known to be the same."""
    same = train is val or getattr(train, "dataset", train) is getattr(val, "dataset", val)
    if isinstance(train, Split) and isinstance(val, Split):
        same = _is_same(train.x, val.x)
    if not same:
        return ""
    return (
        "Training and validation data are the same: the figures say how well examples are remembered, and seeds are "
        "kept by them. Pass examples that are not trained on."
    )


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.data_ptr() == other.data_ptr()


def gives_probabilities(outputs: Tensor, axis: int) -> str:
    """About a model that ends in a softmax, for a loss that applies one. Empty if it does not."""
    if outputs.dim() < 2 or outputs.shape[axis] < 2 or not bool((outputs >= 0).all()):
        return ""
    if not bool(((outputs.float().sum(axis) - 1.0).abs() < 1e-3).all()):
        return ""
    return (
        "The outputs of the model are probabilities, and cross-entropy applies a softmax of its own, so the model "
        "learns slowly: leave the softmax out, or end in a LogSoftmax and pass loss=torch.nn.NLLLoss()."
    )

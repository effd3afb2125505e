"""What a loader gives, as (inputs, targets) of tensors. What cannot be used is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

Batch = tuple[Any, Tensor]
"""Model inputs (a tensor, a tuple of arguments or a dict of keyword arguments) and targets."""

LABELS = "labels"
"""Where a dict has its targets, by the convention of Hugging Face."""


def as_batch(given: Any, name: str, *, pass_labels: bool) -> Batch:
    """(inputs, targets), (input, another input, …, targets), or a dict with `labels`.

    With `pass_labels` the model gets the labels of a dict, too: it has a loss of its own.
    """
    if isinstance(given, Mapping):
        if LABELS not in given:
            keys = ", ".join(map(str, given))
            raise ValueError(
                f"the {name} loader gave a {type(given).__name__} of {keys}: put the targets under {LABELS!r}, or give "
                "(inputs, targets) pairs"
            )
        converted = {key: _converted(value, f"{name} {key}") for key, value in given.items()}
        targets = converted[LABELS]
        if not isinstance(targets, Tensor):
            raise ValueError(f"the {LABELS!r} of the {name} loader are a {type(given[LABELS]).__name__}: give a tensor")
        return {key: value for key, value in converted.items() if pass_labels or key != LABELS}, targets
    if isinstance(given, tuple | list) and len(given) >= 2:
        inputs = [_converted(part, f"{name} inputs") for part in given[:-1]]
        targets = _converted(given[-1], f"{name} targets")
        if isinstance(targets, Tensor):
            return inputs[0] if len(inputs) == 1 else tuple(inputs), targets
    what = f"a {type(given).__name__}"
    if isinstance(given, tuple | list):
        what += f" of {len(given)}: " + ", ".join(type(part).__name__ for part in given[:3])
    raise ValueError(
        f"the {name} loader must give dicts with {LABELS!r} or (inputs, targets) pairs of tensors, and gave {what}"
    )


def _converted(part: Any, what: str) -> Any:
    """Arrays, frames and series as tensors, also inside of containers; anything else as it is."""
    if isinstance(part, Mapping):
        return {key: _converted(value, f"{what} {key!r}") for key, value in part.items()}
    if isinstance(part, tuple | list):
        return tuple(_converted(value, what) for value in part)
    return to_tensor(part, what) if is_array(part) else part


def is_array(part: Any) -> bool:
    """An array of numpy, or a frame or series of pandas (or of another library with `to_numpy`)."""
    return isinstance(part, np.ndarray) or (not isinstance(part, Tensor) and callable(getattr(part, "to_numpy", None)))


def to_tensor(part: Any, what: str) -> Tensor:
    """An array as a tensor; its real numbers in torch's precision, which is what models are made of."""
    if isinstance(part, Tensor):
        return part
    if not isinstance(part, np.ndarray):
        part = _columns(part, what) if getattr(part, "columns", None) is not None else part.to_numpy()
    try:
        tensor = torch.from_numpy(np.require(part, requirements=["C", "W"]))
    except TypeError:
        kind, cure = ("text", ", such as pandas.factorize(y)[0]") if part.dtype.kind in "US" else (part.dtype, "")
        raise ValueError(f"the {what} are an array of {kind}: give numbers{cure}") from None
    return tensor.to(torch.get_default_dtype()) if tensor.is_floating_point() else tensor


def _columns(frame: Any, what: str) -> Any:
    """A frame as one array. `to_numpy` makes objects of columns of different kinds."""
    columns = {name: frame[name].to_numpy() for name in frame.columns}
    wrong = [name for name, column in columns.items() if column.dtype.kind not in "biuf"]
    if wrong:
        named = ", ".join(map(repr, wrong[:5])) + (", …" if len(wrong) > 5 else "")
        raise ValueError(f"the {what} have columns that are not numbers, {named}: encode or drop them")
    return np.column_stack(list(columns.values())) if columns else np.zeros((len(frame), 0))


def move(inputs: Any, device: torch.device) -> Any:
    if isinstance(inputs, Tensor):
        return inputs.to(device, non_blocking=True)
    if isinstance(inputs, Mapping):
        return {key: move(value, device) for key, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return tuple(move(value, device) for value in inputs)
    return inputs

"""Look at a model before it grows: run it on two and on three examples and note what each module got and gave.

The model is left as it was: modes, buffers and random numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from esper.errors import first_line
from esper.growth.graft import argument_names, without_nested_tensors
from esper.growth.randomness import preserved_rng
from esper.growth.slot import preserved_attributes, preserved_buffers, preserved_modes

CASTS = {torch.float32: "x.float()", torch.float64: "x.double()", torch.bfloat16: "x.bfloat16()"}


class AttachError(ValueError):
    """A slot that cannot work, with the reason."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a module, and what it returned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    def inputs(self, module: nn.Module) -> dict[str, Any]:
        """By name, as far as the module's forward names them."""
        return {**dict(zip(argument_names(module), self.args, strict=False)), **self.kwargs}


@dataclass(frozen=True, slots=True)
class Probe:
    """What two forward passes, on two and on three examples, showed about the host's modules."""

    counts: Counter[nn.Module]
    """Calls per pass."""
    passes: tuple[dict[nn.Module, Call], dict[nn.Module, Call]]
    """Each module's last call in both passes, in the order in which they finished."""


def probe(model: nn.Module, example: Any) -> Probe:
    counts: Counter[nn.Module] = Counter()
    passes: list[dict[nn.Module, Call]] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        counts[module] += 1
        passes[-1].pop(module, None)  # a module called again finishes last
        passes[-1][module] = Call(args, kwargs, output)

    handles = [module.register_forward_hook(note, with_kwargs=True) for module in model.modules()]
    try:
        for size in (2, 3):
            counts.clear()
            passes.append({})
            try_batch(model, with_batch(example, size))
    finally:
        for handle in handles:
            handle.remove()
    return Probe(counts, (passes[0], passes[1]))


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, without gradients; afterwards modes, attributes, buffers and random numbers are as before.

    What torch's encoders do with padding is what they do in training, see `without_nested_tensors`.
    """
    device = next(model.parameters()).device
    with preserved_modes(model), preserved_attributes(model, first=True):
        model.eval()
        without_nested_tensors(model)
        with torch.no_grad(), preserved_rng(device), preserved_buffers(model):
            yield


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a batch is passed to a model: a mapping by keyword, a tuple or list one by one, anything else alone."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    return (inputs,), {}


def call(model: nn.Module, inputs: Any) -> Any:
    """The model's outputs for a batch."""
    args, kwargs = arguments(inputs)
    return model(*args, **kwargs)


def call_on_copies(model: nn.Module, inputs: Any) -> Any:
    """The same, with what it is given kept from being changed; a model that changes it is refused."""
    given = tree_map_only(Tensor, Tensor.clone, inputs)
    outputs = call(model, given)
    for before, after in zip(tree_leaves(inputs), tree_leaves(given), strict=True):
        # Other tensors have no version, or cannot be compared.
        if isinstance(after, Tensor) and after._version > 0 and not bool(((before == after) | before.isnan()).all()):
            raise AttachError(
                f"{type(model).__name__} changes its inputs in place, and they are needed again when seeds learn and "
                "are measured: let its forward begin with a copy, x = x.clone()"
            )
    return outputs


def try_batch(model: nn.Module, inputs: Any) -> Any:
    """The same, with the model left as it was; an error becomes one line."""
    with tried_batch(model, inputs) as outputs:
        return outputs


@contextmanager
def tried_batch(model: nn.Module, inputs: Any) -> Iterator[Any]:
    """The same outputs, while the model still holds what it notes on itself in a pass, which a loss may read."""
    with untouched(model):
        yield _outputs(model, inputs)


def _outputs(model: nn.Module, inputs: Any) -> Any:
    try:
        outputs = call_on_copies(model, inputs)
    except AttachError:
        raise
    except Exception as error:
        args, kwargs = arguments(inputs)
        detail = first_line(error)
        given = ", ".join(
            f"{v.dtype} {list(v.shape)}" if isinstance(v, Tensor) else type(v).__name__
            for v in (*args, *kwargs.values())
        )
        raise AttachError(
            f"{type(model).__name__} does not accept the example batch ({given}): {detail}"
            + _cure(model, detail, [*args, *kwargs.values()])
        ) from error
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(outputs)):
        raise AttachError(
            f"{type(model).__name__} returns a {type(outputs).__name__}, in which no tensor can be seen: return a "
            "tensor, a tuple, a named tuple or a dict of tensors"
        )
    return outputs


def _cure(model: nn.Module, detail: str, given: Sequence[Any]) -> str:
    """Of inputs whose type is not the weights'."""
    wanted = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    wrong = [v for v in given if isinstance(v, Tensor) and v.dtype != wanted]
    if not wrong or wanted is None or "type" not in detail:
        return ""
    if "indices" in detail:
        return " (an embedding takes whole numbers: pass x.long())"
    return (
        f" (the model's weights are {str(wanted).removeprefix('torch.')}: pass {CASTS.get(wanted, f'x.to({wanted})')})"
    )


def input_tensors(inputs: Any) -> list[Tensor]:
    """The tensors among a model's arguments that have a batch axis."""
    args, kwargs = arguments(inputs)
    return [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim() > 0]


def described(value: Any) -> str:
    """Type and shape of a tensor or an array; the type of anything else."""
    if not isinstance(value, Tensor | np.ndarray):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def with_batch(example: Any, size: int) -> Any:
    """The example with `size` rows (repeated as needed) in every tensor that has its batch as first axis."""
    args, kwargs = arguments(example)
    tensors = input_tensors(example)
    if not tensors or tensors[0].shape[0] == 0:
        given = (*args, *kwargs.values())
        frames = any(isinstance(value, np.ndarray) or getattr(value, "to_numpy", None) for value in given)
        cure = ": of an array or a frame make one, torch.tensor(…)" if frames else ""
        raise AttachError(f"the example batch must contain at least one tensor with at least one row{cure}")
    batch = tensors[0].shape[0]

    def resize(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == batch:
            return value[torch.arange(size, device=value.device) % batch]
        return value

    return {k: resize(v) for k, v in kwargs.items()} if kwargs else tuple(resize(value) for value in args)

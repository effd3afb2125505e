"""How large what a saved model describes may be. Sizes are computed before memory is taken.

The measure is `model.safetensors`, which lies beside the description: a network has the values that its weights have.
So there is no limit for honest models, however large, and a small file cannot ask for much memory.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

MOST_JSON_BYTES = 16 * 2**20
"""Of `architecture.json`. One graft takes about 500 bytes."""
MORE_VALUES = 2
"""Times the saved values: a parametrised layer (weight_norm, say) registers its weight, then other forms of it."""
EXTRA_VALUES = 2**24
"""Beyond that, 64 MB in single precision: buffers that are not saved, such as tables of positions."""
MODULES_PER_TENSOR = 16
EXTRA_MODULES = 1000


class TooLargeError(ValueError):
    """A description of more than the weights beside it."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the weights of a model."""

    tensors: int
    values: int

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Sizes:
        tensors = [value for value in state.values() if isinstance(value, Tensor)]
        return cls(len(tensors), sum(tensor.numel() for tensor in tensors))

    @classmethod
    def read(cls, weights: Path) -> Sizes:
        """From the header alone; safetensors refuses one that does not fit the length of its file."""
        with safe_open(weights, framework="pt") as file:
            shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118  (no mapping)
        return cls(len(shapes), sum(math.prod(shape) for shape in shapes))

    def check_modules(self, modules: int) -> None:
        most = MODULES_PER_TENSOR * self.tensors + EXTRA_MODULES
        if modules > most:
            raise TooLargeError(f"it has more than {most:,} modules for {self.tensors:,} tensors of weights")

    def check_values(self, values: int) -> None:
        most = MORE_VALUES * self.values + EXTRA_VALUES
        if values > most:
            raise TooLargeError(f"it has more than {most:,} values, and the weights have {self.values:,}")


@contextmanager
def without_memory(sizes: Sizes) -> Iterator[None]:
    """Within, modules are built on the meta device; more than weights of these sizes could fill is refused."""
    values, modules = 0, 0
    thread = threading.get_ident()  # the hooks are torch's, for all threads

    def note_tensor(module: Any, name: str, tensor: Tensor | None) -> None:
        nonlocal values
        if tensor is None or threading.get_ident() != thread:
            return
        values += tensor.numel()
        sizes.check_values(values)

    def note_module(parent: Any, name: str, module: Any) -> None:
        nonlocal modules
        modules += threading.get_ident() == thread
        sizes.check_modules(modules)

    with ExitStack() as stack:
        for handle in (
            register_module_parameter_registration_hook(note_tensor),
            register_module_buffer_registration_hook(note_tensor),
            register_module_module_registration_hook(note_module),
        ):
            stack.callback(handle.remove)
        stack.enter_context(torch.device("meta"))
        yield

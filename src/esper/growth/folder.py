"""The files of a saved model: which there are, that they are those that were saved, and how much they may describe.

Every file has a digest in `architecture.json`, which is written last and has one of itself. Digests find damage, not
malice: whoever changes a file on purpose can write the digest that fits.

Sizes are computed before memory is taken. The measure is `model.safetensors`: a network has the values that its weights
have. So there is no limit for models that are what they say, however large, and a small file cannot claim much memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Collection, Iterator, Mapping
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

from esper.config import read_small
from esper.errors import refused

ARCHITECTURE = "architecture.json"
FILES = ("model.safetensors", "model.pt2", "model.py", "history.json")
"""All others that a folder may have."""

FORMAT = "esper-model"
FORMAT_VERSION = 4
"""2: grafts say what they may read (`visibility`), and may stand where channels come last. 3: digests. 4: seeds have
keys of their own, and the host's are the host's."""
FIRST_WITH_DIGESTS = 3
FIRST_WITH_HOST_KEYS = 4

MOST_JSON_BYTES = 16 * 2**20
"""Of `architecture.json`. One graft takes about 500 bytes."""
MORE_VALUES = 2
"""Times the saved values: a parametrised layer (weight_norm, say) registers its weight, then other forms of it."""
EXTRA_VALUES = 2**24
"""Beyond that, 64 MB in single precision: buffers that are not saved, such as tables of positions."""
MODULES_PER_TENSOR = 16
EXTRA_MODULES = 1000


class LoadError(ValueError):
    """A directory that holds no usable model, with the reason."""


def with_digests(
    architecture: dict[str, Any], files: Mapping[str, bytes], own_name: str = ARCHITECTURE
) -> dict[str, Any]:
    """The architecture with the digest of each file, and of itself."""
    digests = {name: f"sha256:{hashlib.sha256(content).hexdigest()}" for name, content in files.items() if content}
    own = _own_digest({**architecture, "digests": digests}, own_name)
    return {**architecture, "digests": {**digests, own_name: own}}


def _own_digest(architecture: dict[str, Any], own_name: str) -> str:
    """Of the data without this digest, so that neither layout nor order of the text matters."""
    others = {name: digest for name, digest in architecture["digests"].items() if name != own_name}
    text = json.dumps({**architecture, "digests": others}, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def read_architecture(folder: Path) -> dict[str, Any]:
    """`architecture.json`, after a look at every file beside it that it names."""
    path = folder / ARCHITECTURE
    with refused(LoadError, f"{path} is damaged or cannot be read", OSError, ValueError, RecursionError):
        if not path.exists() and any((folder / name).exists() for name in FILES):
            raise LoadError(
                f"{folder} holds a model that was not saved to the end: there is no {ARCHITECTURE}, which is written "
                "last; save the model again"
            )
        if not path.exists():
            raise LoadError(f"{folder} holds no saved model: there is no {ARCHITECTURE} in it")
        found = json.loads(read_small(path, MOST_JSON_BYTES))
    _check_format(found, path)
    if "digests" in found:  # folders of the first formats have none
        check_digests(found, folder, ARCHITECTURE, FILES)
    return found  # type: ignore[no-any-return]


def _check_format(found: Any, path: Path) -> None:
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise LoadError(f"{path} does not describe a model saved by Esper")
    version = found.get("version")
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise LoadError(f"{path} has format {version!r:.60}; this Esper reads up to {FORMAT_VERSION}: update Esper")
    required = ("host", "grafts", "tied", *(("digests",) if version >= FIRST_WITH_DIGESTS else ()))
    if missing := [key for key in required if key not in found]:
        raise LoadError(f"{path} is damaged: it has no {missing[0]!r}")


def check_digests(document: dict[str, Any], folder: Path, own_name: str, others: Collection[str]) -> None:
    """Refuse a document, or a file beside it that it names, that is not as it was saved."""
    path, digests = folder / own_name, document.get("digests")
    if not isinstance(digests, dict) or not digests.keys() <= {own_name, *others}:
        raise LoadError(f"{path} is damaged: its digests are not those of a model's files")
    if digests.get(own_name) != _own_digest(document, own_name):
        raise LoadError(f"{path} is damaged, or was changed after it was saved: its digest does not fit")
    # A folder may hold files of other origin, and may be kept without, say, model.pt2: who needs it will miss it.
    for file in (folder / name for name in others if name in digests and (folder / name).exists()):
        check_plain(file)
        with refused(LoadError, f"{file} cannot be read", OSError), file.open("rb") as content:
            digest = f"sha256:{hashlib.file_digest(content, 'sha256').hexdigest()}"
        if digest != digests[file.name]:
            raise LoadError(f"{file} is damaged, or was changed after it was saved: its digest does not fit")


def check_plain(path: Path) -> None:
    """Refuse a pipe or a device, whose reader would wait, or never end."""
    if not path.is_file():
        raise LoadError(f"{path} is not a file")


# -- sizes ------------------------------------------------------------------------------------------------------------


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

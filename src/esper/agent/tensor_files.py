"""Tensors and a JSON header in one safetensors file, with a digest that shows damage. Reading one never executes
anything.

The digest is a SHA-256 over everything that a reader gets: the header's text, and each tensor's name, dtype, shape and
bytes. It finds a bit that flipped on a disk; it does not say who wrote the file (whoever changes one can compute
another). Files from before there was a digest have none, and it is for the reader to say whether it takes them.

The header is one entry of the file's metadata, with the digest as its last field: safetensors writes several entries in
any order, and the same content would be other bytes every time.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from esper.errors import first_line
from esper.files import write_whole

DIGEST = "sha256"
"""The digest's field in the header. Another way to compute it would need another name."""
_DIGEST_AT_END = re.compile(rf', "{DIGEST}": "([0-9a-f]{{64}})"}}\Z')


class TensorFileError(ValueError):
    """A file that is damaged, or no safetensors file; the reason without the path."""


@dataclass(frozen=True, slots=True)
class TensorFile:
    """What a file holds."""

    tensors: dict[str, Tensor]
    header: str | None
    """JSON without the digest; None where the file has no such header."""
    has_digest: bool
    """Whether there was one; it agreed."""


def write_tensor_file(path: Path, tensors: Mapping[str, Tensor], key: str, header: Mapping[str, Any]) -> None:
    """The file appears whole or not at all; `key` says in its metadata whose file it is."""
    named = {name: tensor.detach().contiguous().cpu().clone() for name, tensor in tensors.items()}
    text = json.dumps(dict(header), sort_keys=True)
    content = save(named, metadata={key: f'{text[:-1]}, "{DIGEST}": "{_digest(text, named)}"}}'})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content)


def read_tensor_file(path: Path, key: str, device: torch.device | str = "cpu") -> TensorFile:
    """All from one opening: a file that is replaced meanwhile is read as it was."""
    with _opened(path) as file:
        header, found = _split((file.metadata() or {}).get(key))
        tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
        digest = _digest(header or "", tensors)
    if found is not None and found != digest:
        raise TensorFileError(f"its contents do not agree with their {DIGEST}")
    return TensorFile({name: tensor.to(device) for name, tensor in tensors.items()}, header, found is not None)


def read_header(path: Path, key: str) -> tuple[str | None, dict[str, tuple[int, ...]]]:
    """Header and shapes, without the tensors. The digest is not checked: that needs all of the file."""
    with _opened(path) as file:
        header, _ = _split((file.metadata() or {}).get(key))
        return header, {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except OSError as error:
        raise TensorFileError(f"it cannot be read ({error.strerror or first_line(error)})") from error
    except Exception as error:  # safetensors raises half a dozen kinds for what a damaged header says
        raise TensorFileError(first_line(error)) from error


def _split(header: str | None) -> tuple[str | None, str | None]:
    """A header's text without its digest, and the digest."""
    at_end = _DIGEST_AT_END.search(header or "")
    if header is None or at_end is None:
        return header, None
    return header[: at_end.start()] + "}", at_end[1]


def _digest(header: str, tensors: Mapping[str, Tensor]) -> str:
    """In the order of the tensors' names. JSON says where a name ends and bytes begin."""
    sha = hashlib.sha256(json.dumps(header).encode())
    for name, tensor in sorted(tensors.items()):
        sha.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        sha.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()

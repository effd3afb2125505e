"""What runs on the nodes of a cluster: an actor that does jobs, and says what it runs on.

Jobs travel as pickles. Large `bytes` in them (the policy of a rollout) do not: many jobs hold the same ones, so they go
through the object store, once to each node.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from esper import __version__

SHARED_BYTES = 65_536
"""From this size on, bytes in a job go through the object store."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What must be the same on all nodes, and where this actor is."""

    esper: str
    source: str
    """Digest of Esper's code: two versions of one number may differ."""
    torch: str
    instructions: str
    """Of the processor, as far as torch uses them: sums are rounded in another order with others."""
    host: str
    pid: int
    log: str | None
    """The file that its error output goes to, on its node."""


def node_facts() -> NodeFacts:
    return NodeFacts(
        esper=__version__,
        source=source_digest(),
        torch=str(torch.__version__).partition("+")[0],  # not "+cpu" or "+cu130": the driver may have a GPU
        instructions=str(torch.backends.cpu.get_cpu_capability()),
        host=socket.gethostname(),
        pid=os.getpid(),
        log=_error_log(),
    )


@cache
def source_digest() -> str:
    """Of every module of the package, by name and content."""
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _error_log() -> str | None:
    try:
        return os.readlink("/proc/self/fd/2")
    except OSError:  # no Linux
        return None


class ClusterActor:
    """A worker process on some node. It keeps the last function, with its state, from job to job."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._function: tuple[str, Callable[[Any], Any] | None] = ("", None)

    def node_facts(self) -> dict[str, object]:
        """Plain data: the driver may have another version of the class, and then reports that."""
        return asdict(node_facts())

    def run(self, key: str, function: bytes, job: bytes, *shared: bytes) -> bytes:
        """The pickled answer to a job: what the function gave, or what it raised. `key` names the function."""
        try:
            if self._function[0] != key:
                self._function = ("", None)  # the old one goes first: both may be large
                self._function = (key, pickle.loads(function))
            work = self._function[1]
            assert work is not None
            answer = work(unpack_job(job, shared))
        except Exception as error:
            answer = error
        try:
            return _pickled(answer)
        except Exception as error:  # errors of other libraries may hold anything
            return pickle.dumps(RuntimeError(f"{type(answer).__name__}: {answer} ({error})"))


def last_lines(path: str, most: int = 4_000) -> str:
    """The end of a log on the node where this runs; empty where it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - most))
            return file.read().decode("utf-8", "replace").strip()
    except OSError:
        return ""


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _ToCpu(pickle.Pickler):
    """The driver may have no GPU."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            return _itself, (value.cpu(),)
        return NotImplemented


def _pickled(answer: object) -> bytes:
    file = io.BytesIO()
    _ToCpu(file).dump(answer)
    return file.getvalue()


# -- jobs as bytes -----------------------------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Leaves large bytes out and numbers them in the order in which they came."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.left_out: list[bytes] = []

    def persistent_id(self, value: Any) -> int | None:
        if type(value) is not bytes or len(value) < SHARED_BYTES:
            return None
        self.left_out.append(value)
        return len(self.left_out) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: Sequence[bytes]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, number: Any) -> Any:
        return self._shared[number]


def pack_job(job: object) -> tuple[bytes, list[bytes]]:
    """A job, and the large bytes that it holds."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(job)
    return file.getvalue(), pickler.left_out


def unpack_job(packed: bytes, shared: Sequence[bytes]) -> Any:
    return _Unpickler(io.BytesIO(packed), shared).load()

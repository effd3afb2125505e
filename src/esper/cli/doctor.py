"""`esper doctor`: does this installation work, and how fast is it? One line for each check."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import esper

if TYPE_CHECKING:
    import torch

CORE = ("torch", "numpy", "safetensors", "scikit-learn", "rich", "tyro")
OPTIONAL = {
    "matplotlib": "plot",
    "gymnasium": "gym",
    "starlette": "web",
    "lightning": "lightning",
    "transformers": "huggingface",
    "ray": "cluster",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}
"""Package → the extra that brings it."""
LEAST_PYTHON = (3, 11)
EPOCHS, EPISODES = 8, 3
"""How long the speed of a device is measured: about a second on one core."""
SECONDS = 0.3
"""How long each number of threads is measured."""
CLEARLY_FASTER = 1.2

Verdict = Literal["ok", "note", "broken"]


class Finding(NamedTuple):
    """One line of the report."""

    what: str
    verdict: Verdict
    said: str


@dataclass(frozen=True)
class Doctor:
    """Check the installation: versions, packages, shipped controllers, devices, and a second of growing on each.

    Exit code 1 if something is broken; a note is not.
    """

    json: bool = False
    """Print JSON instead of lines."""

    def run(self) -> int:
        found: list[Finding] = []
        for check in CHECKS:
            for finding in _checked(check):
                found.append(finding)
                if not self.json:
                    print(f"{finding.verdict:<6}  {finding.what}: {finding.said}", flush=True)
        if self.json:
            print(json.dumps([one._asdict() for one in found], indent=2))
        return int(any(one.verdict == "broken" for one in found))


def _checked(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """A check that fails in a way of its own is a finding, not the end of the report."""
    try:
        yield from check()
    except Exception as error:
        words = " ".join(str(error).split()) or type(error).__name__
        yield Finding(check.__name__.strip("_"), "broken", f"{type(error).__name__}: {words[:300]}")


def _program() -> Iterator[Finding]:
    place = Path(esper.__file__).parent
    yield Finding("esper", "ok", f"{esper.__version__} in {place}")
    fits = sys.version_info[:2] >= LEAST_PYTHON
    needed = ".".join(map(str, LEAST_PYTHON))
    version = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield Finding("python", "ok" if fits else "broken", version if fits else f"{version}; {needed} or later is needed")


def _packages() -> Iterator[Finding]:
    versions = {name: _version(name) for name in CORE}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        yield Finding("packages", "broken", f"missing: {', '.join(missing)}; pip install {' '.join(missing)}")
    else:
        yield Finding("packages", "ok", ", ".join(f"{name} {version}" for name, version in versions.items()))
    absent = [f"{name} (esper[{extra}])" for name, extra in OPTIONAL.items() if _version(name) is None]
    there = [f"{name} {_version(name)}" for name in OPTIONAL if _version(name) is not None]
    words = [f"installed {', '.join(there)}"] * bool(there) + [f"not installed {', '.join(absent)}"] * bool(absent)
    yield Finding("extras", "ok", "; ".join(words))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _controllers() -> Iterator[Finding]:
    """Each learned controller is read whole, which compares its digest."""
    from esper.agent.shipped import DEFAULT_CONTROLLER, shipped_names
    from esper.training.catalogue import make_controller

    for name in shipped_names():
        make_controller(name)
    yield Finding("controllers", "ok", f"whole: {', '.join(shipped_names())}; {DEFAULT_CONTROLLER} is the default")


def _threads() -> Iterator[Finding]:
    """Threads that wait for each other can cost small networks several times the work; how much depends on the load."""
    import torch

    from esper.training.evaluation import one_thread
    from esper.training.speed import WORKS, training_speed

    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    said = f"{threads} of torch on {cores} cores"
    if threads == 1:
        yield Finding("threads", "ok", said)
        return
    many = training_speed(WORKS["tiny"], SECONDS)
    with one_thread():
        ratio = training_speed(WORKS["tiny"], SECONDS) / many
    if ratio < CLEARLY_FASTER:
        yield Finding("threads", "ok", f"{said}; a small network would not train faster with one")
    else:
        yield Finding(
            "threads", "note", f"{said}; a small network trains {ratio:.1f} times as fast with one: OMP_NUM_THREADS=1"
        )


def _folder() -> Iterator[Finding]:
    if os.access(Path.cwd(), os.W_OK):
        yield Finding("folder", "ok", f"{Path.cwd()} can be written")
    else:
        yield Finding("folder", "note", f"{Path.cwd()} cannot be written; give --out to commands that keep results")


def _devices() -> Iterator[Finding]:
    """A second of growing on the CPU, with one thread as in all commands, and on each GPU."""
    import torch

    from esper.training.evaluation import one_thread

    with one_thread():
        cpu = _speed(torch.device("cpu"), platform.processor() or platform.machine())
    yield cpu
    for index in range(torch.cuda.device_count()):
        memory = torch.cuda.get_device_properties(index).total_memory / 2**30
        name = f"{torch.cuda.get_device_name(index)}, {memory:.0f} GiB, CUDA {torch.version.cuda}"
        try:
            yield _speed(torch.device("cuda", index), name)
        except RuntimeError as error:
            yield Finding(f"cuda:{index}", "broken", f"{name}: {str(error).splitlines()[0]}")
    if not torch.cuda.is_available():
        why = "this torch is built for CPUs" if torch.version.cuda is None else "no usable GPU was found"
        yield Finding("cuda", "ok", f"not used: {why}")


def _speed(device: torch.device, name: str) -> Finding:
    """Of tiny networks that grow as in `esper bench`, which measures longer."""
    from esper.training.speed import WORKS, measure_steps

    speed = measure_steps(WORKS["tiny"], 1, device, graphs=False, horizon=EPOCHS, episodes=EPISODES)
    return Finding(str(device), "ok", f"{name}; {speed.per_second:,.3g} epochs a second of a tiny growing network")


CHECKS = (_program, _packages, _controllers, _threads, _folder, _devices)
COMMAND = Doctor

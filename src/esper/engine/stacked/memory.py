"""The memory that stacks of networks need, estimated before a run begins: too many are refused, not killed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from esper.engine.stacked.hosts import StackedHosts
from esper.engine.stacked.passes import Known
from esper.engine.stacked.stack import CHUNK_NUMBERS
from esper.tasks.problems import Problems

STATE_COPIES = 2.5
"""What is kept (weights and two moments of each) is copied for an epoch, which needs gradients and masks besides."""
DATA_COPIES = {"cpu": 2, "cuda": 1}
"""When episodes begin, draws and the stacks made of them are there at the same time; on a GPU the stacks alone."""
ACTIVATIONS = {"cpu": 4.0, "cuda": 16.0}
"""Numbers that an update holds, for each number that the stages of a host put out: norms, seeds and their shadows, and
what the backward pass needs of them. On a CPU one stack trains at a time: with 4, the estimate is 1.3 to 1.6 times the
peak of random legal play (`mixed` with 96 networks, `mixed/vector` with 512). On a GPU stacks train side by side, in
memory of their own; that figure is a guess."""
EVALUATION_COPIES = 8
"""Activations that an evaluation's chunk holds at a time."""
FLOAT = 4


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one network, and of what is there once."""

    data: float
    state: float
    """Weights, optimizer, statistics."""
    activations: float
    once: float

    def of(self, networks: int) -> float:
        return networks * self._each + self.once

    def fits(self, available: float) -> int:
        """How many networks there is room for."""
        return max(0, math.floor((available - self.once) / self._each))

    @property
    def _each(self) -> float:
        return self.data + self.state + self.activations


def memory_of(groups: Sequence[tuple[Sequence[int], Problems]], device: torch.device) -> Memory:
    """An estimate from some problems that stand for all."""
    problems = [some for _, some in groups]
    count = sum(map(len, problems))
    return Memory(
        data=DATA_COPIES[device.type] * sum(some.bytes + _planned(some) for some in problems) / count,
        state=STATE_COPIES * sum(len(some) * _state(some) for some in problems) / count,
        activations=ACTIVATIONS[device.type] * sum(len(some) * _put_out(some) for some in problems) / count,
        once=EVALUATION_COPIES * FLOAT * CHUNK_NUMBERS[device.type],
    )


def _planned(problems: Problems) -> int:
    """Of the minibatches, two bytes an example."""
    return 2 * len(problems) * int(problems.horizon.max() * problems.updates.max()) * problems.form.batch_size


def _state(problems: Problems) -> float:
    """Bytes of a network's weights and moments, with room for the largest seed in every slot."""
    known = Known(problems, torch.float32)
    largest = (max(table.width for table in tables.values()) for tables in known.tables)
    gates = (table.width for table in known.gate_tables)
    return 3.0 * FLOAT * (known.hosts.table.width + sum(largest) + sum(gates))


def _put_out(problems: Problems) -> float:
    """Bytes of what the stages of one network put out for a minibatch."""
    hosts = StackedHosts(problems, torch.float32)
    numbers = sum(math.prod(sizes) * width for sizes, width in zip(hosts.sizes, hosts.padded, strict=False))
    return float(FLOAT * problems.form.batch_size * numbers)


def available(device: torch.device) -> float:
    """Bytes that can still be had on the device."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return min(_meminfo(), _limit(Path("/sys/fs/cgroup/memory.max")))


def _meminfo() -> float:
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    except OSError:  # not Linux: nothing is refused
        return math.inf
    found = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return 1024.0 * int(found[0][1]) if found else math.inf


def _limit(path: Path) -> float:
    """Of the container, if there is one."""
    try:
        return float(path.read_text("ascii"))
    except (OSError, ValueError):
        return math.inf

"""Which engine trains the networks of a family: chosen here, for every command.

- *eager*: network by network, any host, any device.
- *graphs*: the same as CUDA graphs, on a GPU.
- *stacked*: all networks of one form as one (`engine/stacked`): families whose hosts, and all that may grow in them,
  have a stacked form.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from esper.config import EngineName, EngineOption
from esper.engine.precision import Precision
from esper.engine.stacked.blueprints import without_batched_form
from esper.engine.stacked.memory import available, memory_of
from esper.env.growth_env import GrowthEnv
from esper.env.stacked_env import StackedEnv
from esper.errors import RefusedError
from esper.growth.blueprints import Layout
from esper.tasks.family import Family, Together
from esper.tasks.stacking import BatchedFamily, by_member, form_of, sorts_of, stacked_problems, why_not_stacked

FEWEST, MOST = 16, 64
"""Networks of a stack on a CPU. A step of 16 costs 230 ms of a core and each further one 5 (dense hosts, measured), so
larger stacks are better for a core and smaller ones for many cores."""
STACKS_ON_CPU = 16
"""Into so many stacks a CPU divides what is to be played, if that leaves at least `FEWEST` in each."""
MOST_ON_GPU = 512
"""Networks of one job on a GPU, where several processes play: more would leave the others waiting for the largest."""
ROUND = 8
"""Draws by which a family is judged that has no `round`."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What was chosen, and why."""

    name: EngineName
    reason: str

    def __str__(self) -> str:
        return f"{self.name} engine: {self.reason}"


def choose_engine(
    wanted: EngineOption,
    family: Family,
    device: torch.device | str,
    *,
    first: int = 0,
    precision: Precision = Precision.FP32,
    compiled: bool = False,
) -> Engine:
    """The engine for the draws of a family from `first` on; one that was asked for and cannot be had is refused."""
    where = torch.device(device)
    plain = per_network(where)
    if wanted == "graphs" and where.type != "cuda":
        raise RefusedError(f"--engine graphs needs a GPU, and {where} is none: leave it out, or name a GPU")
    if wanted in ("eager", "graphs"):
        return Engine(wanted, "asked for")
    refusal, layouts = _survey(family, first)
    refusal = _unsuited(precision, compiled) or refusal or _ungrown(layouts)
    if wanted == "stacked":
        if refusal:
            raise RefusedError(f"--engine stacked cannot train {family.name}: {refusal}; use --engine auto")
        return Engine("stacked", "asked for")
    if refusal:
        return Engine(plain, refusal)
    if where.type == "cuda":
        return Engine("stacked", "all hosts have a stacked form")
    if others := sorted(layouts - {"dense"}):
        return Engine(plain, f"stacks of {', '.join(others)} hosts are not faster on a CPU")
    return Engine("stacked", "all hosts are dense")


def per_network(device: torch.device | str) -> EngineName:
    """For networks that cannot be stacked."""
    return "graphs" if torch.device(device).type == "cuda" else "eager"


def _unsuited(precision: Precision, compiled: bool) -> str:
    if compiled:
        return "stacks are not compiled"
    return "stacks have no tf32" if precision is Precision.TF32 else ""


def _ungrown(layouts: set[Layout]) -> str:
    names = dict.fromkeys(name for layout in sorted(layouts) for name in without_batched_form(layout))
    return f"the blueprints {', '.join(names)} have no stacked form" if names else ""


def check_gpu_options(
    precision: str, compiled: bool, device: torch.device, *, cuda_graphs: bool = False, resumed: bool = False
) -> None:
    """Any other device would calculate in single precision all the same, without a word."""
    if device.type == "cuda":
        return
    remedy = "name a GPU, because a resumed run keeps its configuration" if resumed else "leave it out, or name a GPU"
    wanted = {"--cuda-graphs": cuda_graphs, "--compiled": compiled, f"--precision {precision}": precision != "fp32"}
    for option, asked in wanted.items():
        if asked:
            raise ValueError(f"{option} is for GPUs, and {device} is none: {remedy}")


def one_round(family: Family, first: int) -> range:
    """Draws from `first` on, by which a family is judged: each kind of its problems is among them."""
    return range(first, first + getattr(family, "round", ROUND))


def _survey(family: Family, first: int) -> tuple[str, set[Layout]]:
    """The first kind of problem that cannot be stacked, with the reason (empty if all can), and the hosts' layouts."""
    if isinstance(family, Together):
        found = [_survey(member, ids[0]) for member, _, ids in by_member(family, one_round(family, first))]
        return next((refusal for refusal, _ in found if refusal), ""), set().union(*(layouts for _, layouts in found))
    if isinstance(family, BatchedFamily):
        made = family.problems(one_round(family, first), held_out=False, device="cpu")
        return "", {problems.form.layout for _, problems in made}
    layouts: set[Layout] = set()
    for number in one_round(family, first):
        draw = family.draw(number)
        if refusal := why_not_stacked(draw):
            return f"{draw.facts.get('kind', 'its problem')}: {refusal}", layouts
        layouts.add(form_of(draw).layout)
    return "", layouts


# -- how many networks make a stack ------------------------------------------------------------------------------------


def stack_size(networks: int, device: torch.device | str) -> int:
    """Networks of one stack, by how many there are and nothing else: the last bits of a result depend on it, and must
    not depend on how many processes share the work. A GPU takes all at once."""
    if torch.device(device).type != "cpu":
        return networks
    return max(FEWEST, min(MOST, math.ceil(networks / STACKS_ON_CPU)))


def check_memory(family: Family, networks: int, device: torch.device | str, *, first: int = 0) -> str:
    """What so many networks at a time need, in words; more than there is room for are refused."""
    where = torch.device(device)
    memory = memory_of(stacked_problems(family, one_round(family, first), held_out=False), where)
    needed, room = memory.of(networks), available(where)
    what = f"{networks:,} networks at a time need about {_size(needed)}"
    there = f"{where} has {_size(room)} left"
    if needed > room:
        fits = memory.fits(room)
        raise RefusedError(f"{what}, and {there}: there is room for {fits:,} (--envs, --workers or --engine)")
    parts = (("data", memory.data), ("weights and optimizer", memory.state), ("activations", memory.activations))
    shares = ", ".join(f"{name} {_size(networks * part)}" for name, part in parts)
    return f"{what} ({shares}); {there}"


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


# -- how many processes play ------------------------------------------------------------------------------------------


def players(wanted: int | None, engine: EngineName, device: torch.device | str) -> int:
    """Processes that play episodes: what was asked for, or as many as are faster than one."""
    cores = os.cpu_count() or 1
    if torch.device(device).type == "cpu":
        return wanted or cores
    if engine != "stacked":
        return 1
    return wanted or (max(1, cores - 1) if mps_is_running() else 1)


def mps_is_running() -> bool:
    """Whether NVIDIA's MPS lets kernels of several processes run side by side; without it they take turns."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control").exists()


ONE_AT_A_TIME = "one process plays on the GPU; with NVIDIA's MPS several do, in a third of the time (docs/stacked.md)"
"""For whoever has not started it."""


# -- environments ------------------------------------------------------------------------------------------------------


def make_env(
    engine: EngineName, family: Family, size: int, device: torch.device | str = "cpu", **settings: Any
) -> GrowthEnv | StackedEnv:
    """An environment of `size` networks; `settings` are its own."""
    if engine == "stacked":
        settings.pop("compiled", None)
        return StackedEnv(family, size, device=device, **settings)
    return GrowthEnv(family, size, device=device, graphs=engine == "graphs", **settings)


def parts_of(draws: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """The draws in stacks of this size; the last may be smaller."""
    return [tuple(draws[start : start + size]) for start in range(0, len(draws), size)]


def parts_by_sort(family: Family, draws: Sequence[int], *, held_out: bool) -> dict[str, tuple[int, ...]]:
    """The places of the draws in jobs for a GPU, by name: draws that can share a stack, in equal parts of at most
    `MOST_ON_GPU`. A stack costs nearly as much for a hundred networks as for ten, so sorts are not mixed."""
    places: dict[str, list[int]] = {}
    for place, sort in enumerate(sorts_of(family, draws, held_out=held_out)):
        places.setdefault(sort, []).append(place)
    parts: dict[str, tuple[int, ...]] = {}
    for sort, own in places.items():
        size = math.ceil(len(own) / math.ceil(len(own) / MOST_ON_GPU))
        parts |= {f"{sort}, part {i}": part for i, part in enumerate(parts_of(own, size))}
    return parts

"""How fast growing is on this machine, behind `esper bench`: generated images, eager against graphs in one run.

`measure_steps`: environment-steps a second of a whole `GrowthEnv` with a live seed in every network. `measure_images`:
training images a second that the engine makes of many bare hosts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from statistics import median

import torch

from esper.actions import WAIT, Action, Op
from esper.engine.eager import EagerEngine
from esper.engine.graphs import GraphEngine
from esper.engine.precision import Precision
from esper.engine.prepare import task_learner
from esper.env.growth_env import GrowthEnv
from esper.env.situation import Situation
from esper.lifecycle import Stage
from esper.tasks.data import Split, Splits
from esper.tasks.family import Draw
from esper.tasks.hosts import Conv2dHost
from esper.tasks.registry import Task

CLASSES = 10
SEED = "conv"
"""What grows in every network."""


@dataclass(frozen=True, slots=True)
class Work:
    """A host, and what it does in an epoch."""

    channels: tuple[int, ...] = (8, 16, 32)
    size: int = 32
    """Width and height of the images."""
    batch: int = 128
    updates: int = 4
    validation: int = 128

    def __str__(self) -> str:
        host = "-".join(map(str, self.channels))
        return f"{host} channels, {self.size}×{self.size} images, batch {self.batch}"


WORKS = {
    "small": Work(),
    "large": Work(channels=(32, 64, 128)),
    "large-batch": Work(channels=(32, 64, 128), batch=512),
    "tiny": Work(channels=(8, 16, 16), size=8, batch=64, updates=8),
}
"""By name. An epoch of the small one is four minibatches of 128 images and one for validation."""


@cache
def generated_images(work: Work) -> Task:
    """Images whose class shows in their mean, and is hidden in noise: a host learns something, and growing pays."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(CLASSES, 3, work.size, work.size, generator=generator)

    def split(count: int) -> Split:
        y = torch.randint(CLASSES, (count,), generator=generator)
        return Split(0.15 * patterns[y] + torch.randn(count, 3, work.size, work.size, generator=generator), y)

    make_host = partial(Conv2dHost, 3, list(work.channels), [3] * len(work.channels), CLASSES)
    return Task(
        name="images",
        description="generated images",
        splits=Splits(split(4096), split(work.validation), split(64)),
        make_host=make_host,
        slots=tuple(f"stages.{i}" for i in range(len(work.channels))),
        labels=tuple(map(str, range(CLASSES))),
        batch_size=work.batch,
        updates_per_epoch=work.updates,
        learning_rate=2e-3,
    )


class GeneratedFamily:
    """The same work in every draw; only the seeds vary."""

    name = "images"

    def __init__(self, work: Work, horizon: int) -> None:
        self.work, self.horizon = work, horizon
        self.slots = len(work.channels)

    def draw(self, number: int, *, held_out: bool = False) -> Draw:
        return Draw(generated_images(self.work), number, self.horizon, None, None, {"kind": "images"})


@dataclass(frozen=True, slots=True)
class Speed:
    """What was measured: the median, and the range, over episodes (environment-steps) or epochs (images)."""

    work: str
    envs: int
    """Networks."""
    engine: str
    precision: str
    per_second: float
    """Environment-steps, resets not counted, or training images."""
    slowest: float
    fastest: float
    with_resets: float | None = None
    """Environment-steps a second over everything; so are the ones below of environment-steps only."""
    live: float | None = None
    """Share of the steps in which the network had an unfinished seed."""
    shares: dict[str, float] = field(default_factory=dict)
    """Of the wall time of steps, by phase."""
    captures: int | None = None
    """Graphs captured in the measured episodes."""
    allocated_mb: float | None = None
    """On the GPU, at the end."""
    reserved_mb: float | None = None
    growth_mb: float | None = None
    """Of what is allocated on the GPU, from the first measured episode's start to the end."""


def measure_images(
    work: Work,
    hosts: int,
    device: torch.device,
    *,
    graphs: bool,
    precision: Precision = Precision.FP32,
    compiled: bool = False,
    epochs: int = 7,
) -> Speed:
    """Training of bare hosts, one evaluation an epoch included."""
    task = generated_images(work).to(device)
    learners = [task_learner(task, seed, 1000, precision=precision, compiled=compiled) for seed in range(hosts)]
    unwatched = [None] * hosts
    engine = GraphEngine(learners, unwatched) if graphs else EagerEngine(learners, unwatched)
    for _ in range(2):  # captures, and warms up
        list(engine.run(learners))
    rates = []
    for _ in range(epochs):
        with stopwatch(device) as seconds:
            list(engine.run(learners))
        rates.append(hosts * work.updates * work.batch / seconds[0])
    return Speed(str(work), hosts, _engine(graphs, compiled), precision, median(rates), min(rates), max(rates))


def training_speed(work: Work, seconds: float) -> float:
    """Epochs a second of one bare host on the CPU, with the threads that torch has now."""
    learner = task_learner(generated_images(work), 0, 1000)
    learner.train()  # warms up
    started, epochs = time.perf_counter(), 0
    while (spent := time.perf_counter() - started) < seconds:
        learner.train()
        epochs += 1
    return epochs / spent


def measure_steps(
    work: Work,
    envs: int,
    device: torch.device,
    *,
    graphs: bool,
    precision: Precision = Precision.FP32,
    compiled: bool = False,
    horizon: int = 20,
    episodes: int = 3,
) -> Speed:
    """Complete episodes in which every network has a seed: it incubates, blends in and holds."""
    family = GeneratedFamily(work, horizon)
    env = GrowthEnv(family, envs, device=device, graphs=graphs, precision=precision, compiled=compiled)
    for _ in range(2 if graphs else 1):  # captures, and warms up
        _episode(env)
    before, captured, allocated = dict(env.seconds), env.captures, _megabytes(torch.cuda.memory_allocated, device)
    rates, counts, lived, stepping, total = [], 0, 0, 0.0, 0.0
    for _ in range(episodes):
        with stopwatch(device) as whole:
            seconds, acted, live = _episode(env)
        rates.append(acted / seconds)
        counts, lived, stepping, total = counts + acted, lived + live, stepping + seconds, total + whole[0]
    phases = {name: spent - before.get(name, 0.0) for name, spent in env.seconds.items() if name != "reset"}
    finally_allocated = _megabytes(torch.cuda.memory_allocated, device)
    return Speed(
        work=str(work),
        envs=envs,
        engine=_engine(graphs, compiled),
        precision=precision,
        per_second=median(rates),
        slowest=min(rates),
        fastest=max(rates),
        with_resets=counts / total,
        live=lived / counts,
        shares={name: spent / stepping for name, spent in phases.items()},
        captures=env.captures - captured,
        allocated_mb=finally_allocated,
        reserved_mb=_megabytes(torch.cuda.memory_reserved, device),
        growth_mb=finally_allocated - allocated,
    )


def _episode(env: GrowthEnv) -> tuple[float, int, int]:
    """Play one episode; gives the seconds spent in steps, how many steps, and how many with a live seed."""
    env.reset(range(env.size))
    spent, acted, live = 0.0, 0, 0
    while not env.over:
        actions = [_always_growing(row, situation) for row, situation in enumerate(env.situations)]
        with stopwatch(env.device) as seconds:
            step = env.step(actions)
        spent += seconds[0]
        acted += int(step.acted.sum())
        live += sum(
            any(Stage.DORMANT < stage < Stage.FOSSILIZED for stage in info.record.stages)
            for info in step.infos
            if info is not None
        )
    return spent, acted, live


def _always_growing(row: int, situation: Situation) -> Action:
    """Each row grows at its own place, at the first moment, and neither keeps nor removes the seed."""
    slot = situation.slots[row % len(situation.slots)]
    if not slot.growable:
        return WAIT
    kind = SEED if SEED in slot.growable else min(slot.growable)
    return Action(Op.GERMINATE, slot.index, kind, "linear")


def _megabytes(count: Callable[[torch.device], int], device: torch.device) -> float:
    return count(device) / 2**20 if device.type == "cuda" else 0.0


def _engine(graphs: bool, compiled: bool) -> str:
    return ("graphs" if graphs else "eager") + (", compiled" if compiled else "")


@contextmanager
def stopwatch(device: torch.device) -> Iterator[list[float]]:
    """Seconds of wall time, after the device has finished."""

    def wait() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    seconds = [0.0]
    wait()
    started = time.perf_counter()
    yield seconds
    wait()
    seconds[0] = time.perf_counter() - started

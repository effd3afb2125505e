"""Frozen controllers on numbered draws of a family: what each of them makes of the same problems.

Every controller gets the same draws: the same data, host, first weights and minibatches. A result depends on its draw
and its controller alone: not on the batch it ran in, not on the process. The test set is looked at once, at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from esper.actions import Op
from esper.engine.eager import EpochRecord
from esper.engine.learner import Learner
from esper.engine.measure import Evaluation, gather
from esper.env.growth_env import GrowthEnv
from esper.env.rent import score
from esper.growth.blueprints import SlotShape
from esper.growth.export import flops_per_example
from esper.growth.seed import Seed
from esper.growth.slot import preserved_rng
from esper.lifecycle import IN_FORWARD, Stage
from esper.policy.controller import Controller
from esper.rollout.episodes import Episodes
from esper.rollout.play import ControllerActor, StoppedError, play
from esper.tasks.family import Draw, Family, get_family
from esper.training.catalogue import make_controller
from esper.training.workers import in_processes

BATCH = 4
"""Networks that train side by side in one process. Small, so that progress is seen often and workers end together."""
PASSES = 3
"""A training update costs this many forward passes: forward, and backward at twice that."""


@dataclass(frozen=True, slots=True)
class KeptSeed:
    """A seed that acts in a final network: enough to build it anew."""

    path: str
    blueprint: str
    blend: str
    shape: SlotShape


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """One training of one network under one controller."""

    number: int
    """Of the draw."""
    facts: Mapping[str, Any]
    """What the family says about the draw."""
    test_accuracy: float
    val_accuracy: float
    score: float
    """Test accuracy minus rent for the parameters kept, in points."""
    parameters: int
    """Of the host and the seeds that act in the final network."""
    host_parameters: int
    flops: int
    """Of one example's forward pass."""
    host_flops: int
    training_flops: int
    """An estimate of the whole training's; see `training_flops`."""
    examples: int
    """Training examples seen, counted as often as they were seen."""
    epochs: int
    horizon: int
    kept: tuple[KeptSeed, ...]
    """The seeds that act in the final network."""
    unfinished: int
    """Of these, the ones that were not fossilized when the episode ended."""
    planted: int
    """Seeds planted, whatever became of them."""
    governor: str | None
    """Why the governor ended the episode; None if it ran to its horizon."""
    host_widths: tuple[int, ...] | None
    """For hosts that can be built wider."""
    seconds: float
    """Its share of the wall time of the batch that it ran in."""


Results = dict[str, dict[int, EpisodeResult]]
"""By label (a controller's, a control's), then by draw."""


@dataclass(frozen=True, slots=True)
class Job:
    """Some draws under one controller, trained side by side. Names stand for built-in families and controllers."""

    label: str
    family: Family | str
    controller: Controller | str
    draws: tuple[int, ...]
    held_out: bool = True
    noise: float = 0.0
    """Probability that a decision is replaced by a random legal one."""

    def play(
        self, device: torch.device | str = "cpu", stop: Callable[[], bool] = lambda: False
    ) -> tuple[Episodes, GrowthEnv]:
        """The episodes, and the environment as they left it. They depend on the job alone, not on where it runs."""
        family = get_family(self.family) if isinstance(self.family, str) else self.family
        controller = make_controller(self.controller) if isinstance(self.controller, str) else self.controller
        env = GrowthEnv(family, len(self.draws), device=device)
        actor = ControllerActor(controller, self.label, self.noise)
        with _one_thread():
            return play(env, actor, self.draws, held_out=self.held_out, stop=stop), env


def record_job(job: Job) -> Episodes:
    """The episodes alone, for a recording: the networks are not judged."""
    return replace(job.play()[0], final=None, reports=())


def jobs_for(
    family: Family | str,
    controllers: Mapping[str, Controller | str],
    draws: Sequence[int],
    *,
    held_out: bool = True,
    noise: float = 0.0,
    batch: int = BATCH,
) -> list[Job]:
    """All controllers on the first draws, then on the next ones: a run that is cut short leaves complete pairs."""
    groups = [tuple(draws[start : start + batch]) for start in range(0, len(draws), batch)]
    return [Job(label, family, who, group, held_out, noise) for group in groups for label, who in controllers.items()]


def run_jobs(
    jobs: Sequence[Job],
    *,
    workers: int = 1,
    device: torch.device | str = "cpu",
    progress: Callable[[Job, list[EpisodeResult]], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Results:
    """Run the jobs, in this process or in several. What was complete when `stop` said so is returned."""
    if workers < 1:
        raise ValueError(f"workers must be at least 1, not {workers}")
    found: Results = {job.label: {} for job in jobs}
    work = partial(run_job, device=str(device))
    finished = in_processes(work, jobs, workers, stop) if workers > 1 else _in_turn(jobs, device, stop)
    for job, results in finished:
        found[job.label].update({result.number: result for result in results})
        if progress is not None:
            progress(job, results)
    return found


def _in_turn(
    jobs: Sequence[Job], device: torch.device | str, stop: Callable[[], bool]
) -> Iterator[tuple[Job, list[EpisodeResult]]]:
    for job in jobs:
        try:
            yield job, run_job(job, device, stop)
        except StoppedError:
            return


def run_job(
    job: Job, device: torch.device | str = "cpu", stop: Callable[[], bool] = lambda: False
) -> list[EpisodeResult]:
    """Train the job's networks to their ends and judge them."""
    started = time.perf_counter()
    episodes, env = job.play(device, stop)
    records = [[info.record for info in row] for row in episodes.reports]
    with _one_thread():
        tests, validations = env.evaluate_test(), gather([learner.evaluate() for learner in env.learners])
        rows = zip(job.draws, env.draws, env.learners, records, tests, validations, strict=True)
        share = (time.perf_counter() - started) / len(job.draws)
        return [_result(*row, seconds=share) for row in rows]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums do not depend on how many threads share them when there is one; and small networks are fastest so."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _result(
    number: int,
    draw: Draw,
    learner: Learner,
    records: list[EpochRecord],
    test: Evaluation,
    validation: Evaluation,
    *,
    seconds: float,
) -> EpisodeResult:
    model, task = learner.model, draw.task
    example = task.splits.train.x[:2]
    flops = flops_per_example(model, example)
    acting = [(slot, slot.seed) for slot in model.joined if slot.seed is not None]
    kept = tuple(KeptSeed(slot.path, seed.blueprint, seed.blend, slot.shape) for slot, seed in acting)
    parameters = model.host_parameters + sum(p.numel() for _, seed in acting for p in seed.parameters())
    host_flops = flops - sum(seed_flops(seed.blueprint, seed.shape, seed.blend) for seed in kept)
    per_epoch = min(task.batch_size, len(task.splits.train)) * task.updates_per_epoch
    verdict = records[-1].verdict
    config = getattr(model.host, "config", {})
    return EpisodeResult(
        number=number,
        facts=dict(draw.facts),
        test_accuracy=test.accuracy,
        val_accuracy=validation.accuracy,
        score=score(test.accuracy, parameters, model.host_parameters),
        parameters=parameters,
        host_parameters=model.host_parameters,
        flops=flops,
        host_flops=host_flops,
        training_flops=training_flops(records, host_flops, [slot.shape for slot in model.slots], per_epoch),
        examples=per_epoch * len(records),
        epochs=len(records),
        horizon=draw.horizon,
        kept=kept,
        unfinished=sum(slot.life.stage is not Stage.FOSSILIZED for slot, _ in acting),
        planted=model.lifecycle.born,
        governor=None if verdict is None else verdict.message,
        host_widths=tuple(config["widths"]) if "widths" in config else None,
        seconds=seconds,
    )


def training_flops(
    records: Sequence[EpochRecord], host_flops: int, shapes: Sequence[SlotShape], examples_per_epoch: int
) -> int:
    """What the training cost: `PASSES` forward passes, of the network as it was in that epoch, per example seen.

    Each incubating seed adds one more such pass, through the network with that seed. That is an upper bound: the shadow
    pass really starts at the seed's slot and spares the host's weights. Measuring on the validation set is not counted.
    """
    planted: dict[int, tuple[str, str]] = {}
    total = 0
    for record in records:
        action = record.effect.action
        if action.op is Op.GERMINATE and record.effect.changed:
            assert action.slot is not None
            planted[action.slot] = (str(action.blueprint), str(action.blend))
        costs = {i: seed_flops(name, shapes[i], blend) for i, (name, blend) in planted.items()}
        network = host_flops + sum(costs[i] for i, stage in enumerate(record.stages) if stage in IN_FORWARD)
        shadows = sum(network + costs[i] for i, stage in enumerate(record.stages) if stage is Stage.TRAINING)
        total += PASSES * examples_per_epoch * (network + shadows)
    return total


@cache
def seed_flops(blueprint: str, shape: SlotShape, blend: str) -> int:
    """FLOPs of one example's pass through such a seed."""
    with preserved_rng(torch.device("cpu")):
        return flops_per_example(Seed(blueprint, shape, blend), shape.example(2))

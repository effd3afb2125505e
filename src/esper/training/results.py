"""What became of one network under one controller, as numbers: from a learner of its own, or from a row of a stack.

Both ways give the same numbers for the same episode, but for rounding; what the governor said is shorter in columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from esper.actions import BLENDS, Op
from esper.engine.eager import EpochRecord
from esper.engine.measure import gather
from esper.engine.stacked.engine import StackedEngine
from esper.env.growth_env import GrowthEnv
from esper.env.rent import score
from esper.growth.blueprints import SlotShape, blueprint_names
from esper.growth.costs import flops_per_example, seed_flops
from esper.growth.randomness import preserved_rng
from esper.lifecycle import IN_FORWARD, Stage
from esper.rollout.episodes import Episodes
from esper.rollout.render import reports_of
from esper.tasks.problems import Problems
from esper.tasks.stacking import plain_host, slot_shapes

PASSES_OF_AN_UPDATE = 3
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
    seconds: float = 0.0
    """Its share of the wall time of the batch that it ran in."""


Results = dict[str, dict[int, EpisodeResult]]
"""By label (a controller's, a control's), then by draw."""


def results_of_learners(episodes: Episodes, env: GrowthEnv, rent: float) -> list[EpisodeResult]:
    """Of the episodes that an environment has just played, network by network."""
    found = []
    tests, validations = env.evaluate_test(), gather([learner.evaluate() for learner in env.learners])
    numbers = episodes.draw.tolist()
    rows = zip(numbers, env.draws, env.learners, episodes.reports, tests, validations, strict=True)
    for number, draw, learner, row, test, validation in rows:
        model, task = learner.model, draw.task
        acting = [(slot, slot.seed) for slot in model.joined if slot.seed is not None]
        kept = tuple(KeptSeed(slot.path, seed.blueprint, seed.blend, slot.shape) for slot, seed in acting)
        config = getattr(model.host, "config", {})
        found.append(
            _result(
                [info.record for info in row],
                kept,
                [slot.shape for slot in model.slots],
                rent,
                host_flops=flops_per_example(model, task.splits.train.x[:2]) - _flops_of(kept),
                per_epoch=min(task.batch_size, len(task.splits.train)) * task.updates_per_epoch,
                number=number,
                facts=dict(draw.facts),
                test_accuracy=test.accuracy,
                val_accuracy=validation.accuracy,
                parameters=model.acting_parameters,
                host_parameters=model.host_parameters,
                horizon=draw.horizon,
                unfinished=sum(slot.life.stage is not Stage.FOSSILIZED for slot, _ in acting),
                planted=model.lifecycle.born,
                host_widths=tuple(config["widths"]) if "widths" in config else None,
            )
        )
    return found


def results_of_stacks(episodes: Episodes, engine: StackedEngine, rent: float) -> list[EpisodeResult]:
    """Of the episodes that an engine has just trained."""
    tests, reports, draws = engine.evaluate_test()[0].tolist(), reports_of(episodes), episodes.draw.tolist()
    stages, alphas, kinds, blends, sizes = (
        getattr(engine.columns, name).tolist() for name in ("stage", "alpha", "blueprint", "blend", "size")
    )
    planted, hosts = engine.born.tolist(), engine.host_parameters.long().tolist()
    names, found = blueprint_names(), {}
    for stack, places in zip(engine.stacks, engine.places, strict=True):
        problems = stack.problems
        for row, at in enumerate(places.tolist()):
            shapes, records = slot_shapes(problems, row), [info.record for info in reports[at]]
            acting = [i for i in range(stack.slots) if Stage(stages[at][i]) in IN_FORWARD and alphas[at][i] > 0.0]
            kept = [KeptSeed(f"stages.{i}", names[kinds[at][i]], BLENDS[blends[at][i]], shapes[i]) for i in acting]
            found[at] = _result(
                records,
                tuple(kept),
                shapes,
                rent,
                host_flops=_host_flops(problems, row),
                per_epoch=problems.form.batch_size * int(problems.updates[row]),
                number=draws[at],
                facts=dict(problems.facts[row]) if problems.facts else {},
                test_accuracy=tests[at],
                val_accuracy=records[-1].measured.accuracy,
                parameters=hosts[at] + sum(int(sizes[at][i]) for i in acting),
                host_parameters=hosts[at],
                horizon=int(problems.horizon[row]),
                unfinished=sum(Stage(stages[at][i]) is not Stage.FOSSILIZED for i in acting),
                planted=planted[at],
                host_widths=tuple(problems.widths[row].tolist()),
            )
    return [found[at] for at in range(len(draws))]


def _result(
    records: Sequence[EpochRecord],
    kept: tuple[KeptSeed, ...],
    shapes: Sequence[SlotShape],
    rent: float,
    *,
    host_flops: int,
    per_epoch: int,
    **known: Any,
) -> EpisodeResult:
    """What follows from the records and from what is `known` of a network; `per_epoch` examples were seen an epoch."""
    verdict = records[-1].verdict
    return EpisodeResult(
        score=score(known["test_accuracy"], known["parameters"], known["host_parameters"], rent),
        flops=host_flops + _flops_of(kept),
        host_flops=host_flops,
        training_flops=training_flops(records, host_flops, shapes, per_epoch),
        examples=per_epoch * len(records),
        epochs=len(records),
        kept=kept,
        governor=None if verdict is None else verdict.message,
        **known,
    )


def _flops_of(kept: Sequence[KeptSeed]) -> int:
    return sum(seed_flops(seed.blueprint, seed.shape, seed.blend) for seed in kept)


_HOST_FLOPS: dict[Any, int] = {}
"""By what the host is made of: draws of a family share few hosts, and counting takes milliseconds."""


def _host_flops(problems: Problems, row: int) -> int:
    """FLOPs of one example's pass through the plain host."""
    made_of = ("features", "widths", "sizes", "kernels", "pools", "bends", "attends")
    key = (problems.form, *(str(getattr(problems, name)[row].tolist()) for name in made_of))
    if key not in _HOST_FLOPS:
        features, sizes = int(problems.features[row]), problems.sizes[row].tolist()
        is_map = problems.form.layout.startswith("conv")
        shape = (2, features, *sizes) if is_map else (2, *sizes, features)
        with preserved_rng(torch.device("cpu")):
            _HOST_FLOPS[key] = flops_per_example(plain_host(problems, row), torch.zeros(shape))
    return _HOST_FLOPS[key]


def training_flops(
    records: Sequence[EpochRecord], host_flops: int, shapes: Sequence[SlotShape], examples_per_epoch: int
) -> int:
    """What the training cost: `PASSES_OF_AN_UPDATE` forward passes of the network of that epoch, per example seen.

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
        total += PASSES_OF_AN_UPDATE * examples_per_epoch * (network + shadows)
    return total

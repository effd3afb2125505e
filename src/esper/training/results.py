"""What became of one network under one controller, as numbers: from a learner of its own, or from a row of a stack.

Both ways give the same numbers for the same episode, but for rounding; what the governor said is shorter in columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from esper.actions import BLENDS, Op
from esper.engine.eager import EpochRecord
from esper.engine.learner import Learner
from esper.engine.measure import Evaluation
from esper.engine.stacked.engine import StackedEngine
from esper.env.rent import score
from esper.growth.blueprints import SlotShape, blueprint_names
from esper.growth.costs import flops_per_example, seed_flops
from esper.growth.randomness import preserved_rng
from esper.lifecycle import IN_FORWARD, Stage
from esper.rollout.episodes import Episodes
from esper.rollout.render import reports_of
from esper.tasks.family import Draw
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
    seconds: float
    """Its share of the wall time of the batch that it ran in."""


Results = dict[str, dict[int, EpisodeResult]]
"""By label (a controller's, a control's), then by draw."""


def result_of_learner(
    number: int,
    draw: Draw,
    learner: Learner,
    records: list[EpochRecord],
    test: Evaluation,
    validation: Evaluation,
    *,
    rent: float,
    seconds: float,
) -> EpisodeResult:
    model, task = learner.model, draw.task
    example = task.splits.train.x[:2]
    flops = flops_per_example(model, example)
    acting = [(slot, slot.seed) for slot in model.joined if slot.seed is not None]
    kept = tuple(KeptSeed(slot.path, seed.blueprint, seed.blend, slot.shape) for slot, seed in acting)
    parameters = model.acting_parameters
    host_flops = flops - sum(seed_flops(seed.blueprint, seed.shape, seed.blend) for seed in kept)
    per_epoch = min(task.batch_size, len(task.splits.train)) * task.updates_per_epoch
    verdict = records[-1].verdict
    config = getattr(model.host, "config", {})
    return EpisodeResult(
        number=number,
        facts=dict(draw.facts),
        test_accuracy=test.accuracy,
        val_accuracy=validation.accuracy,
        score=score(test.accuracy, parameters, model.host_parameters, rent),
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


def results_of_stacks(
    episodes: Episodes, engine: StackedEngine, seconds: Callable[[], float], *, rent: float
) -> list[EpisodeResult]:
    """Of the episodes that an engine has just trained; `seconds` is the share of each, asked for at the end."""
    tests, reports, draws = engine.evaluate_test()[0].tolist(), reports_of(episodes), episodes.draw.tolist()
    stages, alphas, kinds, blends, sizes = (
        getattr(engine.columns, name).tolist() for name in ("stage", "alpha", "blueprint", "blend", "size")
    )
    planted, hosts = engine.born.tolist(), engine.host_parameters.long().tolist()
    names, share, found = blueprint_names(), seconds(), {}
    for stack, places in zip(engine.stacks, engine.places, strict=True):
        for row, at in enumerate(places.tolist()):
            shapes = slot_shapes(stack.problems, row)
            acting = [i for i in range(stack.slots) if Stage(stages[at][i]) in IN_FORWARD and alphas[at][i] > 0.0]
            kept = [KeptSeed(f"stages.{i}", names[kinds[at][i]], BLENDS[blends[at][i]], shapes[i]) for i in acting]
            found[at] = _result_of_row(
                stack.problems,
                row,
                [info.record for info in reports[at]],
                tuple(kept),
                rent,
                number=draws[at],
                test_accuracy=tests[at],
                parameters=hosts[at] + sum(int(sizes[at][i]) for i in acting),
                host_parameters=hosts[at],
                unfinished=sum(Stage(stages[at][i]) is not Stage.FOSSILIZED for i in acting),
                planted=planted[at],
                seconds=share,
            )
    return [found[at] for at in range(len(draws))]


def _result_of_row(
    problems: Problems, row: int, records: list[EpochRecord], kept: tuple[KeptSeed, ...], rent: float, **known: Any
) -> EpisodeResult:
    """`known` is what the engine's columns say."""
    host_flops, per_epoch = _host_flops(problems, row), problems.form.batch_size * int(problems.updates[row])
    verdict = records[-1].verdict
    return EpisodeResult(
        facts=dict(problems.facts[row]) if problems.facts else {},
        val_accuracy=records[-1].measured.accuracy,
        score=score(known["test_accuracy"], known["parameters"], known["host_parameters"], rent),
        flops=host_flops + sum(seed_flops(seed.blueprint, seed.shape, seed.blend) for seed in kept),
        host_flops=host_flops,
        training_flops=training_flops(records, host_flops, slot_shapes(problems, row), per_epoch),
        examples=per_epoch * len(records),
        epochs=len(records),
        horizon=int(problems.horizon[row]),
        kept=kept,
        governor=None if verdict is None else verdict.message,
        host_widths=tuple(problems.widths[row].tolist()),
        **known,
    )


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

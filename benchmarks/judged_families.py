"""Problems that exist only to judge controllers: other random seeds, and deeper hosts with more slots.

No controller is trained, tuned or chosen on them; some have relatives in training families (docs/results.md).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np

from esper.growth.blueprints import SlotShape
from esper.growth.seed import parameter_count
from esper.tasks import needs
from esper.tasks.data import generated_splits
from esper.tasks.family import Draw, Fact, Family, TaskFamily, dashed, draw_rng, draw_seed
from esper.tasks.mixed import TEST, VAL
from esper.tasks.registry import Task, load_task
from esper.tasks.token_host import TokenHost

STAGES, MANY_STAGES = 5, 8
"""Of deep hosts. Training meets series of up to four stages, vectors of four (`disguised`) and eight (`varied`)."""


# -- deeper hosts -----------------------------------------------------------------------------------------------------

_mnist1d = lru_cache(maxsize=4)(partial(load_task, "mnist1d"))


class DeepSeries:
    """`mnist1d` for convolutional hosts of five stages, with one narrow stage, some 1×1 kernels, or neither."""

    name = "deep series"
    slots = STAGES
    horizon = 22

    def draw(self, number: int, *, held_out: bool = False) -> Draw:
        rng = draw_rng(self.name, number, held_out)
        widths = [int(width) for width in rng.integers(6, 13, STAGES)]
        kernels = [3] * STAGES
        fault = ("narrow", "pointwise", "both", "none")[number % 4]
        if fault in ("narrow", "both"):
            widths[int(rng.integers(STAGES))] = 3
        if fault in ("pointwise", "both"):
            for stage in rng.permutation(STAGES)[:3]:
                kernels[int(stage)] = 1
        task = _mnist1d(seed=int(held_out), widths=tuple(widths), kernels=tuple(kernels))
        facts: dict[str, Fact] = {"kind": fault, "widths": dashed(widths), "kernels": dashed(kernels)}
        return _limited(task, rng, held_out, self.horizon, facts, least=("depthwise", SlotShape("conv1d", max(widths))))


class DeepVectors:
    """The boards and directions of `mixed` for dense hosts of many stages, narrow at one of them."""

    horizon = 22

    def __init__(self, name: str, stages: int) -> None:
        self.name, self.slots = name, stages

    def draw(self, number: int, *, held_out: bool = False) -> Draw:
        rng = draw_rng(self.name, number, held_out)
        need = ("channel", "channel", "scale", "nothing")[number % 4]
        place = int(rng.integers(self.slots))
        widths = [int(width) for width in rng.integers(16, 23, self.slots)]
        widths[place] = 12
        features = 8 if need == "scale" else 12
        basis = 2.0 * needs.orthogonal_rows(rng, 2, features)
        noise = float(rng.uniform(0.03, 0.07))
        inputs: Callable[..., needs.Inputs]
        if need == "scale":
            inputs = partial(needs.sectors, basis=basis, turns=4, gain_spread=float(rng.uniform(2.2, 2.6)), noise=0.02)
        else:
            inputs = partial(needs.board, basis=basis, cells=4 if need == "channel" else 3, noise=noise)
        host = partial(
            TokenHost,
            features=features,
            widths=widths,
            classes=needs.CLASSES,
            bends=[need != "channel"] * self.slots,
            attends=[False] * self.slots,
            pools=[1] * self.slots,
        )
        counts = (int(rng.integers(1200, 2001)), VAL, TEST)
        task = Task(
            name=self.name,
            description="generated",
            splits=generated_splits(inputs, counts, needs.CLASSES, rng),
            make_host=host,
            slots=tuple(f"stages.{i}" for i in range(self.slots)),
            labels=tuple(str(label) for label in range(needs.CLASSES)),
            batch_size=64,
            updates_per_epoch=60,
            learning_rate=5e-3 if need == "scale" else 1e-2,
        )
        facts: dict[str, Fact] = {"kind": need, "widths": dashed(widths), "place": place}
        shape = SlotShape("dense", widths[place])
        least = {"channel": ("mlp_small", shape), "scale": ("norm", shape), "nothing": None}[need]
        return _limited(task, rng, held_out, self.horizon, facts, least)


def _limited(
    task: Task,
    rng: np.random.Generator,
    held_out: bool,
    horizon: int,
    facts: dict[str, Fact],
    least: tuple[str, SlotShape] | None,
) -> Draw:
    """As scarce as in `mixed`: room for 0.6 to 4 hosts, at least for the seed `least`; one to three seeds at a time."""
    host = task.host_parameters
    needed = 0 if least is None else parameter_count(least[0], least[1], "gated")
    room = max(needed, int(host * np.exp(rng.uniform(np.log(0.6), np.log(4.0)))))
    most = int(rng.choice([1, 1, 2, 3]))
    return Draw(task, draw_seed(rng, held_out), horizon, host + room, most, facts)


# -- the families of the transfer part --------------------------------------------------------------------------------


def transfer_families() -> dict[str, Family]:
    """Families that no controller was trained on and that do not come by name, or come by it with other limits."""
    deep = (DeepSeries(), DeepVectors("deep vectors", STAGES), DeepVectors("very deep vectors", MANY_STAGES))
    return {family.name: family for family in (*deep, TaskFamily("digits", horizon=20, max_seeds=2))}

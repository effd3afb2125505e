"""The built-in hosts for many networks of one form at once: `TokenHost`, `Conv1dHost`, `Conv2dHost`, channels padded.

`tasks/hosts.py` and `tasks/token_host.py` stay the reference. A stage maps [V, *sizes, batch, channels]; its slot is
its output; pooling follows. Sizes, kernels, pools and what a stage has are columns, so hosts of different shape are
one stack.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.engine.stacked import operations as ops
from esper.engine.stacked.blueprints import Constants, Place, select_constants
from esper.engine.stacked.functions import EPSILON, BatchNorm, Extent, spread
from esper.engine.stacked.parameters import Axis, Parameter, Table, affine, linear, weight_and_bias
from esper.tasks.problems import Form, Problems

MOMENTUM = 0.1
"""Of running statistics, as torch has it."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Running statistics of one stage's batch norm, of V networks: [V, channels] each."""

    mean: Tensor
    variance: Tensor


class StackedHosts:
    """The hosts of some problems: their parameters as a table, and the pass through each stage."""

    def __init__(self, problems: Problems, dtype: torch.dtype) -> None:
        self.form: Form = problems.form
        self.dtype = dtype
        self.is_map = self.form.layout.startswith("conv")
        self.problems = problems
        self.padded = [int(width) for width in problems.widths.amax(0)]
        """Channels of each stage, with padding."""
        self.extents = [problems.sizes]
        """[N, axes] true sizes of each stage's output before pooling, then of the head's input."""
        for stage in range(self.form.stages):
            self.extents.append(self.extents[-1] // problems.pools[:, stage, None])
        self.sizes = [tuple(int(size) for size in extents.amax(0)) for extents in self.extents]
        """The same, with padding."""
        self._features = Axis(((problems.features, problems.train_x.shape[-1]),))
        self.tables = [Table(self._stage(stage)) for stage in range(self.form.stages)] + [Table(self._head())]
        """Of each stage, then of the head."""
        self.offsets = [0]
        for table in self.tables:
            self.offsets.append(self.offsets[-1] + table.width)
        self.table = Table([parameter for table in self.tables for parameter in table.parameters])
        # Made here, not when first needed: that may be while a graph is captured, and it reads numbers from the device.
        self._valid = [self.place(slot).valid() if self.is_map else None for slot in range(self.form.stages)]

    def place(self, slot: int) -> Place:
        """What passes through a slot, for all networks."""
        widths, extents = self.problems.widths[:, slot], self.extents[slot]
        return Place(self.form.layout, widths, self.padded[slot], extents, self.sizes[slot], self.dtype)

    def piece(self, flat: Tensor, part: int) -> Tensor:
        """The columns of [n, P] that belong to a stage, or to the head."""
        return flat[:, self.offsets[part] : self.offsets[part + 1]]

    # -- parameters, in the order in which the plain hosts make them ---------------------------------------------------

    def _inputs(self, stage: int) -> Axis:
        return self._features if stage == 0 else self._outputs(stage - 1)

    def _outputs(self, stage: int) -> Axis:
        return Axis(((self.problems.widths[:, stage], self.padded[stage]),))

    def _stage(self, stage: int) -> list[Parameter]:
        inputs, outputs, name = self._inputs(stage), self._outputs(stage), f"stages.{stage}"
        if self.is_map:
            kernels, axes = self.problems.kernels[:, stage], self.problems.sizes.shape[1]
            taps = [Axis(((kernels, int(kernels.max())),), centred=True)] * axes
            fan_in = inputs.true * kernels**axes
            weights = weight_and_bias(f"{name}.0", (outputs, inputs, *taps), fan_in, bias=not self.form.norm)
            return [*weights, *affine(f"{name}.1", outputs)] if self.form.norm else weights
        made = linear(f"{name}.project", outputs, inputs)
        attends = self.problems.attends[:, stage]
        if bool(attends.any()):
            some = Axis(((outputs.true * attends, outputs.padded),))  # nothing where a host does not attend
            made += affine(f"{name}.norm", some)
            made += linear(f"{name}.query_key_value", Axis(some.segments * 3), some, bias=False)
            made += linear(f"{name}.out", some, some)
        return made

    def _head(self) -> list[Parameter]:
        classes = torch.full_like(self.problems.features, self.form.classes)
        return linear("head", Axis(((classes, self.form.classes),)), self._outputs(self.form.stages - 1))

    # -- the pass ------------------------------------------------------------------------------------------------------

    def constants(self, stage: int, rows: Tensor, attending: Tensor) -> Constants:
        """What the pass through a stage needs to know of the networks `rows` [V], of which `attending` attend."""
        found = select_constants(self._of_stages[stage], rows)
        if not len(attending):
            return found | {"attending": None}
        norm, scale = self._of_attention[stage]
        some = rows[attending]
        return found | {"attending": attending, "attending_norm": norm.of(some), "scale": scale[some]}

    def after_slot(self, stage: int, rows: Tensor) -> Constants:
        """The same for the pooling that follows the stage's slot."""
        return select_constants(self._of_pools[stage], rows)

    def head_constants(self, rows: Tensor) -> Constants:
        return select_constants(self._of_head, rows)

    @cached_property
    def _of_stages(self) -> list[Constants]:
        """Of all networks, so that an epoch has only to choose rows."""
        found = []
        for stage in range(self.form.stages):
            place, bends = self.place(stage), self.problems.bends[:, stage]
            lowest = torch.where(bends, 0.0, -math.inf).to(self.dtype).view(-1, *[1] * (len(place.sizes) + 2))
            of_stage: Constants = {"lowest": None if bool(bends.all()) else lowest}
            if self.is_map:
                of_stage["batch"] = place.of_batches()
            found.append(of_stage)
        return found

    @cached_property
    def _of_attention(self) -> list[tuple[Extent, Tensor]]:
        places = [self.place(stage) for stage in range(self.form.stages)]
        return [(place.of_positions(), place.channels.to(self.dtype).rsqrt()) for place in places]

    @cached_property
    def _of_pools(self) -> list[Constants]:
        return [self._pooling(stage) for stage in range(self.form.stages)]

    def _pooling(self, stage: int) -> Constants:
        factors, device = self.problems.pools[:, stage], self.problems.pools.device
        before, after = self.sizes[stage], self.sizes[stage + 1]
        if bool((factors == 1).all()):
            return {"pool": None}
        extents = self.extents[stage + 1]
        taken = []  # for each axis: [N, pooled, positions], which belong together
        for axis, (size, pooled) in enumerate(zip(before, after, strict=True)):
            place, window = torch.arange(size, device=device), torch.arange(pooled, device=device)
            inside = (place // factors[:, None])[:, None] == window[:, None]
            taken.append(inside & (window < extents[:, axis, None])[:, :, None])
        together = taken[0] if len(taken) == 1 else _crossed(*taken)
        if self.form.pooling == "average" or not self.is_map:
            share = together.sum(2, keepdim=True).clamp(min=1)
            return {"pool": together.to(self.dtype) / share}
        most = int(together.sum(2).max())
        order = together.to(torch.int8).argsort(dim=2, descending=True, stable=True)[:, :, :most]
        counts = together.sum(2, keepdim=True)
        first = torch.arange(most, device=device) < counts
        return {"pool": torch.where(first, order, order[:, :, :1]), "pooled": (counts > 0).to(self.dtype)[..., None]}

    @cached_property
    def _of_head(self) -> Constants:
        """How much of each position the mean before the head takes: [N, 1, positions]."""
        if not self.sizes[-1]:
            return {"mean": None}
        last = Place(self.form.layout, self.problems.features, 0, self.extents[-1], self.sizes[-1], self.dtype)
        valid, shape = last.valid(), (len(self.problems), 1, math.prod(last.sizes))
        there = torch.ones(shape, dtype=self.dtype, device=self.problems.sizes.device)
        there = there if valid is None else valid.flatten(1)[:, None]
        return {"mean": there / there.sum(2, keepdim=True)}

    def stage(
        self, stage: int, w: Mapping[str, Tensor], k: Constants, x: Tensor, statistics: Statistics | None
    ) -> tuple[Tensor, Statistics | None]:
        """The stage's output, and, of a batch norm in training, the statistics of the batch.

        With `statistics` the norm uses these; without, those of the batch.
        """
        name = f"stages.{stage}"
        if self.is_map:
            bias = w.get(f"{name}.0.bias")
            x = ops.convolve(x, w[f"{name}.0.weight"], bias)
            if not self.form.norm:
                return _bend(_cut(k["batch"].valid, x), k), None
            return _batch_norm(x, (w[f"{name}.1.weight"], w[f"{name}.1.bias"]), k, statistics)
        x = _bend(ops.linear(x, w[f"{name}.project.weight"], w[f"{name}.project.bias"]), k)
        rows = k["attending"]
        return (x, None) if rows is None else (self._attend(name, w, k, x, rows), None)

    def _attend(self, name: str, w: Mapping[str, Tensor], k: Constants, x: Tensor, rows: Tensor) -> Tensor:
        own = {key: w[f"{name}.{key}"].index_select(0, rows) for key in _ATTENTION}
        some = x.index_select(0, rows)
        normed = ops.normalise(some, (own["norm.weight"], own["norm.bias"]), k["attending_norm"])
        query, key, value = ops.linear(normed, own["query_key_value.weight"]).chunk(3, -1)
        mixed = ops.attend(query, key, value, None, k["scale"], causal=True)
        return x.index_add(0, rows, ops.linear(mixed, own["out.weight"], own["out.bias"]).to(x.dtype))

    def cut(self, slot: int, rows: Tensor, x: Tensor) -> Tensor:
        """Zero where the networks `rows` have no position. Sequences do not need it: nothing reads beyond their end."""
        valid = self._valid[slot]
        return x if valid is None else x * valid.index_select(0, rows).to(x.dtype)

    def pool(self, stage: int, k: Constants, x: Tensor) -> Tensor:
        how, sizes = k["pool"], self.sizes[stage + 1]
        if how is None:
            return x
        pooled = k.get("pooled")
        return ops.pool_average(x, how, sizes) if pooled is None else ops.pool_largest(x, how, pooled, sizes)

    def head(self, w: Mapping[str, Tensor], k: Constants, x: Tensor) -> Tensor:
        """[V, batch, classes]"""
        mean = k["mean"]
        if mean is not None:
            x = ops.pool_average(x, mean, ())
        return ops.linear(x, w["head.weight"], w["head.bias"])


_ATTENTION = ("norm.weight", "norm.bias", "query_key_value.weight", "out.weight", "out.bias")


def _crossed(rows: Tensor, columns: Tensor) -> Tensor:
    """Of two axes [V, pooled, positions] each: of both together."""
    both = rows[:, :, None, :, None] & columns[:, None, :, None, :]
    return both.flatten(3).flatten(1, 2)


def _cut(valid: Tensor | None, x: Tensor) -> Tensor:
    return x if valid is None else x * valid.to(x.dtype)


def _bend(x: Tensor, k: Constants) -> Tensor:
    """A ReLU where a host has one."""
    lowest = k["lowest"]
    return F.relu(x) if lowest is None else x.clamp(min=lowest.to(x.dtype))


def _batch_norm(
    x: Tensor, affine: tuple[Tensor, Tensor], k: Constants, statistics: Statistics | None
) -> tuple[Tensor, Statistics | None]:
    """Over the batch and all positions, for each channel; then a ReLU where a host has one."""
    extent: Extent = k["batch"]
    if statistics is None:
        relu = k["lowest"] is None
        y, mean, variance = BatchNorm.apply(x, *affine, extent, relu)  # type: ignore[no-untyped-call]
        count = extent.counts * x.shape[-2]
        seen = Statistics(mean, variance * count / (count - 1).clamp(min=1))
        return (y if relu else _bend(y, k)), seen
    scale = affine[0] * (statistics.variance + EPSILON).rsqrt()
    shift = spread(affine[1] - statistics.mean * scale, x)
    if extent.valid is not None:
        x, shift = x * extent.valid, shift * extent.valid
    return _bend(torch.addcmul(shift, x, spread(scale, x)).to(x.dtype), k), None

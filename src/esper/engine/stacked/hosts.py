"""The built-in hosts for many networks of one form at once: `TokenHost`, `Conv1dHost` and `Conv2dHost` over padded channels.

`tasks/hosts.py` and `tasks/token_host.py` stay the reference. A stage maps [V, batch, *sizes, channels]; its slot is its
output; pooling follows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.engine.stacked import operations as ops
from esper.engine.stacked.parameters import Axis, Parameter, Table, affine, linear, weight_and_bias
from esper.engine.stacked.seeds import Constants, Place
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
        self.widths = problems.widths
        """[N, stages] int64"""
        self.bends = problems.bends
        self.padded = [int(width) for width in problems.widths.amax(0)]
        """Channels of each stage, with padding."""
        self.sizes = _sizes(self.form)
        """Of each stage's output, before pooling."""
        self._features = Axis(((problems.features, problems.train_x.shape[-1]),))
        self.tables = [Table(self._stage(stage)) for stage in range(self.form.stages)] + [Table(self._head())]
        """Of each stage, then of the head."""
        self.offsets = [0]
        for table in self.tables:
            self.offsets.append(self.offsets[-1] + table.width)
        self.table = Table([parameter for table in self.tables for parameter in table.parameters])

    def place(self, slot: int) -> Place:
        """What passes through a slot, for all networks."""
        return Place(self.form.layout, self.widths[:, slot], self.padded[slot], self.sizes[slot], self.dtype)

    def piece(self, flat: Tensor, part: int) -> Tensor:
        """The columns of [n, P] that belong to a stage, or to the head."""
        return flat[:, self.offsets[part] : self.offsets[part + 1]]

    # -- parameters, in the order in which the plain hosts make them ---------------------------------------------------

    def _inputs(self, stage: int) -> Axis:
        return self._features if stage == 0 else self._outputs(stage - 1)

    def _outputs(self, stage: int) -> Axis:
        return Axis(((self.widths[:, stage], self.padded[stage]),))

    def _stage(self, stage: int) -> list[Parameter]:
        inputs, outputs, name = self._inputs(stage), self._outputs(stage), f"stages.{stage}"
        if self.form.layout.startswith("conv"):
            kernel, axes = self.form.kernels[stage], len(self.form.sizes)
            size = torch.full_like(inputs.true, kernel)
            taps = [Axis(((size, kernel),))] * axes
            weights = weight_and_bias(
                f"{name}.0", (outputs, inputs, *taps), inputs.true * kernel**axes, bias=not self.form.norm
            )
            return [*weights, *affine(f"{name}.1", outputs)] if self.form.norm else weights
        made = linear(f"{name}.project", outputs, inputs)
        if self.form.attends[stage]:
            made += affine(f"{name}.norm", outputs)
            made += linear(f"{name}.query_key_value", Axis(outputs.segments * 3), outputs, bias=False)
            made += linear(f"{name}.out", outputs, outputs)
        return made

    def _head(self) -> list[Parameter]:
        classes = torch.full_like(self.widths[:, 0], self.form.classes)
        return linear("head", Axis(((classes, self.form.classes),)), self._outputs(self.form.stages - 1))

    # -- the pass -------------------------------------------------------------------------------------------------------

    def constants(self, stage: int, rows: Tensor) -> Constants:
        """What the stage's pass needs to know of the networks `rows` [V]."""
        place = self.place(stage)
        width, bends = self.widths[rows, stage], self.bends[rows, stage]
        found: Constants = {"bends": None if bool(bends.all()) else bends.view(-1, *[1] * (len(place.sizes) + 2))}
        found["straight"] = None if bool(bends.any()) else torch.ones((), dtype=torch.bool, device=rows.device)
        if self.form.attends[stage]:
            chosen = Place(place.layout, width, place.padded, place.sizes, place.dtype)
            found |= chosen.counted("h", width, place.padded) | {"scale": width.to(self.dtype).rsqrt()}
        return found

    def stage(
        self, stage: int, w: Mapping[str, Tensor], k: Constants, x: Tensor, statistics: Statistics | None
    ) -> tuple[Tensor, Statistics | None]:
        """The stage's output, and, of a batch norm in training, the statistics of the batch.

        With `statistics` the norm uses these; without, those of the batch.
        """
        name, seen = f"stages.{stage}", None
        if self.form.layout.startswith("conv"):
            x = ops.convolve(x, w[f"{name}.0.weight"], w.get(f"{name}.0.bias"))
            if self.form.norm:
                x, seen = _batch_norm(x, w[f"{name}.1.weight"], w[f"{name}.1.bias"], statistics)
            return _bend(x, k), seen
        x = _bend(ops.linear(x, w[f"{name}.project.weight"], w[f"{name}.project.bias"]), k)
        if self.form.attends[stage]:
            counts, scale = k["h_counts"], k["scale"]
            assert counts is not None
            assert scale is not None
            normed = ops.normalise(x, w[f"{name}.norm.weight"], w[f"{name}.norm.bias"], (-1,), counts, k["h_mask"])
            query, key, value = ops.linear(normed, w[f"{name}.query_key_value.weight"]).chunk(3, -1)
            mixed = ops.attend(query, key, value, None, scale, causal=True)
            x = x + ops.linear(mixed, w[f"{name}.out.weight"], w[f"{name}.out.bias"])
        return x, None

    def pool(self, stage: int, x: Tensor) -> Tensor:
        return ops.pool(x, self.form.pools[stage], self.form.pooling)

    def head(self, w: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """[V, batch, classes]"""
        means = ops.positions(x).mean(2) if self.form.sizes else x
        return ops.linear(means, w["head.weight"], w["head.bias"])


def _bend(x: Tensor, k: Constants) -> Tensor:
    if k["straight"] is not None:
        return x
    return F.relu(x) if k["bends"] is None else torch.where(k["bends"], F.relu(x), x)


def _batch_norm(
    x: Tensor, weight: Tensor, bias: Tensor, statistics: Statistics | None
) -> tuple[Tensor, Statistics | None]:
    """Over the batch and all positions, for each channel."""
    axes = tuple(range(1, x.dim() - 1))
    if statistics is not None:
        scale = weight * (statistics.variance + ops.EPSILON).rsqrt()
        shift = bias - statistics.mean * scale
        return torch.addcmul(ops.spread(shift, x), x, ops.spread(scale, x)), None
    count = math.prod(x.shape[1:-1])
    variance, mean = torch.var_mean(x, axes, correction=0)  # [V, channels]
    scale = weight * (variance + ops.EPSILON).rsqrt()
    y = torch.addcmul(ops.spread(bias, x), x - ops.spread(mean, x), ops.spread(scale, x))
    return y, Statistics(mean.detach(), variance.detach() * count / max(1, count - 1))


def _sizes(form: Form) -> list[tuple[int, ...]]:
    found, sizes = [], form.sizes
    for factor in form.pools:
        found.append(sizes)
        sizes = tuple(size // factor for size in sizes)
    return found

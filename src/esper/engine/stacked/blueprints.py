"""The built-in blueprints for many networks at once. Each is the plain class of the same name over padded channels.

A blueprint has three functions of the same networks: its parameters, the constants that its pass needs (true counts,
masks), and the pass itself. `growth/blueprints` stays the reference: tests compare each of them with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.engine.stacked import operations as ops
from esper.engine.stacked.functions import Extent, spread
from esper.engine.stacked.parameters import Axis, Parameter, affine, linear, weight_and_bias
from esper.growth.blueprints import Layout, SlotShape, fitting

Weights = Mapping[str, Tensor]
Constants = dict[str, Any]
"""What a pass reads of its networks beside their weights: tensors and extents."""


@dataclass(frozen=True, slots=True)
class Place:
    """The slot of V networks: what passes through it."""

    layout: Layout
    channels: Tensor
    """[V] int64: true channels of `padded`."""
    padded: int
    extents: Tensor
    """[V, axes] int64: true sizes of `sizes`."""
    sizes: tuple[int, ...]
    dtype: torch.dtype

    def of(self, rows: Tensor) -> Place:
        return replace(self, channels=self.channels[rows], extents=self.extents[rows])

    @property
    def is_map(self) -> bool:
        return self.layout.startswith("conv")

    @property
    def axis(self) -> Axis:
        return self.wide(1)

    def wide(self, times: int) -> Axis:
        return Axis(((self.channels if times == 1 else times * self.channels, times * self.padded),))

    def fixed(self, size: int) -> Axis:
        return Axis(((torch.full_like(self.channels, size), size),))

    @property
    def kernel(self) -> int:
        """Of convolutional seeds: `ConvResidual.WIDTH`."""
        return 5 if self.layout == "conv1d" else 3

    @property
    def positions(self) -> Tensor:
        """[V] true positions."""
        return self.extents.prod(1)

    def valid(self) -> Tensor | None:
        """[V, *sizes, 1, 1]: which positions are true; None if all are."""
        found = torch.ones((len(self.channels), *self.sizes), dtype=torch.bool, device=self.channels.device)
        for axis, size in enumerate(self.sizes):
            shape = [1] * len(self.sizes)
            shape[axis] = size
            there = torch.arange(size, device=found.device) < self.extents[:, axis, None]
            found = found & there.view(-1, *shape)
        return None if bool(found.all()) else found.to(self.dtype)[..., None, None]

    def channel_mask(self, channels: Tensor, padded: int) -> Tensor | None:
        """[V, 1, …, padded]: which channels are true; None if all are."""
        mask = torch.arange(padded, device=channels.device) < channels[:, None]
        return None if bool(mask.all()) else mask.to(self.dtype).view(-1, *[1] * (len(self.sizes) + 1), padded)

    def of_positions(self) -> Extent:
        """For a norm over the channels of each position."""
        mask = self.channel_mask(self.channels, self.padded)
        return self._extent(self.channels, mask, None, self.channels)

    def of_examples(self, channels: Tensor, padded: int) -> Extent:
        """For a norm over the `channels` and the positions of each example."""
        valid, mask = self.valid(), self.channel_mask(channels, padded)
        both = mask if valid is None else valid if mask is None else valid * mask
        return self._extent(channels, both, valid, channels * self.positions)

    def of_batches(self) -> Extent:
        """For a batch norm, whose counts are [V, 1]."""
        extent = self._extent(self.channels, None, self.valid(), self.positions)
        return replace(extent, counts=extent.counts.flatten(1))

    def _extent(self, channels: Tensor, mask: Tensor | None, valid: Tensor | None, counts: Tensor) -> Extent:
        flat = self.extents if len(self.sizes) == 2 else F.pad(self.extents, (1 if self.sizes else 2, 0), value=1)
        return Extent(
            channels.int(),
            flat.int().contiguous(),
            self.sizes[-1] if self.sizes else 1,
            mask,
            valid,
            counts.to(self.dtype).view(-1, *[1] * (len(self.sizes) + 2)),
        )

    def of_means(self) -> Constants:
        """For means over positions."""
        counts = self.positions.to(self.dtype).view(-1, 1, 1)
        return {"positions": None if self.valid() is None else counts}


def select_constants(constants: Constants, rows: Tensor) -> Constants:
    """Those of some networks: everything has a row for each network, or is None for all."""
    return {
        name: None if value is None else value.of(rows) if isinstance(value, Extent) else value[rows]
        for name, value in constants.items()
    }


@dataclass(frozen=True, slots=True)
class BatchedBlueprint:
    """One kind of seed."""

    parameters: Callable[[Place], list[Parameter]]
    constants: Callable[[Place], Constants]
    forward: Callable[[Weights, Constants, Tensor], Tensor]
    """(weights, constants, h [V, *sizes, batch, channels]) → the same shape; what is beyond true positions is cut."""


def _example_norm(w: Weights, name: str, extent: Extent, h: Tensor, *, relu: bool = False) -> Tensor:
    """GroupNorm of one group: over a whole example."""
    return ops.normalise(h, (w[f"{name}.weight"], w[f"{name}.bias"]), extent, examples=True, relu=relu)


def _position_norm(w: Weights, name: str, extent: Extent, h: Tensor) -> Tensor:
    """LayerNorm: over the channels of a position."""
    return ops.normalise(h, (w[f"{name}.weight"], w[f"{name}.bias"]), extent)


def _of_example(place: Place) -> Constants:
    return {"h": place.of_examples(place.channels, place.padded)}


def _of_position(place: Place) -> Constants:
    return {"h": place.of_positions()}


# -- norm --------------------------------------------------------------------------------------------------------------


def _norm_parameters(place: Place) -> list[Parameter]:
    mix = Parameter("mix", (place.axis, *[place.fixed(1)] * (len(place.sizes) if place.is_map else 0)), value=0.0)
    # torch lists a module's own parameters before those of its parts; nothing is drawn here, so the order is free.
    return [mix, *affine("norm", place.axis)]


def _mixed_norm(w: Weights, h: Tensor, normed: Tensor) -> Tensor:
    return h + torch.tanh(spread(w["mix"].flatten(1), h)) * (normed - h)


def _conv_norm(w: Weights, k: Constants, h: Tensor) -> Tensor:
    return _mixed_norm(w, h, _example_norm(w, "norm", k["h"], h))


def _feature_norm(w: Weights, k: Constants, h: Tensor) -> Tensor:
    return _mixed_norm(w, h, _position_norm(w, "norm", k["h"], h))


# -- feature maps ------------------------------------------------------------------------------------------------------


def _squeeze_parameters(place: Place) -> list[Parameter]:
    hidden = Axis((((place.channels // 4).clamp(min=1), max(1, place.padded // 4)),))
    # In the order in which the plain class makes them: the last layer first.
    return [*linear("decide.2", place.axis, hidden, value=0.0), *linear("decide.0", hidden, place.axis)]


def _squeeze(w: Weights, k: Constants, h: Tensor) -> Tensor:
    hidden = F.silu(ops.linear(ops.means(h, k["positions"]), w["decide.0.weight"], w["decide.0.bias"]))
    scale = 2 * torch.sigmoid(ops.linear(hidden, w["decide.2.weight"], w["decide.2.bias"]))  # [V, batch, channels]
    return h * scale.view(len(h), *[1] * (h.dim() - 3), *scale.shape[1:])


def _conv(
    name: str, place: Place, outputs: Axis, inputs: Axis, kernel: int, *, bias: bool = True, value: float | None = None
) -> list[Parameter]:
    taps = [place.fixed(kernel)] * len(place.sizes)
    fan_in = inputs.true * kernel ** len(place.sizes)
    return weight_and_bias(name, (outputs, inputs, *taps), fan_in, bias=bias, value=value)


def _depthwise_parameters(place: Place) -> list[Parameter]:
    return [
        *_conv("body.0", place, place.axis, place.fixed(1), place.kernel, bias=False),
        *affine("body.1", place.axis),
        *_conv("body.3", place, place.axis, place.axis, 1, value=0.0),
    ]


def _depthwise(w: Weights, k: Constants, h: Tensor) -> Tensor:
    seen = _example_norm(w, "body.1", k["h"], ops.convolve_depthwise(h, w["body.0.weight"]), relu=True)
    return h + ops.convolve(seen, w["body.3.weight"], w["body.3.bias"])


def _pair_parameters(place: Place, times: int, kernel: int) -> list[Parameter]:
    hidden = place.wide(times)
    return [
        *_conv("body.0", place, hidden, place.axis, kernel, bias=False),
        *affine("body.1", hidden),
        *_conv("body.3", place, place.axis, hidden, kernel, value=0.0),
    ]


def _pair(w: Weights, k: Constants, h: Tensor) -> Tensor:
    hidden = _example_norm(w, "body.1", k["hidden"], ops.convolve(h, w["body.0.weight"]), relu=True)
    return h + ops.convolve(hidden, w["body.3.weight"], w["body.3.bias"])


def _pairs(times: int, kernel: Callable[[Place], int]) -> BatchedBlueprint:
    return BatchedBlueprint(
        lambda place: _pair_parameters(place, times, kernel(place)),
        lambda place: {"hidden": place.of_examples(times * place.channels, times * place.padded)},
        _pair,
    )


def _waist(place: Place) -> tuple[Tensor, int]:
    channels = torch.minimum(place.channels, (place.channels // 4).clamp(min=4))
    return channels, min(place.padded, max(4, place.padded // 4))


def _bottleneck_parameters(place: Place) -> list[Parameter]:
    waist = Axis((_waist(place),))
    return [
        *_conv("body.0", place, waist, place.axis, 1, bias=False),
        *affine("body.1", waist),
        *_conv("body.3", place, waist, waist, place.kernel, bias=False),
        *affine("body.4", waist),
        *_conv("body.6", place, place.axis, waist, 1, value=0.0),
    ]


def _bottleneck(w: Weights, k: Constants, h: Tensor) -> Tensor:
    waist = _example_norm(w, "body.1", k["waist"], ops.convolve(h, w["body.0.weight"]), relu=True)
    waist = _example_norm(w, "body.4", k["waist"], ops.convolve(waist, w["body.3.weight"]), relu=True)
    return h + ops.convolve(waist, w["body.6.weight"], w["body.6.bias"])


# -- attention ---------------------------------------------------------------------------------------------------------


FAR_BELOW = -1e9
"""Added to the product with a position that does not exist."""


def _attention_constants(place: Place) -> Constants:
    head = (place.channels // ops.head_count(place.channels)).to(place.dtype)
    constants = {"heads": ops.head_channels(place.channels, place.padded, place.dtype), "scale": head.rsqrt()}
    if not place.is_map:  # causal: what is beyond the end is never read
        turn = ops.rotation(place.channels, place.padded, place.sizes[0], place.dtype)
        return constants | _of_position(place) | dict(zip(("cosine", "sine", "swap"), turn, strict=True))
    codes, valid = ops.position_codes(place.extents, place.sizes, place.dtype), place.valid()
    constants["hidden"] = None if valid is None else FAR_BELOW * (1.0 - valid.flatten(1))
    return constants | _of_example(place) | {"codes": codes[:, :, None]}


def _conv_attention_parameters(place: Place) -> list[Parameter]:
    codes = 8 * len(place.sizes)
    seen = Axis((*place.axis.segments, *place.fixed(codes).segments))
    both = Axis(place.axis.segments * 2)
    return [
        *affine("norm", place.axis),
        *linear("query", place.axis, seen, bias=False),
        *linear("key_value", both, seen, bias=False),
        *linear("out", place.axis, place.axis, value=0.0),
    ]


def _conv_attention(w: Weights, k: Constants, h: Tensor) -> Tensor:
    x = _example_norm(w, "norm", k["h"], h).flatten(1, -3)  # [V, positions, batch, channels]
    x = torch.cat([x, k["codes"].to(x.dtype).expand(-1, -1, x.shape[2], -1)], -1)
    query = ops.linear(x, w["query.weight"])
    key, value = ops.linear(x, w["key_value.weight"]).chunk(2, -1)
    seen = ops.attend(query, key, value, k["heads"], k["scale"], causal=False, hidden=k["hidden"])
    return h + ops.linear(seen, w["out.weight"], w["out.bias"]).view(h.shape)


def _sequence_attention_parameters(place: Place) -> list[Parameter]:
    return [
        *affine("norm", place.axis),
        *linear("query_key_value", Axis(place.axis.segments * 3), place.axis, bias=False),
        *linear("out", place.axis, place.axis, value=0.0),
    ]


def _sequence_attention(w: Weights, k: Constants, h: Tensor) -> Tensor:
    query, key, value = ops.linear(_position_norm(w, "norm", k["h"], h), w["query_key_value.weight"]).chunk(3, -1)
    turn = (k["cosine"], k["sine"], k["swap"])
    query, key = ops.rotate(query, *turn), ops.rotate(key, *turn)
    seen = ops.attend(query, key, value, k["heads"], k["scale"], causal=True)
    return h + ops.linear(seen, w["out.weight"], w["out.bias"])


# -- each position by itself -------------------------------------------------------------------------------------------


def _low_rank(most: int) -> BatchedBlueprint:
    def parameters(place: Place) -> list[Parameter]:
        rank = Axis(((place.channels.clamp(max=most), min(place.padded, most)),))
        return [
            *linear("down", rank, place.axis, bias=False),
            *linear("up", place.axis, rank, bias=False, value=0.0),
        ]

    def forward(w: Weights, k: Constants, h: Tensor) -> Tensor:
        return h + ops.linear(ops.linear(h, w["down.weight"]), w["up.weight"])

    return BatchedBlueprint(parameters, lambda place: {}, forward)


def _feature_mlp(times: int) -> BatchedBlueprint:
    def parameters(place: Place) -> list[Parameter]:
        hidden = place.wide(times)
        return [
            *affine("norm", place.axis),
            *linear("up", hidden, place.axis),
            *linear("down", place.axis, hidden, value=0.0),
        ]

    def forward(w: Weights, k: Constants, h: Tensor) -> Tensor:
        hidden = F.gelu(ops.linear(_position_norm(w, "norm", k["h"], h), w["up.weight"], w["up.bias"]))
        return h + ops.linear(hidden, w["down.weight"], w["down.bias"])

    return BatchedBlueprint(parameters, _of_position, forward)


_MAPS: dict[str, BatchedBlueprint] = {
    "norm": BatchedBlueprint(_norm_parameters, _of_example, _conv_norm),
    "squeeze_excite": BatchedBlueprint(_squeeze_parameters, Place.of_means, _squeeze),
    "depthwise": BatchedBlueprint(_depthwise_parameters, _of_example, _depthwise),
    "pointwise": _pairs(2, lambda place: 1),
    "conv": _pairs(1, lambda place: place.kernel),
    "wide": _pairs(4, lambda place: place.kernel),
    "bottleneck": BatchedBlueprint(
        _bottleneck_parameters, lambda place: {"waist": place.of_examples(*_waist(place))}, _bottleneck
    ),
    "attention": BatchedBlueprint(_conv_attention_parameters, _attention_constants, _conv_attention),
}
_FEATURES: dict[str, BatchedBlueprint] = {
    "norm": BatchedBlueprint(_norm_parameters, _of_position, _feature_norm),
    "lora": _low_rank(8),
    "mlp_small": _feature_mlp(2),
    "mlp": _feature_mlp(4),
}
_SEQUENCES: dict[str, BatchedBlueprint] = {
    **_FEATURES,
    "lora_large": _low_rank(32),
    "attention": BatchedBlueprint(_sequence_attention_parameters, _attention_constants, _sequence_attention),
}
BATCHED: dict[Layout, dict[str, BatchedBlueprint]] = {
    "conv1d": _MAPS,
    "conv2d": _MAPS,
    "sequence": _SEQUENCES,
    "dense": _FEATURES,
}


def without_batched_form(layout: Layout) -> list[str]:
    """Blueprints that a plain network could grow in such slots and a stack could not: those of users."""
    shape = SlotShape(layout, 1, visibility="causal" if layout == "sequence" else "both")
    return [entry.name for entry in fitting(shape) if entry.name not in BATCHED[layout]]


# -- the gate of the blend "gated" -------------------------------------------------------------------------------------


def gate_parameters(place: Place) -> list[Parameter]:
    hidden = Axis((((place.channels // 4).clamp(min=4), max(4, place.padded // 4)),))
    weight, bias = linear("decide.2", place.fixed(1), hidden)
    return [weight, Parameter(bias.name, bias.axes, bias.fan_in, 2.0), *linear("decide.0", hidden, place.axis)]


def gate_constants(place: Place) -> Constants:
    """Of a mean over positions in a feature map, else of each position."""
    if not place.is_map:
        return _of_position(place)
    return _of_position(replace(place, sizes=(), extents=place.extents[:, :0])) | place.of_means()


def gate(w: Weights, k: Constants, h: Tensor, *, is_map: bool) -> Tensor:
    """[V, …, batch, 1]: how open it is; one value per example, in a sequence one per position."""
    seen = ops.means(h, k["positions"]) if is_map else h
    seen = ops.normalise(seen, None, k["h"])
    hidden = F.silu(ops.linear(seen, w["decide.0.weight"], w["decide.0.bias"]))
    opening = torch.sigmoid(ops.linear(hidden, w["decide.2.weight"], w["decide.2.bias"]))
    return opening.view(len(h), *[1] * (h.dim() - 3), *opening.shape[1:]) if is_map else opening

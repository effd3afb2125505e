"""Every blueprint and blend, for networks of different widths and sizes at once, against the plain seeds.

Covers: R143
"""

from __future__ import annotations

import pytest
import torch
from side_by_side import DEVICES, LAYOUT_NAMES, ON_CUDA, pack, scrambled, seed_tensors
from torch import Tensor
from torch.testing import assert_close

from esper.actions import BLENDS
from esper.engine.stacked import blueprints
from esper.engine.stacked.blueprints import BATCHED, Place
from esper.engine.stacked.parameters import Table
from esper.growth.blueprints import Layout, SlotShape, blueprint_names, fitting
from esper.growth.seed import Seed, parameter_count

CHANNELS = (6, 16, 9, 20, 33, 8, 3)
"""1, 2 and 4 heads; odd head sizes; fewer channels than a gate, a waist or a rank."""
SIZES: dict[Layout, list[tuple[int, ...]]] = {
    "dense": [()] * 7,
    "sequence": [(7,), (4,), (7,), (1,), (5,), (6,), (3,)],
    "conv1d": [(11,), (4,), (9,), (1,), (11,), (6,), (10,)],
    "conv2d": [(5, 6), (2, 6), (5, 1), (1, 1), (4, 4), (3, 5), (5, 6)],
}
BATCH = 4
CASES = [(layout, name, blend) for layout in LAYOUT_NAMES for name in BATCHED[layout] for blend in BLENDS]


def slot_shape(layout: Layout, row: int) -> SlotShape:
    return SlotShape(layout, CHANNELS[row], SIZES[layout][row], "causal" if layout == "sequence" else "both")


def place_of(layout: Layout, device: str = "cpu") -> Place:
    sizes = SIZES[layout]
    padded = tuple(max(axis) for axis in zip(*sizes, strict=True))
    extents = torch.tensor(sizes, dtype=torch.int64).view(len(sizes), -1)
    channels = torch.tensor(CHANNELS)
    return Place(layout, channels.to(device), max(CHANNELS), extents.to(device), padded, torch.float64)


def true_part(layout: Layout, row: int, padded: Tensor) -> Tensor:
    """[*sizes, batch, channels] of one network, of [V, *padded sizes, batch, padded channels]."""
    return padded[row][tuple(slice(size) for size in SIZES[layout][row])][..., : CHANNELS[row]]


def as_plain(layout: Layout, h: Tensor) -> Tensor:
    """[*sizes, batch, channels] as the plain seed takes it."""
    h = h.movedim(-2, 0)
    return h.movedim(-1, 1) if layout.startswith("conv") else h


def test_every_blueprint_of_a_layout_has_a_batched_form() -> None:
    for layout in LAYOUT_NAMES:
        shapes = [slot_shape(layout, row) for row in range(len(CHANNELS))]
        assert {blueprint.name for shape in shapes for blueprint in fitting(shape)} == set(BATCHED[layout])
        assert set(BATCHED[layout]) <= set(blueprint_names())


@pytest.mark.parametrize(("layout", "name", "blend"), CASES)
def test_first_weights_are_those_that_torch_draws_and_sizes_are_true(layout: Layout, name: str, blend: str) -> None:
    place, gated = place_of(layout), blend == "gated"
    body, gate = Table(BATCHED[layout][name].parameters(place)), Table(blueprints.gate_parameters(place))
    count = int((body.drawn + gate.drawn).max())
    rows = range(len(CHANNELS))
    uniforms = torch.stack([torch.rand(count, generator=torch.Generator().manual_seed(row)) for row in rows])
    flat, around = body.fill(uniforms), gate.fill(uniforms, start=body.drawn)
    assert bool((flat[~body.real] == 0).all())
    assert bool((around[~gate.real] == 0).all())
    for row in rows:
        torch.manual_seed(row)
        plain = Seed(name, slot_shape(layout, row), blend)
        for table, found, expected in zip(
            (body, gate), (flat, around), seed_tensors(plain.state_dict(), gated), strict=True
        ):
            if expected:
                own = table.state_dict(found, row)
                assert own.keys() == expected.keys()
                assert all(torch.equal(own[key], value) for key, value in expected.items())
        size = int(body.sizes[row]) + (int(gate.sizes[row]) if gated else 0)
        assert size == plain.size == parameter_count(name, slot_shape(layout, row), blend)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("layout", "name", "blend"), [case for case in CASES if case[2] != "sigmoid"])
def test_outputs_and_gradients_are_those_of_the_plain_seeds(layout: Layout, name: str, blend: str, device: str) -> None:
    """The ramp "sigmoid" is another alpha, and no other module."""
    place, batched, gated = place_of(layout, device), BATCHED[layout][name], blend == "gated"
    tolerance = {"rtol": 0.0, "atol": 1e-11 if device == "cpu" else ON_CUDA}
    tables = Table(batched.parameters(place)), Table(blueprints.gate_parameters(place))
    rows = range(len(CHANNELS))
    plain = [scrambled(Seed(name, slot_shape(layout, row), blend), row) for row in rows]
    leaves = []
    for i, table in enumerate(tables):
        leaf = torch.zeros(len(rows), table.width, dtype=torch.float64, device=device)
        for row in rows:
            if own := seed_tensors(plain[row].state_dict(), gated)[i]:
                pack(table, row, own, leaf)
        leaves.append(leaf.requires_grad_())
    inputs = torch.zeros(len(rows), *place.sizes, BATCH, place.padded, dtype=torch.float64)
    wanted = torch.zeros_like(inputs)  # weights of a sum: zero where nothing is
    generator = torch.Generator().manual_seed(1)
    for tensor in (inputs, wanted):
        for row in rows:
            part = true_part(layout, row, tensor)
            part.copy_(torch.randn(part.shape, generator=generator, dtype=torch.float64))
    h = inputs.to(device, copy=True).requires_grad_()
    out = batched.forward(tables[0].split(leaves[0]), batched.constants(place), h)
    if gated:
        constants = blueprints.gate_constants(place)
        out = h + blueprints.gate(tables[1].split(leaves[1]), constants, h, is_map=place.is_map) * (out - h)
    (out * wanted.to(device)).sum().backward()
    assert h.grad is not None
    for row in rows:
        own = true_part(layout, row, inputs).clone().requires_grad_()
        expected = plain[row](as_plain(layout, own))
        (expected * as_plain(layout, true_part(layout, row, wanted))).sum().backward()
        assert_close(as_plain(layout, true_part(layout, row, out.detach().cpu())), expected.detach(), **tolerance)
        assert_close(true_part(layout, row, h.grad.cpu()), own.grad, **tolerance)
        gradients = {key: value.grad for key, value in plain[row].named_parameters() if value.grad is not None}
        for table, leaf, expected_gradients in zip(tables, leaves, seed_tensors(gradients, gated), strict=True):
            if expected_gradients:
                assert leaf.grad is not None
                found = {key: value.cpu() for key, value in table.state_dict(leaf.grad, row).items()}
                assert_close(found, expected_gradients, **tolerance)
        beyond = out[row][tuple(slice(size) for size in SIZES[layout][row])][..., CHANNELS[row] :]
        assert bool((beyond == 0).all()), "a padded channel is no longer zero"

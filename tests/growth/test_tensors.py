"""Tensors found, laid side by side and moved all at once are what torch makes of them one by one."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from growing import built_in
from torch import nn

from esper.growth.blueprints import SlotShape, fitting
from esper.growth.seed import Seed
from esper.growth.tensors import ALIGNED, move_together, own_tensors, side_by_side
from small_worlds import WORLDS

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", WORLDS)
def test_tensors_found_in_one_pass_are_those_that_torch_finds(name: str) -> None:
    model = WORLDS[name].grown()
    parameters, buffers = own_tensors(model)
    assert [id(p) for p in parameters] == [id(p) for p in model.parameters()]  # tied ones once, in the same order
    assert [id(b) for b in buffers] == [id(b) for b in model.buffers()]


def test_tensors_side_by_side_have_the_layouts_of_others_in_aligned_places() -> None:
    image = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    like = [image, torch.tensor(7), torch.randn(3), torch.randn(70, 2)]
    places = side_by_side(like, torch.zeros)
    for place, one in zip(places, like, strict=True):
        assert (place.shape, place.stride(), place.dtype) == (one.shape, one.stride(), one.dtype)
        assert place.storage_offset() % ALIGNED == 0
        assert not place.any()
        place.fill_(1)
    assert [int(place.sum()) for place in places] == [one.numel() for one in like]
    assert len({place.untyped_storage().data_ptr() for place in places}) == 2  # one for each type of number
    pieces = sorted((place.storage_offset(), place.numel()) for place in places if place.is_floating_point())
    assert all(a + size <= b for (a, size), (b, _) in pairwise(pieces))


def tied() -> nn.Module:
    pair = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    pair[2].weight = pair[0].weight
    return pair


MODULES = {
    **{
        f"seed {b.name}": lambda b=b: Seed(b.name, SlotShape("conv2d", 12, (5, 3)), "gated")
        for b in fitting(SlotShape("conv2d", 12))
    },
    **{name: lambda name=name: built_in(name)[0] for name in ("mlp", "conv1d", "conv2d", "gpt")},
    "tied": tied,
    "that moves itself": lambda: nn.LSTM(3, 4),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(
    ("dtype", "by_pixel"), [(None, False), (None, True), (torch.float32, True), (torch.float64, True)]
)
def test_moving_together_is_moving_one_by_one(name: str, dtype: torch.dtype | None, by_pixel: bool) -> None:
    torch.manual_seed(0)
    ours = MODULES[name]()
    torch.manual_seed(0)
    theirs = MODULES[name]()
    parameters = list(ours.parameters())
    move_together(ours, CPU, dtype, by_pixel=by_pixel)
    theirs.to(CPU, dtype, **({"memory_format": torch.channels_last} if by_pixel else {}))
    assert all(a is b for a, b in zip(ours.parameters(), parameters, strict=True))  # an optimizer may know them
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for key, tensor in ours.state_dict().items():
        assert torch.equal(tensor, expected[key])
        assert (tensor.dtype, tensor.stride()) == (expected[key].dtype, expected[key].stride())


def test_what_is_there_already_stays_where_it_is() -> None:
    module = nn.BatchNorm1d(3)
    before = [t.data_ptr() for t in module.state_dict().values()]
    move_together(module, CPU, torch.float32, by_pixel=False)
    assert [t.data_ptr() for t in module.state_dict().values()] == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("by_pixel", [False, True])
def test_nothing_waits_for_a_move_to_the_gpu(by_pixel: bool) -> None:
    for make in MODULES.values():
        ours, device = make(), torch.device("cuda:0")
        if isinstance(ours, nn.LSTM):
            continue
        expected = {name: t.clone() for name, t in ours.state_dict().items()}
        torch.cuda.set_sync_debug_mode("error")
        try:
            move_together(ours, device, by_pixel=by_pixel)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for name, tensor in ours.state_dict().items():
            assert tensor.device == device
            assert torch.equal(tensor.cpu(), expected[name])

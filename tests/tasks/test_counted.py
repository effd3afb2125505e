"""Counted random numbers: known values, no state, nothing shared between keys, purposes and indices."""

import math

import pytest
import torch
from torch import nn

from esper.growth.blueprints import LAYOUTS, SlotShape, fitting
from esper.growth.seed import Seed
from esper.tasks import counted
from esper.tasks.counted import Purpose, bits, chosen, draw_keys, integers, mix, noise, normals, random_bits, uniforms
from esper.tasks.counted_init import CountedInit, DrawNumbers, scaled_uniform

KEYS = draw_keys(torch.arange(400), stream=0, streams=4)


def test_mix_is_splitmix64():
    """The published sequence of the seed 1234567."""
    state = torch.tensor([1234567]) + torch.arange(1, 4) * counted.STEP
    assert [int(z) % 2**64 for z in mix(state)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def _mixed(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def test_a_number_is_worked_out_by_hand():
    """With Python's whole numbers: key 5, purpose 3, index 7."""
    start = _mixed((5 + _mixed(2**64 - 1 - 3)) % 2**64)
    drawn = _mixed((start + (7 + 1) * 0x9E3779B97F4A7C15) % 2**64)
    key = torch.tensor([5])
    assert int(bits(key, 3, 8)[0, 7]) % 2**64 == drawn
    assert float(uniforms(key, 3, 8)[0, 7]) == (drawn >> 40) / 2**24
    assert int(integers(key, 3, 8, 10)[0, 7]) == 10 * (drawn >> 40) // 2**24
    radius = math.sqrt(-2 * math.log(((drawn >> 32) + 1) / 2**32))
    assert float(normals(key, 3, 8)[0, 7]) == pytest.approx(radius * math.cos(2 * math.pi * (drawn % 2**32) / 2**32))


def test_numbers_do_not_depend_on_the_batch_or_on_where_counting_begins():
    whole = uniforms(KEYS, 2, 100)
    assert torch.equal(uniforms(KEYS[17:19], 2, 60), whole[17:19, :60])
    assert torch.equal(uniforms(KEYS[:5], 2, 40, first=60), whole[:5, 60:])
    first = torch.tensor([0, 10, 90])
    assert torch.equal(uniforms(KEYS[:3], 2, 10, first)[2], whole[2, 90:])
    assert torch.equal(noise(KEYS[3:4], 2, 9, 6), noise(KEYS[:8], 2, 20, 6)[3:4, :9])
    assert torch.equal(random_bits(KEYS[3:4], 2, 9, 6), random_bits(KEYS[:8], 2, 20, 6)[3:4, :9])


def test_numbers_are_uniform_normal_and_independent():
    u = uniforms(KEYS, 2, 500).double()
    assert 0.0 <= float(u.min()) < 1e-4
    assert 0.9999 < float(u.max()) < 1.0
    counts = (u * 64).long().flatten().bincount(minlength=64).double()
    expected = u.numel() / 64
    assert float(((counts - expected) ** 2 / expected).sum()) < 104  # chi² of 63 degrees of freedom: p = 0.001
    z = normals(KEYS, 2, 500).double()
    moments = [float((z**power).mean()) for power in (1, 2, 3, 4)]
    assert moments == pytest.approx([0.0, 1.0, 0.0, 3.0], abs=0.05)
    # Neighbouring indices, neighbouring draws, other purposes, and the low and the high bits of one number.
    other = normals(KEYS, 3, 500).double()
    for a, b in ((z[:, 1:], z[:, :-1]), (z[1:], z[:-1]), (z, other), (z**2, other**2)):
        together = torch.stack([a.flatten(), b.flatten()])
        assert abs(float(torch.corrcoef(together)[0, 1])) < 0.01


def test_every_bit_of_the_key_changes_half_of_the_bits():
    drawn = bits(KEYS, 2, 4)
    for flipped in range(64):
        bit = 2**flipped if flipped < 63 else -(2**63)
        changed = drawn ^ bits(KEYS ^ bit, 2, 4)
        ones = sum(((changed >> place) & 1).double().mean() for place in range(64))
        assert 31.0 < float(ones) < 33.0


def test_whole_numbers_and_choices_stay_in_their_range_and_share():
    below = torch.arange(1, 401)
    drawn = integers(KEYS, 2, 300, below)
    assert bool((drawn >= 0).all())
    assert bool((drawn < below[:, None]).all())
    assert drawn[-1].unique().numel() > 150
    shares = chosen(uniforms(KEYS, 2, 300), (1.0, 0.0, 3.0)).flatten().bincount(minlength=3) / 120_000
    assert shares.tolist() == pytest.approx([0.25, 0.0, 0.75], abs=0.01)


def test_purposes_and_streams_of_draws_share_no_number():
    ids = torch.arange(20_000)
    keys = torch.cat([draw_keys(ids, stream=stream, streams=4) for stream in range(4)])
    assert keys.unique().numel() == 80_000
    drawn = torch.stack([bits(KEYS, purpose, 50) for purpose in Purpose])
    assert drawn.unique().numel() == drawn.numel()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_counted_weights_are_torchs_own_for_torchs_numbers(layout):
    """Bit for bit, in torch's order, for a host's layers and every seed; layers that start at zero stay so."""
    shape = SlotShape(layout, 9)
    makers = [lambda: nn.Linear(13, 29), lambda: nn.Conv2d(7, 9, 3)]
    makers += [lambda name=blueprint.name: Seed(name, shape, "gated") for blueprint in fitting(shape)]
    for make in makers:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            plain = make()
            torch.manual_seed(5)
            stream = torch.rand(30_000)
        with CountedInit(lambda first, count, stream=stream: stream[first : first + count]):
            filled = make()
        for a, b in zip(plain.state_dict().values(), filled.state_dict().values(), strict=True):
            assert torch.equal(a, b)


def test_spread_rounds_both_ends_and_the_result_once():
    drawn = torch.tensor([0.0, 0.5, 1 - 2.0**-24])
    low, high = -1 / math.sqrt(7), 1 / math.sqrt(7)
    assert scaled_uniform(drawn, low, high).tolist() == [
        float(torch.tensor(low)),
        0.0,
        pytest.approx(float(torch.tensor(high)), abs=1e-7),
    ]


def test_the_numbers_of_one_draw_are_those_of_the_batch():
    key = int(KEYS[3])
    with DrawNumbers(key).host():
        host = nn.Linear(4, 3)
    expected = scaled_uniform(uniforms(KEYS[3:4], Purpose.HOST, 15)[0], -0.5, 0.5)
    assert torch.equal(torch.cat([host.weight.flatten(), host.bias]), expected)
    with DrawNumbers(key).seed(2):
        seed = nn.Linear(4, 3)
    expected = scaled_uniform(uniforms(KEYS[3:4], Purpose.SEED, 12, first=2 << 32)[0], -0.5, 0.5)
    assert torch.equal(seed.weight.flatten(), expected)
    several = integers(KEYS[3:4], Purpose.MINIBATCH, 20, 77)[0]
    assert torch.equal(DrawNumbers(key).examples(8, 12, 77), several[8:])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_numbers_are_the_same_on_a_gpu():
    there = KEYS.cuda()
    assert torch.equal(bits(there, 2, 100).cpu(), bits(KEYS, 2, 100))
    assert torch.equal(uniforms(there, 2, 100).cpu(), uniforms(KEYS, 2, 100))
    assert torch.equal(integers(there, 2, 100, 77).cpu(), integers(KEYS, 2, 100, 77))
    assert torch.equal(noise(there, 2, 10, 30).cpu(), noise(KEYS, 2, 10, 30))
    assert torch.allclose(normals(there, 2, 100).cpu(), normals(KEYS, 2, 100), atol=1e-6)

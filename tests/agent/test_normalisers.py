"""Running statistics: Welford and exponential; PopArt keeps values where they were.

Covers: R107, R119, R142
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.agent.normalisers import ObservationNormaliser, RunningMoments, ValueNormaliser
from esper.env.spaces import Observation


def observation(overall: torch.Tensor, slots: torch.Tensor, present: torch.Tensor) -> Observation:
    return Observation(overall, slots, present.long(), torch.zeros(*present.shape, 1), present)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_batches_merge_to_the_moments_of_all_rows(seed, sizes):
    generator = torch.Generator().manual_seed(seed)
    batches = [5 + 3 * torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in sizes]
    running = RunningMoments(4)
    for batch in batches:
        running.update(batch)
    rows = torch.cat(batches)
    assert torch.allclose(running.mean, rows.mean(0), atol=1e-9)
    assert torch.allclose(running.variance, rows.var(0, correction=0), atol=1e-9)
    assert running.count.item() == sum(sizes)


def test_momentum_by_hand():
    running = RunningMoments(1, momentum=0.75)
    running.update(torch.tensor([[0.0], [4.0]]))  # the first batch sets them: mean 2, variance 4
    assert (running.mean.item(), running.variance.item()) == (2.0, 4.0)
    running.update(torch.tensor([[10.0], [10.0]]))  # a mixture of 3/4 old, 1/4 new
    assert running.mean.item() == pytest.approx(0.75 * 2 + 0.25 * 10)
    assert running.variance.item() == pytest.approx(0.75 * 4 + 0.25 * 0 + 0.75 * 0.25 * (10 - 2) ** 2)
    before = (running.mean.clone(), running.variance.clone())
    running.update(torch.zeros(2, 1), torch.tensor([False, False]))  # nothing to take in
    assert (running.mean, running.variance) == before
    with pytest.raises(ValueError, match="between 0 and 1"):
        RunningMoments(1, momentum=1.0)


def test_observation_statistics_are_frozen_until_they_are_updated_and_skip_padding():
    normaliser = ObservationNormaliser(2, 1)
    seen = observation(
        torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        torch.tensor([[[1.0], [777.0]], [[3.0], [777.0]]]),
        torch.tensor([[True, False], [True, False]]),
    )
    before = normaliser(seen)
    assert torch.equal(normaliser(seen).overall, before.overall)  # looking changes nothing
    normaliser.update(seen, torch.tensor([True, True]))
    assert normaliser.frozen["overall"].mean.tolist() == [2.0, 3.0]
    assert normaliser.frozen["slots"].mean.tolist() == [2.0]  # 777 was padding
    assert normaliser(seen).overall.tolist() == [[-1.0, -1.0], [1.0, 1.0]]
    assert normaliser(seen).slots.max().item() == 10.0  # clipped
    normaliser.update(seen, torch.tensor([False, False]))  # nothing of it happened
    assert normaliser.frozen["overall"].mean.tolist() == [2.0, 3.0]
    normaliser.fixed = True
    normaliser.update(seen, torch.tensor([True, False]))
    assert normaliser.frozen["overall"].mean.tolist() == [2.0, 3.0]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.1, 1e3), st.floats(-1e3, 1e3))
def test_popart_leaves_values_in_place(seed, scale, shift):
    torch.manual_seed(seed)
    last, x = torch.nn.Linear(8, 1), torch.randn(5, 8)
    values = ValueNormaliser(momentum=0.9)
    for _ in range(3):
        before = values.to_returns(last(x).squeeze(-1))
        returns = shift + scale * torch.randn(4, 6)
        values.update(returns, torch.ones(4, 6, dtype=torch.bool), last)
        after = values.to_returns(last(x).squeeze(-1))
        tolerance = 1e-5 * (abs(shift) + scale + before.abs().max().item() + 1)
        assert torch.allclose(before, after, atol=tolerance)
    round_trip = values.to_returns(values.to_normalised(returns))
    assert torch.allclose(round_trip, returns, atol=1e-5 * (abs(shift) + scale + 1))

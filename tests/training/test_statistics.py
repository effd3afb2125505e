"""The statistics of a comparison, on numbers that can be worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.training.statistics import (
    bootstrap,
    expanded_tail,
    interquartile_mean,
    mean,
    paired,
    paired_t_test,
    pareto_front,
    share_above_zero,
    student_p,
)


def array(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)


def test_interquartile_mean_of_eight_drops_two_at_each_end() -> None:
    # sorted: 0 1 | 2 3 4 5 | 6 1000 → (2 + 3 + 4 + 5) / 4
    assert interquartile_mean(array(1000, 0, 5, 4, 3, 2, 1, 6)) == pytest.approx(3.5)


def test_interquartile_mean_counts_border_values_in_part() -> None:
    # six values: 1.5 are dropped at each end, so the second and the fifth count half
    # (½·2 + 4 + 8 + ½·16) / 3 = 21 / 3
    assert interquartile_mean(array(1, 2, 4, 8, 16, 32)) == pytest.approx(7.0)


def test_interquartile_mean_of_one_and_two() -> None:
    assert interquartile_mean(array(7)) == 7.0
    assert interquartile_mean(array(2, 4)) == 3.0  # half of each
    rows = np.array([[1.0, 2.0, 3.0, 4.0], [10.0, 0.0, 0.0, 2.0]])
    assert interquartile_mean(rows).tolist() == [2.5, 1.0]  # over the last axis


def test_probability_of_improvement_counts_ties_half() -> None:
    # better, tied, worse, better → (1 + ½ + 0 + 1) / 4
    assert share_above_zero(array(3.0, 0.0, -1.0, 0.5)) == pytest.approx(0.625)


def test_pairs_are_matched_by_draw_and_only_where_both_are() -> None:
    assert paired({3: 10.0, 1: 5.0, 9: 0.0}, {1: 4.0, 3: 12.0, 7: 1.0}).tolist() == [1.0, -2.0]


def test_pairing_removes_what_the_draws_share() -> None:
    """Draws differ by tens of points, the controllers by one: unpaired intervals overlap, the paired one is a point."""
    hard_and_easy = array(10, 30, 50, 70, 90)
    better = bootstrap(hard_and_easy + 1.0)
    plain = bootstrap(hard_and_easy)
    assert better.low is not None
    assert plain.high is not None
    assert better.low < plain.high
    difference = bootstrap(hard_and_easy + 1.0 - hard_and_easy)
    assert (difference.value, difference.low, difference.high) == (1.0, 1.0, 1.0)


def test_the_interval_of_two_draws_is_their_range() -> None:
    # resamples of {0, 1} have means 0, ½, 1 with probabilities ¼, ½, ¼; the tail is far below ¼
    estimate = bootstrap([0.0, 1.0])
    assert (estimate.value, estimate.low, estimate.high, estimate.count) == (0.5, 0.0, 1.0, 2)


def test_the_expanded_tail_is_the_textbook_one() -> None:
    # 8 draws: t(0.975; 7) = 2.3646, times √(8/7) = 2.5279; Φ(−2.5279) = 0.00574
    assert expanded_tail(8) == pytest.approx(0.00574, rel=0.01)
    # 32 draws: t(0.975; 31) = 2.0395, times √(32/31) = 2.0721; Φ(−2.0721) = 0.01913
    assert expanded_tail(32) == pytest.approx(0.01913, rel=0.01)
    assert expanded_tail(1_000_000) == pytest.approx(0.025, rel=1e-3)


def test_a_large_sample_has_the_normal_interval() -> None:
    values = np.random.default_rng(0).normal(5.0, 2.0, size=400)
    estimate = bootstrap(values, seed=1)
    half = 1.966 * values.std(ddof=1) / 20  # t(0.975; 399) · s / √400
    assert estimate.low == pytest.approx(values.mean() - half, abs=0.02)
    assert estimate.high == pytest.approx(values.mean() + half, abs=0.02)


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(3)
    hits = 0
    for trial in range(200):
        estimate = bootstrap(rng.normal(size=8), seed=trial, resamples=1000)
        assert estimate.low is not None
        assert estimate.high is not None
        hits += estimate.low <= 0.0 <= estimate.high
    assert 0.91 <= hits / 200 <= 0.99  # the plain percentile interval has 0.88


def test_the_seed_decides_the_interval() -> None:
    values = array(1, 5, 2, 8, 3)
    assert bootstrap(values, seed=4) == bootstrap(values, seed=4)
    assert bootstrap(values, seed=4, resamples=50) != bootstrap(values, seed=5, resamples=50)


def test_too_few_draws_have_no_interval() -> None:
    assert bootstrap([3.0]).low is None
    with pytest.raises(ValueError, match="no draw was completed"):
        bootstrap([])


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=12))
def test_estimates_lie_in_their_intervals_and_those_in_the_data(values: list[float]) -> None:
    for statistic in (mean, interquartile_mean):
        estimate = bootstrap(values, statistic, resamples=200)
        assert estimate.low is not None
        assert estimate.high is not None
        assert min(values) - 1e-9 <= estimate.low <= estimate.high <= max(values) + 1e-9


def test_pareto_front() -> None:
    #          a    b    c    d    e
    costs = [1.0, 2.0, 2.0, 3.0, 4.0]
    values = [50.0, 60.0, 55.0, 58.0, 70.0]
    assert pareto_front(costs, values) == [0, 1, 4]  # c and d: b is as cheap and better
    assert pareto_front([2.0, 1.0], [5.0, 5.0]) == [1]  # as good and cheaper
    assert pareto_front([1.0, 1.0], [5.0, 5.0]) == [0, 1]  # equals do not beat each other
    assert pareto_front([], []) == []


@pytest.mark.parametrize(
    ("t", "freedom", "p"),
    [
        (1.0, 1, 0.5),  # Cauchy: 1 − 2·atan(1)/π
        (math.sqrt(2.0), 2, 1.0 - math.sqrt(0.5)),  # 1 − t/√(2 + t²)
        (0.0, 7, 1.0),
        (12.7062, 1, 0.05),  # the rest from printed tables
        (3.18245, 3, 0.05),
        (2.22814, 10, 0.05),
        (2.75639, 29, 0.01),
        (2.68456, 47, 0.01),
        (-2.68456, 47, 0.01),
        (math.inf, 5, 0.0),
    ],
)
def test_the_probability_of_students_t(t: float, freedom: int, p: float) -> None:
    assert student_p(t, freedom) == pytest.approx(p, rel=2e-4, abs=1e-15)


def test_a_paired_test_by_hand() -> None:
    # mean 2.5, standard deviation √(5/3), standard error √(5/3)/2 → t = 2.5 / 0.6455 = √15; with 3 degrees of freedom
    # p = 1 − 2/π·(θ + sin θ cos θ) at θ = atan(√5): 1 − 2/π·(1.15026 + √5/6)
    found = paired_t_test([1.0, 2.0, 3.0, 4.0])
    assert found is not None
    assert (found.mean, found.count) == (2.5, 4)
    assert found.t == pytest.approx(math.sqrt(15.0))
    assert found.p == pytest.approx(1.0 - 2.0 / math.pi * (math.atan(math.sqrt(5.0)) + math.sqrt(5.0) / 6.0))


def test_a_paired_test_at_its_limits() -> None:
    assert paired_t_test([3.0]) is None
    assert paired_t_test([]) is None
    same, nothing = paired_t_test([2.0, 2.0]), paired_t_test([0.0, 0.0])
    assert same is not None
    assert nothing is not None
    assert (same.t, same.p) == (math.inf, 0.0)
    assert (nothing.t, nothing.p) == (0.0, 1.0)

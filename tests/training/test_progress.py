"""Last fifth of a run against its first, paired on problems: by hand.

Covers: R066
"""

from __future__ import annotations

import pytest

from esper.training.progress import progress


def episodes(returns: dict[int, dict[int, float]]) -> list[tuple[int, int, float]]:
    """From update → draw → return."""
    return [(update, draw, value) for update, by_draw in returns.items() for draw, value in by_draw.items()]


def test_the_same_problems_are_compared() -> None:
    # Ten updates: a fifth is two. Problems 1 and 2 come in both fifths, and differ by 20 points between themselves.
    middle = {update: {7: 1000.0} for update in range(3, 9)}
    found = progress(episodes({1: {1: 10.0}, 2: {2: 30.0}, **middle, 9: {2: 33.0}, 10: {1: 12.0}}))
    assert found is not None
    assert (found.first, found.last, found.updates) == (20.0, 22.5, 2)
    assert found.test is not None
    # differences 2 and 3: mean 2.5, standard error 0.5 → t = 5, with one degree of freedom p = 1 − 2·atan(5)/π
    assert (found.test.count, found.test.mean, found.test.t) == (2, 2.5, pytest.approx(5.0))
    assert found.test.p == pytest.approx(0.1257, abs=1e-4)
    assert str(found) == (
        "Return in the last 2 updates: 22.5; in the first: 20.0. "
        "Paired on the 2 problems of both: +2.5 (t = 5.0, p = 0.13)."
    )


def test_a_problem_that_comes_twice_in_a_part_counts_once() -> None:
    first = {1: {1: 0.0, 2: 0.0}, 2: {1: 10.0, 3: 0.0}}
    last = {9: {1: 20.0, 2: 1.0}, 10: {1: 40.0, 4: 0.0}}
    found = progress(episodes({**first, **{update: {8: 0.0} for update in range(3, 9)}, **last}))
    assert found is not None
    assert found.test is not None
    assert (found.test.count, found.test.mean) == (2, 13.0)  # problem 1: 30 − 5, problem 2: 1 − 0; 3 and 4 have no pair


def test_without_common_problems_there_is_no_test() -> None:
    found = progress(episodes({1: {1: 1.0, 2: 2.0}, 2: {3: 4.0, 4: 5.0}}))
    assert found is not None
    assert (found.first, found.last, found.updates, found.test) == (1.5, 4.5, 1, None)
    assert "no paired test" in str(found)


def test_one_update_shows_no_progress() -> None:
    assert progress(episodes({1: {1: 1.0}})) is None
    assert progress([]) is None

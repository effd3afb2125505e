"""The model of how far a run scales, with numbers that can be worked out by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import scaling

ROOT = Path(__file__).resolve().parents[2]

# An episode takes an actor 1 s, the driver 0.01 s and the learner 0.01 s, and has a megabyte.
M = scaling.Measured(
    steps=10.0,
    step_seconds=0.1,
    driver_seconds=0.01,
    learner_seconds=0.001,
    episode_bytes=1e6,
    job_bytes=0.0,
    policy_bytes=125e6,
)


def test_an_update_is_the_slowest_part_of_playing_and_then_learning() -> None:
    found = scaling.predict(M, 4, 10)
    assert found.play == pytest.approx(3.0)  # ten jobs for four actors: three rounds of a second
    assert found.driver == pytest.approx(0.1)
    assert found.network == pytest.approx(10 * 1e6 / 125e6 + 1.0)  # and the policy to one node, in a second
    assert found.learner == pytest.approx(0.1)
    assert found.total == pytest.approx(3.1)
    assert found.limit == "playing"


def test_more_actors_move_the_limit() -> None:
    assert scaling.knee(M) == 50  # 1 s of playing against 0.02 s of driver and learner
    assert scaling.knee(M, learner=1e9) == 100
    many = scaling.predict(M, 1000, 1000)
    assert (many.play, many.driver) == pytest.approx((1.0, 10.0))
    assert many.limit == "network"  # 32 nodes of 32 cores fetch a policy of a second each
    assert many.network == pytest.approx(8.0 + 32.0)


def test_the_page_shows_what_the_model_gives() -> None:
    data = json.loads((ROOT / "docs/scaling.json").read_text())
    page = (ROOT / "docs/scaling.md").read_text()
    for line in scaling.model(data).splitlines():
        assert line in page, line

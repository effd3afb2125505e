"""Problems that other processes drew are the problems that this one would have drawn, bit for bit."""

from __future__ import annotations

import time
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from esper.tasks.family import Draw
from esper.tasks.joining import Groups, join_groups
from esper.tasks.problems import Problems
from esper.tasks.stacking import Plans, stacked_problems
from esper.training.drawing import DrawAhead
from esper.training.shared_memory import Shared, SharedMemory
from short_family import ShortFamily

FAMILY = ShortFamily("mixed", examples=40)
CPU = torch.device("cpu")


def assert_same(one: Groups, other: Groups) -> None:
    assert [places for places, _ in one] == [places for places, _ in other]
    for (_, a), (_, b) in zip(one, other, strict=True):
        assert a.facts == b.facts
        assert a.form == b.form
        for field in fields(Problems):
            x, y = getattr(a, field.name), getattr(b, field.name)
            if isinstance(x, Tensor):
                assert x.dtype == y.dtype
                assert torch.equal(x, y), field.name
        rows = torch.arange(len(a))
        assert isinstance(b.minibatches, Plans)
        assert torch.equal(a.minibatches(rows, 2), b.minibatches(rows, 2))
        assert torch.equal(a.host_uniforms(rows, 7), b.host_uniforms(rows, 7))
        assert torch.equal(a.seed_uniforms(rows, rows + 1, 7), b.seed_uniforms(rows, rows + 1, 7))


def test_parts_are_joined_to_what_the_whole_would_be() -> None:
    whole = stacked_problems(FAMILY, range(30), held_out=True)
    parts = [stacked_problems(FAMILY, part, held_out=True) for part in (range(11), range(11, 12), range(12, 30))]
    assert_same(whole, join_groups(parts))


def test_other_processes_draw_the_same_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.training.drawing.CHUNK", 7)
    ahead = DrawAhead(FAMILY, 2)
    try:
        for start in (0, 30):
            ahead.prepare(range(start, start + 30))
        for start in (0, 30, 60):  # the last was not asked for before
            draws = range(start, start + 30)
            assert_same(stacked_problems(FAMILY, draws, held_out=False), ahead.problems(draws, False, CPU))
    finally:
        ahead.close()


def test_trouble_in_drawing_reaches_who_waits() -> None:
    ahead = DrawAhead(ShortFamily("stories"), 1)  # type: ignore[arg-type]
    try:
        with pytest.raises(ValueError, match="cannot be stacked"):
            ahead.problems([0], False, CPU)
    finally:
        ahead.close()


class Faulty(ShortFamily):
    """A draw fails, and the one after it takes longer."""

    def draw(self, number: int, *, held_out: bool = False) -> Draw:
        if number == 0:
            raise OSError("a draw that fails")
        time.sleep(0.5 * (number == 1))
        return super().draw(number, held_out=held_out)


def test_after_trouble_no_answer_is_taken_for_that_of_other_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.training.drawing.CHUNK", 1)
    ahead = DrawAhead(Faulty("mixed/vector", examples=40), 2)
    try:
        with pytest.raises(OSError, match="a draw that fails"):
            ahead.problems([0, 1], False, CPU)
        with pytest.raises(RuntimeError, match="were ended") as ended:
            ahead.problems([10, 11], False, CPU)
        assert isinstance(ended.value.__cause__, OSError)
    finally:
        ahead.close()


def test_an_answer_outlives_the_next_one() -> None:
    memory = SharedMemory()
    answers = [memory.share({"x": torch.full((3, 2), float(i)), "y": torch.tensor(i)}).open() for i in range(3)]
    assert [float(answer["x"].sum()) for answer in answers] == [0.0, 6.0, 12.0]
    assert [int(answer["y"]) for answer in answers] == [0, 1, 2]


def test_where_memory_cannot_be_shared_an_answer_is_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    shared = SharedMemory().share([torch.arange(3)])
    assert isinstance(shared, Shared)
    assert shared.path == ""
    assert torch.equal(shared.open()[0], torch.arange(3))

"""Draws as stacked problems: the data and minibatches that the per-network engines see, or a refusal with its reason.

Covers: R143
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from side_by_side import EVERYTHING, Small

from esper.tasks.counted_init import DrawNumbers
from esper.tasks.data import Split, Splits
from esper.tasks.family import get_family
from esper.tasks.feed import TensorFeed
from esper.tasks.mixed import Mixed
from esper.tasks.stacking import stack_draws, stacked_problems, why_not_stacked
from esper.tasks.token_host import TokenHost
from esper.tasks.varied import Varied

DRAWS = range(24)


def test_data_and_labels_are_those_of_the_draws_and_padding_is_zero() -> None:
    family = Small(EVERYTHING)
    places = []
    for some, problems in stacked_problems(family, DRAWS, held_out=False):
        places += some
        for row, place in enumerate(some):
            splits = family.draw(place).task.splits
            for name in ("train", "val", "test"):
                x, y = getattr(splits, name).x, getattr(splits, name).y
                x = x.movedim(1, -1) if problems.form.layout.startswith("conv") else x
                kept = getattr(problems, f"{name}_x")[row]
                assert torch.equal(kept[tuple(slice(size) for size in x.shape)], x)
                assert int(kept.count_nonzero()) == int(x.count_nonzero())
                assert torch.equal(getattr(problems, f"{name}_y")[row, : len(y)], y)
            assert int(problems.examples[row]) == len(splits.train)
    assert sorted(places) == list(DRAWS)


@pytest.mark.parametrize("examples", [130, 40_000])
def test_minibatches_are_those_that_the_feed_draws(examples: int) -> None:
    """More than 32,767 examples need wider indices."""
    draw = Mixed().draw(3)
    x, y = torch.arange(examples).float().view(-1, 1), torch.arange(examples) % 4
    split = Split(x, y)
    task = replace(
        draw.task,
        splits=Splits(split, split, split, check=False),
        make_host=partial(TokenHost, 1, [2], 4, [True], [False], [1]),
        updates_per_epoch=3,
    )
    draw = replace(draw, task=task)
    ((_, problems),) = stack_draws([3], [draw])
    feed = TensorFeed(split, split, batch_size=task.batch_size, updates_per_epoch=3, seed=draw.seed)
    for epoch in range(4):
        expected = torch.stack([feed.next_batch()[0].flatten() for _ in range(3)])  # an input is its index
        found = problems.minibatches(torch.tensor([0]), epoch)[:, 0]
        assert torch.equal(found.float(), expected)


def test_what_cannot_be_stacked_is_refused_with_its_reason() -> None:
    text = Varied(sorts=["text"])
    assert "GPTHost" in why_not_stacked(text.draw(0))
    with pytest.raises(ValueError, match=r"draw 0 of varied cannot be stacked: its host is GPTHost.*another engine"):
        stacked_problems(text, [0], held_out=False)
    draw = get_family("mixed/image").draw(0)
    assert why_not_stacked(draw) == ""
    assert "cropped" in why_not_stacked(replace(draw, task=replace(draw.task, augment=True)))
    other = replace(draw, task=replace(draw.task, loss=lambda outputs, targets: outputs.mean()))
    assert "loss" in why_not_stacked(other)


def test_a_task_whose_seeds_or_classes_a_stack_would_change_is_refused() -> None:
    """The stacked networks would be others than those of the plain environment."""

    def reason(name: str, **changes: object) -> str:
        draw = get_family(name).draw(0)
        return why_not_stacked(replace(draw, task=replace(draw.task, **changes)))  # type: ignore[arg-type]

    assert "not all 3 stages" in reason("mixed/vector", slots=("stages.1", "stages.2"))
    assert "outputs for 1 labels" in reason("mixed/vector", labels=("one",))
    assert "'position'" in reason("mixed/token", visibility="position")
    assert "'both'" in reason("mixed/token", visibility="both")
    assert "'causal'" in reason("mixed/series", visibility="causal")
    assert reason("mixed/vector", visibility="position") == ""  # a vector has one position
    assert "counted" in reason("mixed/vector", numbers=DrawNumbers(1))
    assert "counted" in why_not_stacked(get_family("grammar+mixed").draw(0))

"""Splits, sampling by index, augmentation.

Covers: R137
"""

import dataclasses

import numpy as np
import pytest
import torch

from esper.engine.prepare import task_learner
from esper.tasks import Split, Splits, check_split, crop_and_flip, draw_crops, load_task
from esper.tasks.data import stratified_parts
from esper.tasks.feed import TensorFeed, chunks


def feed_of(split: Split, batch_size: int, seed: int) -> TensorFeed:
    return TensorFeed(split, split, batch_size=batch_size, seed=seed)


def numbered(count: int) -> Split:
    """Example i has input [i, 10·i] and target i."""
    i = torch.arange(count)
    return Split(torch.stack([i, 10 * i], 1).float(), i)


def test_a_batch_pairs_inputs_with_their_targets():
    x, y = feed_of(numbered(50), 20, seed=1).next_batch()
    assert x.shape == (20, 2)
    assert torch.equal(x, torch.stack([y, 10 * y], 1).float())
    assert 0 <= int(y.min()) <= int(y.max()) < 50


def test_sampling_depends_on_its_generator_alone():
    split = numbered(50)
    torch.manual_seed(0)
    first = [feed.next_batch()[1] for feed in [feed_of(split, 8, seed=3)] for _ in range(4)]
    state = torch.random.get_rng_state()
    torch.manual_seed(99)
    torch.rand(7)
    before = torch.random.get_rng_state()
    second = [feed.next_batch()[1] for feed in [feed_of(split, 8, seed=3)] for _ in range(4)]
    assert torch.equal(torch.random.get_rng_state(), before)  # and it leaves the global state alone
    assert not torch.equal(before, state)
    assert torch.equal(torch.stack(first), torch.stack(second))
    assert not torch.equal(first[0], first[1])


def test_a_stream_continues_from_a_saved_generator_state():
    feed, resumed = feed_of(numbered(50), 8, seed=3), feed_of(numbered(50), 8, seed=0)
    feed.next_batch()
    resumed.generator.set_state(feed.generator.get_state())
    assert torch.equal(resumed.next_batch()[1], feed.next_batch()[1])


@pytest.mark.parametrize("augment", [False, True])
def test_planned_batches_are_those_that_come_one_by_one(augment):
    images = Split(torch.rand(30, 3, 8, 8), torch.arange(30))
    ahead, by_one = (TensorFeed(images, images, batch_size=5, seed=2, augment=augment) for _ in range(2))
    for x, y in ahead.gather(ahead.plan(4)):
        expected_x, expected_y = by_one.next_batch()
        assert torch.equal(x, expected_x)
        assert torch.equal(y, expected_y)


def test_chunks_keep_the_order_and_have_nearly_one_length():
    split = numbered(50)
    parts = [y for _, y in chunks(split, 16)]
    assert [len(part) for part in parts] == [12, 13, 12, 13]
    assert torch.equal(torch.cat(parts), split.y)


def test_every_example_is_drawn_equally_often():
    feed = feed_of(numbered(10), 10, seed=0)
    y = torch.stack([y for _, y in feed.gather(feed.plan(1_000))])
    counts = torch.bincount(y.flatten(), minlength=10)
    assert int((counts - 1_000).abs().max()) < 150  # five standard deviations of a binomial(10⁴, 0.1)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.zeros(0, 2), torch.zeros(0), "the val data are empty"),
        (torch.zeros(3, 2), torch.zeros(4), "3 inputs but 4 targets"),
        (torch.tensor([[0.0, 1.0], [float("nan"), 0.0], [0.0, float("inf")]]), torch.zeros(3), r"2 of 3 .*example 1\)"),
        (torch.zeros(2, 2), torch.tensor([0.0, float("nan")]), "the val targets contain NaN"),
    ],
)
def test_bad_data_are_refused_in_one_line(x, y, message):
    with pytest.raises(ValueError, match=message) as error:
        check_split(Split(x, y), "val")
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=message):
        Splits(numbered(3), Split(x, y), numbered(3))


def test_splits_of_different_shapes_are_refused():
    with pytest.raises(ValueError, match=r"test inputs have shape \(3,\) per example but the train inputs \(2,\)"):
        Splits(numbered(3), numbered(3), Split(torch.zeros(2, 3), torch.zeros(2)))


def test_to_moves_all_tensors():
    splits = Splits(numbered(3), numbered(4), numbered(5))
    moved = splits.to(torch.device("cpu"))
    assert [len(moved.train), len(moved.val), len(moved.test)] == [3, 4, 5]
    assert Split(torch.zeros(2), torch.zeros(2)).to("meta").x.device.type == "meta"


def test_moving_looks_at_no_number_again_and_what_is_there_already_stays_the_same_object():
    splits = Splits(numbered(9), numbered(4), numbered(4))
    assert splits.to("cpu") is splits
    away = splits.to("meta")  # where no number could be checked
    assert [len(part) for part in (away.train, away.val, away.test)] == [9, 4, 4]
    assert away.train.x is splits.to("meta").train.x  # one copy for all who ask
    task = load_task("digits")
    assert task.to("cpu") is task
    with pytest.raises(ValueError, match="NaN or infinity"):
        dataclasses.replace(splits, val=Split(torch.full((4, 2), torch.nan), torch.arange(4)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_cpu_generator_gives_the_same_batches_on_a_gpu():
    split = numbered(50)
    here = feed_of(split, 8, seed=3).next_batch()[0]
    there = feed_of(split.to("cuda"), 8, seed=3).next_batch()[0]
    assert there.device.type == "cuda"
    assert torch.equal(here, there.cpu())


def test_stratified_parts_are_disjoint_and_balanced():
    labels = np.repeat(np.arange(4), [40, 20, 20, 21])
    parts = stratified_parts(labels, (0.5, 0.25, 0.25), np.random.default_rng(0))
    assert sorted(np.concatenate(parts)) == list(range(101))
    # 21 members are cut at round(10.5) = 10 and round(15.75) = 16
    assert [list(np.bincount(labels[part])) for part in parts] == [[20, 10, 10, 10], [10, 5, 5, 6], [10, 5, 5, 5]]
    with pytest.raises(ValueError, match="more than 1"):
        stratified_parts(labels, (0.9, 0.2), np.random.default_rng(0))


def test_augmentation_shifts_and_mirrors_and_pads_with_zeros():
    image = torch.arange(1.0, 17.0).view(1, 1, 4, 4)
    images = image.expand(3_000, 2, 4, 4)
    augmented = crop_and_flip(images, draw_crops(torch.Generator().manual_seed(0), 3_000))
    padded = torch.nn.functional.pad(image, (4, 4, 4, 4))[0, 0]
    possible = {(0.0,) * 16: (0, 0, False)}
    for row in range(1, 8):
        for column in range(1, 8):
            crop = padded[row : row + 4, column : column + 4]
            possible[tuple(crop.flatten().tolist())] = (row, column, False)
            possible[tuple(crop.flip(1).flatten().tolist())] = (row, column, True)
    assert len(possible) == 1 + 2 * 49
    seen = {possible[tuple(a[0].flatten().tolist())] for a in augmented}  # a KeyError would be an impossible crop
    assert len(seen) == 1 + 2 * 49
    assert torch.equal(augmented[:, 0], augmented[:, 1])  # one shift for all channels of an image


def test_augmentation_is_decided_by_its_generator():
    images = torch.rand(16, 3, 8, 8)
    state = torch.random.get_rng_state()
    first, second, other = (crop_and_flip(images, draw_crops(torch.Generator().manual_seed(s), 16)) for s in (4, 4, 5))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), state)
    unmoved = torch.tensor([[4, 4, 0], [4, 4, 1]]).repeat(8, 1)
    assert torch.equal(crop_and_flip(images, unmoved)[::2], images[::2])
    assert torch.equal(crop_and_flip(images, unmoved)[1::2], images[1::2].flip(3))


def test_the_batch_size_is_a_setting():
    task = dataclasses.replace(load_task("mnist1d"), batch_size=7)
    x, y = task_learner(task, seed=0, epochs=1).feed.next_batch()
    assert x.shape == (7, 1, 40)
    assert y.shape == (7,)

"""Task families: numbered problems that are the same every time, disjoint from the held-out ones, and as promised.

Covers: R149 (hosts for seeds to grow in)
"""

import time
from functools import partial

import numpy as np
import pytest
import torch
from planned import score

from esper.growth.attach import attach
from esper.growth.randomness import preserved_rng
from esper.growth.standalone import model_source
from esper.tasks import needs
from esper.tasks.family import NATURAL, Draw, family_names, get_family
from esper.tasks.mixed import KINDS, SLOTS, TokenHost

ONE_ROUND = range(len(KINDS))


def growing(draw: Draw):
    with preserved_rng(torch.device("cpu")):
        host = draw.task.make_host()
    return attach(host, draw.task.slots, draw.task.splits.train.x[:2], budget=draw.budget, max_seeds=draw.max_seeds)


def rows(x: torch.Tensor) -> set[bytes]:
    return {row.tobytes() for row in x.numpy()}


def same(a: Draw, b: Draw) -> bool:
    parts = [(getattr(a.task.splits, part), getattr(b.task.splits, part)) for part in ("train", "val", "test")]
    equal = all(x.x.shape == y.x.shape and torch.equal(x.x, y.x) and torch.equal(x.y, y.y) for x, y in parts)
    settings = [(d.seed, d.horizon, d.budget, d.max_seeds, d.facts) for d in (a, b)]
    return equal and settings[0] == settings[1]


# -- every family ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["mixed", "disguised", "varied", "grammar", "grammar-unseen", "natural", "mnist1d", "digits", "stories"]
)
def test_a_number_is_always_the_same_problem_and_no_global_random_number_is_drawn(name):
    state, numpy_state = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    family = get_family(name)
    first, other = family.draw(3), family.draw(4)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)
    torch.rand(3)
    assert same(first, get_family(name).draw(3))
    assert first.seed != other.seed
    assert family.name == name
    with pytest.raises(ValueError, match="numbered from 0"):
        family.draw(-1)


@pytest.mark.parametrize("name", ["mixed", "disguised", "varied", "grammar", "grammar-unseen", "natural", "mnist1d"])
def test_held_out_draws_never_coincide_with_training_draws(name):
    family = get_family(name)
    trained, held_out = ([family.draw(i, held_out=out) for i in range(6)] for out in (False, True))
    assert not {draw.seed for draw in trained} & {draw.seed for draw in held_out}
    assert all(draw.seed % 2 == 0 for draw in trained)  # so that no later number can coincide, either
    assert all(draw.seed % 2 == 1 for draw in held_out)
    if name not in ("natural", "mnist1d"):  # the data of natural tasks are few, and are only split anew
        seen = set.union(*(rows(draw.task.splits.train.x) for draw in trained))
        assert not seen & set.union(*(rows(draw.task.splits.test.x) for draw in held_out))


def test_an_unknown_family_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="did you mean 'mixed'"):
        get_family("mixd")
    with pytest.raises(ValueError, match="did you mean 'disguised'"):
        get_family("disguise")
    assert {"mixed", "disguised", "varied", "natural", "mnist1d"} <= set(family_names())


def test_every_family_that_is_named_is_one_of_its_name():
    assert all(get_family(name).name == name for name in family_names())


@pytest.mark.parametrize("name", ["mixed", "disguised"])
def test_a_part_of_a_family_has_the_kinds_that_start_so(name):
    family = get_family(f"{name}/vector")
    drawn = [family.draw(number) for number in range(family.round)]
    assert sorted(draw.facts["kind"] for draw in drawn) == sorted(kind for kind in KINDS if kind.startswith("vector"))
    assert {draw.task.name for draw in drawn} == {name} == {family.name}
    with pytest.raises(ValueError, match=f"try {name}/series, {name}/image, {name}/vector, {name}/token"):
        get_family(f"{name}/letters")


@pytest.mark.parametrize("name", ["mixed", "disguised", "varied/vector", "natural"])
@pytest.mark.parametrize("held_out", [False, True])
def test_no_problem_is_larger_than_its_family_says(name, held_out):
    """Rollout buffers have room for that, and no more."""
    family = get_family(name)
    drawn = [family.draw(number, held_out=held_out) for number in range(max(20, 2 * family.round))]
    assert all(1 <= draw.horizon <= family.horizon for draw in drawn)
    assert max(len(draw.task.slots) for draw in drawn) == family.slots


@pytest.mark.parametrize("name", ["mixed", "disguised", "varied"])
@pytest.mark.parametrize("held_out", [False, True])
def test_facts_name_the_layout_that_the_slots_have(name, held_out):
    family = get_family(name)
    for number in range(family.round):
        draw = family.draw(number, held_out=held_out)
        assert {slot.shape.layout for slot in growing(draw).slots} == {draw.facts["layout"]}, draw.facts


def test_any_task_is_a_family_with_its_own_options_and_limits():
    family = get_family("mnist1d", widths=[4, 4], kernels=[3, 3], horizon=7, budget=900, max_seeds=1)
    draw = family.draw(0)
    assert len(growing(draw).slots) == 2
    assert (draw.horizon, draw.budget, draw.max_seeds) == (7, 900, 1)
    data_seeds = {get_family("mnist1d").draw(i, held_out=out).facts["data_seed"] for i in range(8) for out in (0, 1)}
    assert len(data_seeds) == 8  # four for training, four others held out


def test_natural_takes_its_hosts_in_turn():
    family = get_family("natural")
    kinds = [family.draw(i).facts["kind"] for i in range(2 * len(NATURAL))]
    assert len(set(kinds)) == len(NATURAL)
    assert kinds[: len(NATURAL)] == kinds[len(NATURAL) :]
    assert family.draw(0).seed != family.draw(len(NATURAL)).seed


def test_natural_of_one_task_has_its_hosts_only():
    family = get_family("natural/mnist1d")
    assert {family.draw(i).task.name for i in range(family.round)} == {"mnist1d"}
    assert family.round == sum(name == "mnist1d" for name, _ in NATURAL)
    with pytest.raises(ValueError, match="try natural/mnist1d, natural/digits"):
        get_family("natural/letters")


def test_families_take_turns_and_their_draws_stay_what_they_were():
    both, mixed, natural = (get_family(name) for name in ("mixed+natural/mnist1d", "mixed", "natural/mnist1d"))
    assert both.round == mixed.round + natural.round
    assert (both.slots, both.horizon) == (3, 25)
    for held_out in (False, True):
        first = [both.draw(i, held_out=held_out) for i in (0, mixed.round - 1, mixed.round, both.round)]
        alone = [mixed.draw(0, held_out=held_out), mixed.draw(mixed.round - 1, held_out=held_out)]
        alone += [natural.draw(0, held_out=held_out), mixed.draw(mixed.round, held_out=held_out)]
        assert [draw.seed for draw in first] == [draw.seed for draw in alone]
        assert [draw.facts["kind"] for draw in first] == [draw.facts["kind"] for draw in alone]
    with pytest.raises(ValueError, match="unknown task family 'mixd'"):
        get_family("mixd+natural")
    three = get_family("mixed/vector+disguised/vector+varied")
    assert (three.slots, three.round) == (8, 15)
    assert [three.draw(number).task.name for number in (0, 5, 10)] == ["mixed", "disguised", "varied"]


# -- mixed -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held_out", [False, True])
def test_every_round_has_every_kind_once_in_an_order_of_its_own(held_out):
    family = get_family("mixed")
    rounds = [[family.draw(i + r * len(KINDS), held_out=held_out).facts["kind"] for i in ONE_ROUND] for r in (0, 1)]
    assert sorted(rounds[0]) == sorted(rounds[1]) == sorted(KINDS)
    assert rounds[0] != rounds[1]
    only = get_family("mixed", kinds=["vector nothing"])
    assert {only.draw(i).facts["kind"] for i in range(3)} == {"vector nothing"}
    with pytest.raises(ValueError, match="unknown kind"):
        get_family("mixed", kinds=["vector everything"])


@pytest.mark.parametrize("held_out", [False, True])
def test_sizes_and_limits_are_within_their_bounds(held_out):
    family = get_family("mixed")
    layouts, needed, most = set(), set(), set()
    for number in range(2 * len(KINDS)):
        draw = family.draw(number, held_out=held_out)
        model, splits = growing(draw), draw.task.splits
        assert 250 <= model.host_parameters == draw.facts["host_parameters"] <= 1500
        assert model.host_parameters < draw.budget <= 5 * model.host_parameters
        assert 18 <= draw.horizon <= 25
        assert 1 <= draw.max_seeds <= SLOTS == len(model.slots)
        assert 1200 <= len(splits.train) <= 2000
        assert (len(splits.val), len(splits.test)) == (600, 1000)
        layouts.add(model.slots[0].shape.layout)
        needed.add(draw.facts["need"])
        most.add(draw.max_seeds)
    assert layouts == {"conv1d", "conv2d", "dense", "sequence"}
    assert needed == {"motif", "distant", "channel", "scale", "composition", "nothing"}
    assert most == {1, 2, 3}


def test_the_budget_has_room_for_the_answer_and_not_for_everything():
    family = get_family("mixed")
    for number in ONE_ROUND:
        draw = family.draw(number)
        model = growing(draw)
        answer = draw.facts["answer"]
        for part in answer.split("+") if answer != "none" else ():
            blueprint, slot = part.split("@")
            assert not model.why_not_grow(model.slots[int(slot)], blueprint), (draw.facts, part)
            model.germinate(model.slots[int(slot)], blueprint, "linear", epoch=0)
        everything = sum(max(model.cost(slot, b.name) for b in model.candidates(slot)) for slot in model.slots)
        assert model.host_parameters + everything > draw.budget


@pytest.mark.parametrize("name", ["mixed", "disguised"])
def test_classes_are_balanced_and_inputs_are_of_a_reasonable_size(name):
    family = get_family(name)
    for number in ONE_ROUND:
        splits = family.draw(number).task.splits
        for split in (splits.train, splits.val, splits.test):
            counts = torch.bincount(split.y, minlength=4)
            assert counts.max() - counts.min() <= 1
        assert 0.03 < splits.train.x.abs().median() < 5.0


@pytest.mark.parametrize(("name", "most"), [("mixed", 0.1), ("disguised", 0.15)])
def test_a_draw_is_made_quickly(name, most):
    """Seconds; on a quiet core it takes a third of them."""
    family = get_family(name)
    family.draw(0)
    started = time.process_time()
    for number in ONE_ROUND:
        family.draw(number)
    assert (time.process_time() - started) / len(KINDS) < most


def test_the_token_host_travels_with_an_exported_model():
    host = TokenHost(6, [4, 5, 4], 3, [True, False, True], [False, True, False], [1, 3, 1])
    assert host(torch.randn(2, 12, 6)).shape == (2, 3)
    scope = {"__file__": __file__, "__name__": "model"}
    exec(compile(model_source(host, [], {}), "model.py", "exec"), scope)
    assert {k: v.shape for k, v in scope["build"]().state_dict().items()} == {
        k: v.shape for k, v in host.state_dict().items()
    }
    with pytest.raises(ValueError, match="one of bends, attends and pools per width"):
        TokenHost(6, [4, 5], 3, [True], [False, False], [1, 1])


# -- the needs ---------------------------------------------------------------------------------------------------------

BALANCED = np.arange(2000) % 4


def linear_accuracy(make) -> float:
    """Percent correct of least squares on all inputs and on each example's mean and spread, on new examples."""
    data = []
    for seed in (0, 1):
        x = make(BALANCED, np.random.default_rng(seed))
        x = x.reshape(len(x), *x.shape[1:-2], -1) if x.ndim == 4 else x  # of an image, all its positions
        statistics = np.concatenate([x.mean(-1), x.std(-1)], -1)
        data.append(np.concatenate([x.reshape(len(x), -1), statistics, np.ones((len(x), 1))], 1))
    weights = np.linalg.lstsq(data[0], np.eye(4)[BALANCED], rcond=None)[0]
    return 100.0 * float((data[1] @ weights).argmax(1).__eq__(BALANCED).mean())


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (partial(needs.motif, length=48, scale=1, noise=0.5), 33),
        (partial(needs.motif, length=60, scale=5, noise=0.75), 60),
        (partial(needs.distant_relation, length=48, distractors=5, noise=0.3), 45),
        (partial(needs.motif_order, length=50, distance=10, noise=0.3), 40),
        (partial(needs.folded_motif, size=12, scale=1, noise=0.4), 40),
    ],
)
def test_what_single_positions_say_does_not_tell_the_class(make, most):
    assert linear_accuracy(make) < most


def test_motifs_have_the_same_values_in_another_order():
    x = needs.motif(np.arange(4), np.random.default_rng(0), length=20, scale=1, noise=0.0)[:, 0]
    values = np.sort(x, axis=1)
    assert np.allclose(values, values[0])
    shapes = [row[np.flatnonzero(row)[0] : np.flatnonzero(row)[0] + 4] for row in x]
    assert np.allclose(shapes, needs.MOTIFS)


def test_image_motifs_have_the_same_values_two_by_two():
    x = needs.folded_motif(np.arange(4), np.random.default_rng(0), size=12, scale=1, noise=0.0)
    assert not x[:, 1].any()
    for image, motif in zip(x[:, 0], needs.MOTIFS, strict=True):
        rows, columns = image.nonzero()
        square = image[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        assert np.allclose(square, motif.reshape(2, 2))
    coarse = needs.folded_motif(np.arange(4), np.random.default_rng(0), size=12, scale=3, noise=0.0)
    assert ((coarse[:, 0] != 0).sum((1, 2)) == 36).all()


def test_the_distant_marks_agree_or_not_whatever_lies_between():
    labels = np.arange(400) % 4
    x = needs.distant_relation(labels, np.random.default_rng(0), length=48, distractors=5, noise=0.0)
    own = x[np.arange(400), labels // 2]  # the channel that the first bit names
    agree = np.sign(own[:, :8].sum(1)) == np.sign(own[:, -8:].sum(1))
    assert np.array_equal(agree, labels % 2 == 0)
    assert (np.abs(x[:, :, 12:36]).sum((1, 2)) > 0).all()


def test_distributions_have_the_same_mean_and_spread_up_to_gain_and_offset():
    quiet = partial(needs.distribution, length=4000, gain_spread=0.0, offset_spread=0.0, noise=0.0)
    x = quiet(np.arange(4), np.random.default_rng(0))
    assert np.abs(x.mean((1, 2))).max() < 0.06
    assert np.abs(x.std((1, 2)) - 1).max() < 0.06


def test_board_points_have_the_colour_of_their_label():
    labels = np.arange(1000) % 4
    points = needs.board(labels, np.random.default_rng(0), basis=np.eye(2), cells=4, noise=0.0)
    cell = np.floor((points + 1) / 2 * 4).astype(int)
    assert np.array_equal((cell[:, 0] + 2 * cell[:, 1]) % 4, labels)


@pytest.mark.parametrize(
    ("kind", "answer", "wrong"),
    [
        ("series motif @0", "depthwise@0", ("", "depthwise@1", "pointwise@0")),
        pytest.param("series distant @0", "attention@0", ("", "depthwise@0", "norm@0"), marks=pytest.mark.slow),
        pytest.param("image motif @0", "depthwise@0", ("", "depthwise@1", "pointwise@0"), marks=pytest.mark.slow),
        pytest.param("token distant @0", "attention@0", ("", "norm@0", "mlp_small@0"), marks=pytest.mark.slow),
    ],
)
def test_one_computation_at_one_place_is_what_is_missing(kind, answer, wrong):
    """That the draws themselves stay as they are, tests/tasks/test_draw_digests.py shows for every kind."""
    draw = get_family("mixed", kinds=[kind]).draw(0)
    assert draw.facts["answer"] == answer
    right = score(draw, answer)
    assert all(right > score(draw, plan) + 15 for plan in wrong)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "nothing" not in kind])
def test_the_answer_pays_in_every_kind(kind):
    draw = get_family("mixed", kinds=[kind]).draw(1)
    assert score(draw, str(draw.facts["answer"])) > score(draw, "") + 2

"""Questions about several seeds: by hand on a product, against brute force on real hosts, and the Shapley axioms.

Covers: R138, and the counterfactuals that DESIGN 3 names
"""

from __future__ import annotations

import math
from itertools import permutations

import pytest
import torch
from torch import Tensor, nn

from esper.engine.counterfactual import all_off, orders_of, seed_values, shapley_weights
from esper.engine.measure import Pending, SetScore, evaluate, gather
from esper.growth.attach import attach
from esper.growth.model import GrowingModel
from esper.growth.slot import Slot, SlotMode
from esper.lifecycle import Contrast, Stage
from esper.tasks.registry import cross_entropy, percent_correct
from small_worlds import EAGER, PATIENT, WORLDS, plant


def value_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """The network's own output is its score."""
    return outputs.detach().squeeze(1)


def minus_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return -outputs.mean()


def answer(pending: Pending):  # type: ignore[no-untyped-def, type-arg]
    return gather([pending])[0]


def shapley(*args, **kwargs) -> Pending[dict[int, Contrast]]:  # type: ignore[no-untyped-def]
    """The Shapley values of `seed_values` alone."""
    pending = seed_values(*args, **kwargs)
    return Pending(pending.numbers, lambda n: {i: value.shapley for i, value in pending.read(n).items()})


# -- by hand -----------------------------------------------------------------------------------------------------------


class ProductHost(nn.Module):
    """The product of parallel layers, each of which passes x on."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(count))
        for part in self.parts:
            nn.init.ones_(part.weight)

    def forward(self, x: Tensor) -> Tensor:
        product = torch.ones_like(x)
        for part in self.parts:
            product = product * part(x)
        return product


def product(*gains: float, stage: Stage = Stage.HOLDING) -> GrowingModel:
    """A seed in each slot that multiplies it by its gain; 0 leaves the slot empty."""
    model = attach(ProductHost(len(gains)), ["parts.*"], torch.ones(2, 1), rules=EAGER)
    for slot, gain in zip(model.slots, gains, strict=True):
        if gain:
            plant(model, slot, "lora", stage)
            assert slot.seed is not None
            with torch.no_grad():  # h + up(down(h)), both 1 by 1
                slot.seed.body.down.weight.fill_(1.0)
                slot.seed.body.up.weight.fill_(gain - 1.0)
    return model


def examples(*values: float) -> list[tuple[Tensor, Tensor]]:
    return [(torch.tensor(values)[:, None], torch.zeros(len(values)))]


def test_two_seeds_by_hand() -> None:
    # x = 1; gains 2 and 3. v(none) = 1, v(a) = 2, v(b) = 3, v(ab) = 6.
    model, data = product(2.0, 3.0), examples(1.0)
    everything = answer(all_off(model, data, minus_mean, value_of))
    assert everything.accuracy == pytest.approx(6 - 1)
    assert everything.loss == pytest.approx(5)  # the loss is minus the value, and a contrast's loss is what is saved
    shares = answer(shapley(model, data, minus_mean, value_of))
    assert shares[0].accuracy == pytest.approx(((2 - 1) + (6 - 3)) / 2)
    assert shares[1].accuracy == pytest.approx(((3 - 1) + (6 - 2)) / 2)
    assert shares[1].loss == pytest.approx(3)


def test_errors_are_paired_per_example() -> None:
    # x = 1 and 2: everything scales with x squared. Shapley values are 2 and 8 for the first seed (mean 5, error
    # 4.243 / sqrt(2) = 3), 3 and 12 for the second; all-off is 5 and 20.
    model, data = product(2.0, 3.0), examples(1.0, 2.0)
    shares = answer(shapley(model, data, minus_mean, value_of))
    assert (shares[0].accuracy, shares[0].error) == (pytest.approx(5.0), pytest.approx(3.0))
    assert (shares[1].accuracy, shares[1].error) == (pytest.approx(7.5), pytest.approx(4.5))
    everything = answer(all_off(model, data, minus_mean, value_of))
    assert (everything.accuracy, everything.error) == (pytest.approx(12.5), pytest.approx(7.5))


def test_the_shapley_values_of_some_seeds_leave_the_others_as_they_are() -> None:
    model = product(2.0, 3.0, 5.0)
    shares = answer(shapley(model, examples(1.0), minus_mean, value_of, model.slots[:2]))
    assert {index: share.accuracy for index, share in shares.items()} == {0: pytest.approx(10), 1: pytest.approx(15)}


def test_weights_by_hand_for_three_players() -> None:
    # Coalitions of the two others count 1/3 (none), 1/6 and 1/6 (one), 1/3 (both).
    model = product(2.0, 3.0, 5.0)
    a, b, c = model.slots
    assert shapley_weights(orders_of([a, b, c]), a) == {
        frozenset({b, c}): pytest.approx(1 / 3),
        frozenset({a, b, c}): pytest.approx(-1 / 3),
        frozenset({c}): pytest.approx(1 / 6),
        frozenset({a, c}): pytest.approx(-1 / 6),
        frozenset({b}): pytest.approx(1 / 6),
        frozenset({a, b}): pytest.approx(-1 / 6),
        frozenset(): pytest.approx(1 / 3),
        frozenset({a}): pytest.approx(-1 / 3),
    }


# -- axioms ------------------------------------------------------------------------------------------------------------


def test_symmetry_equal_seeds_get_equal_shares() -> None:
    shares = answer(shapley(product(2.0, 5.0, 2.0), examples(1.0, 2.0, 0.5), minus_mean, value_of))
    assert shares[0].accuracy == pytest.approx(shares[2].accuracy, rel=1e-12)
    assert shares[0].error == pytest.approx(shares[2].error, rel=1e-12)
    assert shares[0].accuracy != shares[1].accuracy


def test_dummy_a_seed_that_does_nothing_gets_nothing() -> None:
    shares = answer(shapley(product(2.0, 1.0, 3.0), examples(1.0, 2.0), minus_mean, value_of))
    nothing = pytest.approx(0.0, abs=1e-12)
    assert (shares[1].accuracy, shares[1].loss, shares[1].error) == (nothing, nothing, nothing)


def brute_force(model: GrowingModel, x: Tensor, y: Tensor, off: frozenset[Slot]) -> tuple[float, float]:
    """Accuracy and loss of the whole host, from the input on, with some seeds left out."""
    model.eval()
    for slot in off:
        slot.mode = SlotMode.OFF
    with torch.no_grad():
        outputs = model.host(x)
    for slot in off:
        slot.mode = SlotMode.LIVE
    return percent_correct(outputs, y).double().mean().item(), cross_entropy(outputs, y).item()


@pytest.mark.parametrize("name", ["mlp", "conv1d", "conv2d", "gpt", "in-place", "nested", "tuple", "tangled"])
def test_shapley_values_against_all_orders_of_arrival(name: str) -> None:
    world = WORLDS[name]
    model = world.grown(rules=EAGER)
    stages = [Stage.HOLDING, Stage.FOSSILIZED, Stage.BLENDING, Stage.HOLDING]
    for slot, stage in zip(model.slots, stages, strict=False):
        plant(model, slot, model.candidates(slot)[-1].name, stage)
    x, y = (split := world.examples(40, 3)).x, split.y
    shares = answer(shapley(model, [(x, y)], cross_entropy, percent_correct))
    everything = answer(all_off(model, [(x, y)], cross_entropy, percent_correct))

    players = model.joined
    gains = {slot: [0.0, 0.0] for slot in players}
    orders = list(permutations(players))
    for order in orders:
        off = frozenset(players)
        for slot in order:
            accuracy, loss = brute_force(model, x, y, off)
            off -= {slot}
            with_accuracy, with_loss = brute_force(model, x, y, off)
            gains[slot][0] += (with_accuracy - accuracy) / len(orders)
            gains[slot][1] += (loss - with_loss) / len(orders)
    assert len(shares) == len(players) > 1
    for slot in players:
        assert shares[slot.index].accuracy == pytest.approx(gains[slot][0], abs=1e-6)
        assert shares[slot.index].loss == pytest.approx(gains[slot][1], abs=1e-6)

    # Efficiency: the shares sum to everything on minus everything off.
    assert sum(share.accuracy for share in shares.values()) == pytest.approx(everything.accuracy, abs=1e-9)
    assert sum(share.loss for share in shares.values()) == pytest.approx(everything.loss, abs=1e-9)
    on, off_ = brute_force(model, x, y, frozenset()), brute_force(model, x, y, frozenset(players))
    assert everything.accuracy == pytest.approx(on[0] - off_[0], abs=1e-6)
    assert everything.loss == pytest.approx(off_[1] - on[1], abs=1e-6)


# -- cost, and what is refused -----------------------------------------------------------------------------------------


def grown_mlp() -> tuple[GrowingModel, Tensor, Tensor]:
    world = WORLDS["mlp"]
    model = world.grown(rules=EAGER)
    for slot in model.slots:
        plant(model, slot, "mlp", Stage.HOLDING)
    split = world.examples(40, 3)
    return model, split.x, split.y


def test_alone_a_seeds_share_is_its_leave_one_out_contribution() -> None:
    model, x, y = grown_mlp()
    slot = model.slots[1]
    share = answer(shapley(model, [(x, y)], cross_entropy, percent_correct, [slot]))[1]
    contribution = answer(evaluate(model, [(x, y)], cross_entropy, percent_correct, contrasts=[slot])).contributions[1]
    assert share.accuracy == pytest.approx(contribution.accuracy)
    assert share.loss == pytest.approx(contribution.loss)
    assert share.error == pytest.approx(contribution.error)


def test_chunks_bound_the_memory_and_change_nothing() -> None:
    model, x, y = grown_mlp()
    whole = answer(shapley(model, [(x, y)], cross_entropy, percent_correct))
    sizes = []

    def chunked():  # type: ignore[no-untyped-def]
        for start in range(0, 40, 7):
            sizes.append(len(y[start : start + 7]))
            yield x[start : start + 7], y[start : start + 7]

    parts = answer(shapley(model, chunked(), cross_entropy, percent_correct))
    assert sizes == [7, 7, 7, 7, 7, 5]
    for index, share in whole.items():
        assert parts[index].accuracy == pytest.approx(share.accuracy)
        assert parts[index].loss == pytest.approx(share.loss, abs=1e-6)
        assert parts[index].error == pytest.approx(share.error)


def test_networks_are_measured_once_and_run_from_the_first_affected_slot() -> None:
    calls = []

    class Counted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(self)
            return super().forward(x)

    host = nn.Sequential(*(Counted(4, 4) for _ in range(3)))
    model = attach(host, ["0", "1", "2"], torch.ones(2, 4), rules=EAGER)
    for slot in model.slots:
        plant(model, slot, "lora", Stage.HOLDING)
    calls.clear()
    answer(shapley(model, [(torch.randn(5, 4), torch.zeros(5, dtype=torch.long))], cross_entropy, percent_correct))
    # Eight networks. Layer 0 runs in the first pass only. Layer 1 again when slot 0 is off (4 of them), layer 2 again
    # when slot 0 or slot 1 is (6 of them).
    assert [calls.count(layer) for layer in host] == [1, 1 + 4, 1 + 6]


def test_asking_leaves_no_trace() -> None:
    world = WORLDS["gpt"]
    model = world.grown(rules=EAGER)
    for slot in model.slots:
        plant(model, slot, "mlp", Stage.HOLDING)
    model.train()
    split = world.examples(12)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    numbers = torch.get_rng_state()

    def shuffled():  # type: ignore[no-untyped-def]
        order = torch.randperm(12)
        yield split.x[order], split.y[order]

    answer(shapley(model, shuffled(), cross_entropy, percent_correct))
    assert model.training
    assert torch.equal(torch.get_rng_state(), numbers)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_of_many_seeds_some_orders_are_sampled_and_the_values_still_sum_to_the_whole() -> None:
    gains = (1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7)
    model = product(*gains)
    shares = answer(shapley(model, examples(1.0), minus_mean, value_of))
    assert sum(share.accuracy for share in shares.values()) == pytest.approx(math.prod(gains) - 1, rel=1e-5)
    assert [share.accuracy for share in shares.values()] == sorted(share.accuracy for share in shares.values())
    orders = orders_of(model.slots)
    assert len(orders) == 8
    assert all(order[::-1] in orders for order in orders)  # the first of one is the last of another
    assert len(orders_of(model.slots[:6])) == math.factorial(6)


def test_a_seed_has_its_leave_one_out_contribution_beside_its_share() -> None:
    # Gains 2 and 3, x = 1: without the first the value falls from 6 to 3, without the second to 2.
    values = answer(seed_values(product(2.0, 3.0), examples(1.0), minus_mean, value_of))
    assert [value.contribution.accuracy for value in values.values()] == [pytest.approx(3), pytest.approx(4)]
    assert [value.shapley.accuracy for value in values.values()] == [pytest.approx(2), pytest.approx(3)]


class Largest(SetScore):
    """The largest output of the whole set, which is no mean over examples."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []
        self.blocks: list[Tensor] = []

    def start(self, blocks: int) -> SetScore:
        return Largest()

    def update(self, outputs: Tensor, targets: Tensor, block: Tensor) -> None:
        self.values.append(outputs[:, 0])
        self.blocks.append(block)

    def compute(self, blocks: int) -> list[float]:
        values, block = torch.cat(self.values), torch.cat(self.blocks)
        return [float(values.max()), *(float(values[block != b].max()) for b in range(blocks))]


def test_a_score_of_the_whole_set_by_hand_and_in_several_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    # x = 1 and 2, gains 2 and 3: the largest value is 4 times that of x = 1, so the shares are 4·2 and 4·3.
    # Without x = 2 they are 2 and 3, without x = 1 the same as of all: jackknife errors |8 - 2| / 2 and |12 - 3| / 2.
    model = product(2.0, 3.0)
    for at_once in (8, 1):
        monkeypatch.setattr("esper.engine.counterfactual.NETWORKS_PER_PASS", at_once)
        values = answer(seed_values(model, lambda: examples(1.0, 2.0), minus_mean, Largest()))
        assert [value.shapley.accuracy for value in values.values()] == [pytest.approx(8), pytest.approx(12)]
        assert [value.shapley.error for value in values.values()] == [pytest.approx(3), pytest.approx(4.5)]
        assert [value.contribution.accuracy for value in values.values()] == [pytest.approx(12), pytest.approx(16)]
        assert values[0].shapley.loss == pytest.approx(5)  # the mean of 2 and 8, as for a score per example


@pytest.mark.parametrize("question", [shapley, all_off])
def test_seeds_that_take_no_part_are_refused(question) -> None:  # type: ignore[no-untyped-def]
    """R138: alpha is 0, so there is nothing to leave out; the shadow benefit is what is measured instead."""
    model = attach(ProductHost(2), ["parts.*"], torch.ones(2, 1), rules=PATIENT)
    plant(model, model.slots[0], "lora", Stage.HOLDING)
    plant(model, model.slots[1], "lora", Stage.TRAINING)
    with pytest.raises(ValueError, match=r"parts.1 is TRAINING with alpha 0: .* shadow benefit"):
        question(model, examples(1.0), minus_mean, value_of, model.slots)
    shares = answer(shapley(model, examples(1.0), minus_mean, value_of))  # by default: those that do take part
    assert list(shares) == [0]


def test_a_slot_named_twice_is_refused() -> None:
    model = product(2.0, 3.0)
    with pytest.raises(ValueError, match="named twice"):
        all_off(model, examples(1.0), minus_mean, value_of, [model.slots[0], model.slots[0]])


def test_a_network_without_seeds_has_nothing_to_share() -> None:
    model = product(0.0, 0.0)
    assert answer(shapley(model, examples(1.0), minus_mean, value_of)) == {}
    nothing = answer(all_off(model, examples(1.0), minus_mean, value_of))
    assert (nothing.accuracy, nothing.loss, nothing.error) == (0.0, 0.0, 0.0)


def test_several_learners_answers_travel_together() -> None:
    models = [product(2.0, 3.0), product(0.0, 0.0), product(4.0, 1.0)]
    answers = gather([shapley(model, examples(1.0), minus_mean, value_of) for model in models])
    assert [sorted(shares) for shares in answers] == [[0, 1], [], [0, 1]]
    assert answers[2][0].accuracy == pytest.approx(3.0)

"""What a summary says: whether growing paid, with its noise and both sets of data; the metric; that nothing was kept.

Covers: R149
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_see_it import X, grow
from torch import Tensor, nn

import esper
from esper.engine.measure import Evaluation
from esper.lifecycle import Rules, Stage
from esper.training.own.metric import own_score
from esper.training.own.remarks import still_learning
from esper.training.own.verdict import Compared, Verdict

PRICED = Verdict(Compared(98.1, 54.0, 1.9), None, (5427, 100), 5.0, "accuracy")


def test_the_price_of_size_is_shown_as_a_sum() -> None:
    assert not PRICED.paid
    assert PRICED.text == (
        "Growing did not pay: the validation accuracy is 98.1 % with growth and 54.0 % without (+44.1 ± 1.9 points); "
        "53.27 extra host sizes at a rent of 5 cost 266.4, so the score is 222.3 points lower. The network without "
        "growth is `grown.ungrown`, which `save` writes into the folder `ungrown`. Where size costs nothing, set the "
        "rent to 0."
    )
    free = replace(PRICED, rent=0.0)
    assert free.paid
    assert free.text == (
        "Growing paid: the validation accuracy is 98.1 % with growth and 54.0 % without (+44.1 ± 1.9 points)."
    )


def test_a_difference_within_its_noise_and_test_data_that_contradict_it_are_said_to_be_so() -> None:
    close = Verdict(Compared(96.0, 96.25, 1.3), Compared(94.0, 91.7, 1.2), (1978, 1674), 5.0, "accuracy")
    assert not close.paid
    assert "so the score is 1.2 points lower. That is within one standard error, so it may be chance. " in close.text
    assert (
        "On the test data, by which nothing was decided, it is 94.0 % and 91.7 % (+2.3 ± 1.2 points), so the score is "
        "1.4 points higher. "
    ) in close.text
    assert "rent to 0" not in close.text, "growing did not help at any price"
    unknown = replace(close, validation=Compared(96.0, 96.25, float("inf")))
    assert "(-0.2 points)" in unknown.text
    assert "chance" not in unknown.text


@pytest.mark.parametrize("whole", [False, True])
def test_the_noise_is_that_of_paired_examples(whole: bool) -> None:
    """Two networks that are wrong about the same examples differ by less than their own errors."""
    x = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] + 0.5 * torch.randn(400, generator=torch.Generator().manual_seed(1)) > 0).long()
    networks = [nn.Linear(2, 2), nn.Linear(2, 2)]
    for network, tilt in zip(networks, (0.0, 0.1), strict=True):
        network.weight.data, network.bias.data = torch.tensor([[-1.0, tilt], [1.0, -tilt]]), torch.zeros(2)

    def right(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.argmax(1) == targets).float()

    def share(outputs: Tensor, targets: Tensor) -> Tensor:
        return right(outputs, targets).mean()

    score = own_score(share, "fraction", whole_set=True) if whole else lambda o, t: 100.0 * right(o, t)
    each = [right(network(x).detach(), y) for network in networks]
    measured = [Evaluation(0.0, 100.0 * float(one.mean())) for one in each]
    found = Compared.of(measured, networks, lambda: [(x[:150], y[:150]), (x[150:], y[150:])], score)
    assert found.gain == pytest.approx(100.0 * float((each[0] - each[1]).mean()), abs=1e-4)
    paired = 100.0 * float((each[0] - each[1]).std()) / 400**0.5
    assert found.error == pytest.approx(paired, rel=0.7 if whole else 0.01)
    assert found.error < 0.7 * 100.0 * float(each[0].std()) / 400**0.5


def test_a_control_that_still_rises_is_said_to_be_still_learning(monkeypatch: pytest.MonkeyPatch) -> None:
    rising = [10.0] * 4 + [40.0, 50.0, 60.0, 70.0] + [70.0, 75.0, 80.0, 80.0]
    assert "to the last, its validation R² rose by 21.2 points. So a part of the gain" in still_learning(rising, "R²")
    assert not still_learning([10.0] * 4 + [80.0] * 4 + [89.9] * 4, "accuracy")
    assert not still_learning([10.0, 50.0, 90.0], "accuracy"), "too short to tell"
    monkeypatch.setattr("esper.training.own.remarks.STILL_LEARNING", -100.0)
    for slots in (["1"], ["0", "2"]):
        grown = grow(slots=slots, control=True, controller="heuristic", epochs=20)
        assert grown.control is not None
        gained = bool(grown.verdict) and grown.validation.accuracy > grown.control.accuracy
        assert any("was still learning" in remark for remark in grown.remarks) is gained


def test_headings_name_what_was_measured() -> None:
    def f_score(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 100.0 * (outputs.argmax(1) == targets).float()

    assert "val f_score" in str(grow(epochs=1, controller="none", metric=f_score).summary())
    y = (X.sum(1, keepdim=True), X[:50].sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 1))
    explained = esper.grow(model, (X, y[0]), (X[:50], y[1]), slots=["1"], epochs=1, controller="none")
    assert "val R²" in str(explained.summary())
    assert "accuracy" not in str(explained.summary()) + repr(explained)


def test_a_run_that_kept_nothing_says_so() -> None:
    pruning = Rules(training_epochs=1, blending_epochs=2, gradient_activity=0.0, shadow_benefit=100.0)
    nothing = grow(rules=pruning, epochs=8)
    assert [story.fate for story in nothing.history.seeds()] == [Stage.PRUNED]
    assert "No seed was kept: the grown network is the host alone." in str(nothing.summary())

"""Data, metrics and models that cannot be trained on are refused in one line that says what they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.growth.attach import AttachError

torch.manual_seed(0)
X = torch.randn(64, 8)
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()
VALUES = X[:, :3].clone()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Sequential(nn.Linear(16, 16), nn.ReLU()), nn.Linear(16, 3))


def refused(match: str, train: object, val: object, kind: type[Exception] = ValueError, **options: object) -> None:
    settings = {"slots": ["1"], "controller": "none", "epochs": 3, "device": "cpu", **options}
    model = settings.pop("model", None) or net()
    with pytest.raises(kind, match=match) as caught:
        esper.grow(model, train, val, **settings)
    assert "\n" not in str(caught.value)


def loader(x: Tensor, y: Tensor) -> DataLoader:
    return DataLoader(TensorDataset(x, y), batch_size=16)


@pytest.mark.parametrize("empty", [[], (), DataLoader([])], ids=["list", "tuple", "loader"])
def test_no_data(empty: object) -> None:
    for val in ((X, Y), loader(X, Y), []):
        refused("the train data are empty: give at least one", empty, val)
    refused("the val data are empty", loader(X, Y), empty)
    refused("the test data are empty", (X, Y), (X, Y), test_data=empty)


def test_targets_that_are_all_the_same() -> None:
    refused("all train targets are the same: there is nothing to learn", (X, Y * 0 + 1), (X, Y))
    refused("all train targets are the same: there is", (X, VALUES * 0 + 2), (X, VALUES))
    refused("all train targets are the same: there is", (X, VALUES * 0 + 2), (X, VALUES), loss=nn.MSELoss())
    refused("all train targets are the same: there is", (X, VALUES[:1].expand(64, 3)), (X, VALUES))
    refused("all targets are the same: the default metric", loader(X, VALUES), loader(X, VALUES * 0 + 2))


def test_targets_in_another_shape_than_the_outputs() -> None:
    settings = {"model": nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1)), "slots": ["0"]}
    real = X[:, 0].clone()
    refused(r"the outputs' shape, y\[:, None\] or series.to_frame\(\), ", (X, real), (X, real), **settings)
    refused(r"whole numbers from 0 to 2, and .* one output per example: pass real numbers", (X, Y), (X, Y), **settings)
    words = Y.numpy().astype(str)
    refused(r"the train targets are an array of text: give numbers, such as pandas", (X, words), (X, words), **settings)
    whole = Y[:, None]
    refused(r"for a regression pass real numbers, y.float\(\); for classes reshape", (X, whole), (X, whole), **settings)


def test_a_loss_of_ones_own_may_not_need_targets() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.sum(1) - X[: len(outputs), 0]).square().mean()

    def metric(outputs: Tensor, targets: Tensor) -> Tensor:
        return 50.0 + outputs[:, 0].tanh()

    zeros = torch.zeros(64)
    grown = esper.grow(
        net(), (X, zeros), (X, zeros), slots=["1"], controller="none", epochs=1, loss=loss, metric=metric,
        metric_scale="percent", device="cpu",
    )  # fmt: skip
    assert 49.0 <= grown.validation.accuracy <= 51.0


def test_a_metric_that_is_no_number() -> None:
    def metric(outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.where(targets == 0, torch.nan, 50.0)

    refused(
        "the metric is nan on the validation data before the training: it must be a number", (X, Y), (X, Y),
        metric=metric, metric_scale="percent",
    )  # fmt: skip


def test_half_precision_is_named_as_what_it_is() -> None:
    """The default optimizer is fused, and calculates in single precision; Adam's other forms divide by 0."""
    model, x = net().half(), X.half()
    plain = {"optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)}
    refused("the model is in float16.*model.float\\(\\)", (x, Y), (x, Y), RuntimeError, model=model, **plain)


def test_misspelt_slots_in_layouts() -> None:
    refused("layouts names '11', which is no slot", (X, Y), (X, Y), AttachError, layouts={"11": "dense"})

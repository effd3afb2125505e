"""A person's own data and settings in `esper.grow`: what is taken, and the one line for what is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_growing import QUICK, plant, quick_grow, rings, small_net
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.lifecycle import Stage
from esper.policy.controller import NoGrowth

X, Y = rings(64, 0)


def once(train: object = (X, Y), val: object = (X, Y), **changes: object) -> esper.Grown:
    return quick_grow(**{"train": train, "val": val, "controller": "none", "epochs": 1, "slots": ["1"], **changes})


def loader(x: Tensor, y: Tensor) -> DataLoader:
    return DataLoader(TensorDataset(x, y), batch_size=16)


def refused(message: str, run: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        run()
    assert "\n" not in str(caught.value)


def value_net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 1))


# -- shapes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [(X, Y[:, None]), loader(X, Y[:, None])], ids=["tensors", "loader"])
def test_a_column_of_class_numbers_is_refused(data: object) -> None:
    refused(r"must be class numbers of shape \[\d+\], not int64 \[\d+, 1\]: reshape", lambda: once(data, data))


@pytest.mark.parametrize("settings", [{}, {"loss": F.mse_loss}, {"metric": lambda o, t: o.mean()}])
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_values_of_another_shape_than_the_outputs_are_refused(settings: dict[str, object]) -> None:
    data = (X, X[:, 0])
    message = r"gives float32 \[64, 1\] and the targets are float32 \[64\]: reshape the targets"
    refused(message, lambda: once(data, data, model=value_net(), **settings))


def test_targets_of_one_kind_in_train_and_another_in_val_are_refused() -> None:
    refused("must be class numbers", lambda: once((X, Y), (X, Y.float())))
    refused("reshape the targets", lambda: once((X, Y.float()), (X, Y)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"metric": lambda o, t: (o.argmax(1)[:, None] == t).float()},
            r"or one number, not float32 \[64, 64\]",
        ),
        ({"metric": lambda o, t: "3"}, "must give a tensor with one number per example .* not a str"),
        ({"loss": lambda o, t: F.cross_entropy(o, t, reduction="none")}, r"the loss must give one number, .*\[64\]"),
        ({"loss": lambda o, t: F.cross_entropy(o[:, :, None], t)}, r"the loss fails for the model's outputs \(float32"),
        ({"metric": lambda o, t: 1 / 0}, "the metric fails for .*: division by zero"),
    ],
)
def test_losses_and_metrics_are_tried_before_the_training(settings: dict[str, object], message: str) -> None:
    refused(message, lambda: once(**settings))


# -- class numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", [1, -1])
@pytest.mark.parametrize("split", ["train", "val", "test_data"])
@pytest.mark.parametrize("kind", [lambda x, y: (x, y), loader], ids=["tensors", "loaders"])
def test_classes_without_an_output_are_refused(kind: Callable[..., object], split: str, by: int) -> None:
    data = {name: kind(X, Y + by if name == split else Y) for name in ("train", "val", "test_data")}
    name = split.removesuffix("_data")
    span = "from 1 to 3" if by == 1 else "from -1 to 1"
    if kind is loader:
        span = "from -?\\d to \\d"  # of one batch
    refused(f"the {name} targets go {span}, but the model has 3 outputs .* classes 0 to 2", lambda: once(**data))


def test_ones_own_loss_says_what_integers_mean() -> None:
    some = torch.where(Y == 0, -100, Y)
    once((X, some), (X, some), loss=lambda o, t: F.cross_entropy(o, t))  # -100: torch leaves it out


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int16])
@pytest.mark.parametrize("kind", [lambda x, y: (x, y), loader], ids=["tensors", "loaders"])
def test_integers_of_any_type_are_class_numbers(kind: Callable[..., object], dtype: torch.dtype) -> None:
    data = kind(X, Y.to(dtype))
    assert once(data, data, test_data=data).validation == once(kind(X, Y), kind(X, Y)).validation


def test_yes_and_no_are_two_classes() -> None:
    assert once((X, Y > 0), (X, Y > 0)).validation == once((X, (Y > 0).long()), (X, (Y > 0).long())).validation
    refused("complex64", lambda: once((X, Y.to(torch.complex64))))


# -- other kinds of data -----------------------------------------------------------------------------------------


def test_arrays_are_as_good_as_tensors() -> None:
    arrays = (X.numpy().astype(np.float64)[::-1], Y.numpy().astype(np.int32)[::-1])
    tensors = (X.flip(0), Y.flip(0))
    assert once(arrays, list(arrays), test_data=arrays).validation == once(tensors, list(tensors)).validation
    values = (arrays[0], arrays[0][:, :1])
    once(values, values, model=value_net())


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (None, "the train data must be .* not NoneType"),
        ("data.csv", "the train data must be .* not str"),
        (X, "the train data must be .* not Tensor"),
        (TensorDataset(X, Y), "the train data are a dataset: wrap it in"),
        ((X, torch.tensor(1)), "the train targets are a single number"),
        ((np.array([None] * 64), Y.numpy()), "the train inputs are an array of object: give numbers"),
    ],
)
def test_other_things_are_no_data(train: object, message: str) -> None:
    refused(message, lambda: once(train))


def test_what_a_loader_gives_is_looked_at() -> None:
    lists = (X.tolist(), Y.tolist())
    refused(r"the train data are lists of numbers: make tensors of them, torch.tensor\(inputs\)", lambda: once(lists))
    single = [(X[0], Y[0])]
    refused("single examples, not batches", lambda: once(single, single))


# -- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, not 0"),
        ({"batch_size": -1}, "batch_size must be at least 1, not -1"),
        ({"updates_per_epoch": 0}, "updates_per_epoch must be at least 1, not 0"),
        ({"epochs": 2.5}, "epochs must be a whole number, not 2.5"),
        ({"epochs": True}, "epochs must be a whole number, not True"),
        ({"controller": 42}, r"an object with a name, reset\(\) and decide\(\), not 42"),
        ({"controller": NoGrowth}, r"is the class NoGrowth: pass an object of it, NoGrowth\("),
        ({"model": "resnet"}, "the model must be a torch.nn.Module, not str"),
    ],
)
def test_settings_that_mean_nothing(settings: dict[str, object], message: str) -> None:
    refused(message, lambda: once(**settings))


def test_a_controller_may_be_given_by_path(tmp_path: Path) -> None:
    refused("there is no checkpoint", lambda: once(controller=tmp_path / "none.safetensors"))


# -- what comes back ---------------------------------------------------------------------------------------------


def test_a_frozen_model_grows_and_its_own_weights_stay() -> None:
    model = small_net().requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    scheduler = lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=48)  # noqa: E731
    grown = quick_grow(model=model, controller=plant(), rules=QUICK, scheduler=scheduler, control=True)
    assert [story.fate for story in grown.history.seeds()] == [Stage.FOSSILIZED]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    seed = [p for p in grown.model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in seed) == grown.parameters - grown.history.host_parameters
    last = grown.model.get_submodule("1.esper_seeds.0.seed.down")
    assert last.weight.abs().max() > 0.0  # it was zero at birth
    assert grown.control is not None
    assert grown.validation.loss < grown.history.records[0].measured.loss


def test_the_model_comes_back_as_it_was_measured() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3))
    grown = once(model=model, slots=["2"], epochs=2)
    assert not any(module.training for module in grown.model.modules())
    with torch.no_grad():
        outputs = grown.model(X)
    assert F.cross_entropy(outputs, Y).item() == pytest.approx(grown.validation.loss, abs=1e-5)
    assert 100 * (outputs.argmax(1) == Y).float().mean().item() == pytest.approx(grown.validation.accuracy)

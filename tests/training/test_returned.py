"""`esper.grow` returns the network that it measured, and touches nothing else: neither the user's model nor results.

Covers: R149
"""

from __future__ import annotations

import copy
import os
import pickle
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_growing import plant, quick_grow, rings, small_net
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.growth.attach import AttachError, attach
from esper.growth.export import ExportError, save
from esper.growth.graft import is_record
from esper.growth.plain import plain_model
from esper.lifecycle import Stage
from esper.training.own.optimizer import make_optimizer

X, Y = rings(128, 1)


def accuracy(model: nn.Module) -> float:
    with torch.no_grad():
        return 100 * (model(X).argmax(1) == Y).float().mean().item()


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def bare(model: nn.Module) -> bool:
    """Nothing of Esper's on any of its modules."""
    return not any(
        m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) or type(m).__module__.startswith("esper")
        for m in model.modules()
    )


class Stop(Exception):  # noqa: N818
    pass


# -- the user's model ---------------------------------------------------------------------------------------------


def test_the_users_model_is_untouched() -> None:
    model = small_net().eval()
    model[0].requires_grad_(False)
    before = state(model)
    grown = quick_grow(model=model)
    assert grown.history.seeds()
    assert same(before, state(model))
    assert bare(model)
    assert not any(m.training for m in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_a_second_growth_of_the_same_object_gives_what_it_reports(tmp_path: Path) -> None:
    model = small_net()
    first = quick_grow(model=model, seed=1)
    kept = state(first.model)
    second = quick_grow(model=model, seed=2)
    assert len(second.history.seeds()) == 1  # of its own alone
    for grown in (first, second):
        assert accuracy(grown.model) == pytest.approx(grown.validation.accuracy, abs=1e-4)
    assert same(kept, state(first.model))
    second.save(tmp_path)
    loaded = esper.load(tmp_path, host=small_net())
    torch.testing.assert_close(loaded(X), second.model(X))


def test_growing_a_result_again_leaves_the_first_result_alone(tmp_path: Path) -> None:
    first = quick_grow()
    kept, outputs = state(first.model), first.model(X).detach()
    again = quick_grow(model=first.model, controller=plant(slot=1))
    assert same(kept, state(first.model))
    assert {id(p) for p in first.model.parameters()}.isdisjoint({id(p) for p in again.model.parameters()})
    assert again.parameters > first.parameters
    assert accuracy(again.model) == pytest.approx(again.validation.accuracy, abs=1e-4)
    first.save(tmp_path)
    program = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(program(X), outputs)
    weights = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(weights[name], value) for name, value in kept.items() if not is_record(name))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
def test_nothing_stays_on_the_model_after_an_exception(in_place: bool, error: type[BaseException]) -> None:
    model = small_net()

    def stop(record: object, control: object) -> None:
        if len(seen := [*epochs, record]) == 4:
            raise error
        epochs[:] = seen

    epochs: list[object] = []
    with pytest.raises(error):
        quick_grow(model=model, on_epoch=stop, in_place=in_place)
    assert bare(model)
    quick_grow(model=model, epochs=2)  # so it can be grown again


def test_nothing_stays_on_the_model_after_ctrl_c() -> None:
    model = small_net()
    grown = quick_grow(
        model=model, in_place=True, on_epoch=lambda record, _: record.epoch == 3 and os.kill(os.getpid(), signal.SIGINT)
    )
    assert grown.interrupted
    assert bare(model)
    assert accuracy(grown.model) == pytest.approx(grown.validation.accuracy, abs=1e-4)


def test_in_place_trains_the_very_model_and_leaves_it_bare() -> None:
    model = small_net().eval()
    before, own = state(model), {id(p) for p in model.parameters()}
    grown = quick_grow(model=model, in_place=True)
    assert bare(model)
    assert not same(before, state(model))  # trained
    assert own < {id(p) for p in grown.model.parameters()}  # no second copy of the host in memory
    assert not model.training
    assert accuracy(grown.model) == pytest.approx(grown.validation.accuracy, abs=1e-4)
    reference = quick_grow(model=small_net())
    assert same(state(grown.model), state(reference.model))


def test_a_model_that_cannot_be_copied_is_refused_with_the_cure() -> None:
    model = small_net()
    model.lock = os.scandir(".")  # type: ignore[assignment]
    for in_place in (False, True):  # both need a copy of the modules, and one of the tensors
        with pytest.raises(ExportError, match=r"this Sequential cannot be copied by copy.deepcopy .*: cannot pickle"):
            quick_grow(model=model, in_place=in_place)
        assert bare(model)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weights_that_a_pass_leaves_behind_do_not_stop_a_copy() -> None:
    model = small_net()
    model[2] = nn.utils.weight_norm(model[2])  # the older one, of many TCNs: its weight is made by every pass
    model(X)
    grown = quick_grow(model=model)
    assert grown.history.seeds()
    assert accuracy(grown.model) == pytest.approx(grown.validation.accuracy, abs=1e-4)


def test_layers_without_a_size_are_refused_with_the_cure() -> None:
    with pytest.raises(AttachError, match=r"'0.weight' has no size yet: run the model once"):
        quick_grow(model=nn.Sequential(nn.LazyLinear(6), nn.ReLU(), nn.Linear(6, 3)), slots=["1"])


def test_hooks_of_an_earlier_growth_are_refused_with_the_cure() -> None:
    model = small_net()
    growing = attach(model, ["1"], X[:2])
    growing.germinate(growing.slots[0], "mlp", "linear", epoch=0)
    for again in (lambda: attach(model, ["3"], X[:2]), lambda: quick_grow(model=model)):
        with pytest.raises(AttachError, match=r"seeds of an earlier growth still sit in Sequential \(1\): call detach"):
            again()
    with pytest.raises(ExportError, match=r"seeds still grow in this Sequential \(at 1\)"):
        save(model, "nowhere", X[:2])
    assert growing.detach() is model
    assert bare(model)
    attach(model, ["3"], X[:2])


# -- the result ---------------------------------------------------------------------------------------------------


def test_an_export_that_gives_something_else_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(growing: esper.GrowingModel, **settings: object) -> nn.Module:
        return plain_model(growing, unfinished="drop") if not growing.joined else copy.deepcopy(small_net())

    monkeypatch.setattr("esper.training.own.run.plain_model", broken)
    with pytest.raises(ExportError, match=r"outputs differ by [\d.e+]+ on the validation data, so nothing is returned"):
        quick_grow()


class Hidden(nn.Module):
    """Calls a layer through a list: only what sits on the layer itself is reached."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 6), nn.Linear(6, 3)
        self.shortcut = [self.first]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.shortcut[0](x)))


def test_modules_that_are_reached_by_other_ways_than_their_names_grow() -> None:
    hidden = quick_grow(model=Hidden(), slots=["first"])
    assert hidden.parameters > sum(p.numel() for p in Hidden().parameters())
    assert accuracy(hidden.model) == pytest.approx(hidden.validation.accuracy, abs=1e-4)
    # torch's fast path of a transformer layer reads the weights of its linear layers, but not of those with a hook.
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Flatten(), nn.Linear(40, 3))
    data = torch.randn(16, 5, 8), torch.randint(0, 3, (16,))
    for slot in ("0.layers.0.linear1", "0.layers.0"):
        quick_grow(model=model, train=data, val=data, slots=[slot], epochs=1)


class Walker(nn.Module):
    """Calls whatever is registered in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x)
        return x


def test_a_slot_that_would_call_its_seed_as_a_layer_is_refused_before_training() -> None:
    with pytest.raises(AttachError, match="slot '0' cannot be exported: Walker computes something else when"):
        quick_grow(model=nn.Sequential(Walker(), nn.ReLU()), slots=["0"])
    quick_grow(model=nn.Sequential(Walker(), nn.ReLU()), slots=["0.last", "1"], epochs=1)


def test_a_pickled_result_holds_no_training_data() -> None:
    x, y = torch.randn(20_000, 100), torch.randint(0, 3, (20_000,))
    model = nn.Sequential(nn.Linear(100, 4), nn.ReLU(), nn.Linear(4, 3))
    grown = quick_grow(model=model, train=(x, y), val=(x[:64], y[:64]), slots=["1"], epochs=1, updates_per_epoch=2)
    assert len(pickle.dumps(grown)) < 60_000  # the data are 8 MB


# -- compiled and scripted models ---------------------------------------------------------------------------------


def test_a_compiled_model_is_unwrapped_and_a_scripted_one_refused_at_once() -> None:
    grown = quick_grow(model=torch.compile(small_net()), epochs=3)
    assert type(grown.model) is nn.Sequential
    inner = nn.Sequential(torch.compile(nn.Linear(2, 3)), nn.ReLU())
    with pytest.raises(AttachError, match=r"module '0' of Sequential is compiled: pass it uncompiled"):
        quick_grow(model=inner, slots=["1"])
    for model in (torch.jit.script(small_net()), torch.jit.trace(small_net(), X[:2])):
        with pytest.raises(AttachError, match="is scripted or traced: pass the Python module"):
            quick_grow(model=model)
    with pytest.raises(AttachError, match=r"is a parallel wrapper: pass its \.module"):
        quick_grow(model=nn.DataParallel(small_net()), slots=["module.1"])


# -- optimizers ---------------------------------------------------------------------------------------------------


def by_layer(parameters: list[Tensor], model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [
            {"params": [*model[0].parameters()], "lr": 0.2, "weight_decay": 0.1},
            {"params": [p for i in (2, 4) for p in model[i].parameters()], "lr": 0.05},
        ],
        momentum=0.9,
    )


def test_a_factory_with_two_arguments_gets_the_model_that_is_trained() -> None:
    model = small_net()
    grown = quick_grow(model=model, optimizer=by_layer, control=True, updates_per_epoch=60, controller="none")
    assert grown.control is not None
    assert grown.control.accuracy == pytest.approx(grown.validation.accuracy)  # nothing grew, so they are the same
    assert grown.validation.accuracy > 70


def test_an_optimizer_of_another_model_is_refused() -> None:
    model = small_net()
    with pytest.raises(ValueError, match=r"holds a tensor of shape \[6, 2\] that is none of the network in training"):
        quick_grow(model=model, optimizer=lambda parameters: torch.optim.SGD(model.parameters(), lr=0.1))


def test_all_parameters_of_a_partly_frozen_model_may_be_given() -> None:
    model = small_net()
    model[0].requires_grad_(False)
    grown = quick_grow(model=model, epochs=2, optimizer=lambda ps, model: torch.optim.AdamW(model.parameters()))
    assert torch.equal(grown.model[0].weight, model[0].weight)


def test_no_gradients_stay_on_what_comes_back() -> None:
    model = small_net()
    grown = quick_grow(model=model, in_place=True)
    assert all(p.grad is None for m in (model, grown.model) for p in m.parameters())


def test_the_example_of_a_loader_is_two_examples() -> None:
    loader = DataLoader(TensorDataset(*rings(256, 0)), batch_size=64)
    grown = quick_grow(train=loader, val=loader, epochs=1)
    assert grown.example.shape == (2, 2)


def test_a_parameter_that_no_group_has_is_named() -> None:
    with pytest.raises(ValueError, match=r"no group of the optimizer has the parameter '2.weight' \(and 3 more\)"):
        quick_grow(optimizer=lambda parameters, model: torch.optim.SGD(model[0].parameters(), lr=0.1))
    frozen = small_net()
    frozen[2:].requires_grad_(False)
    quick_grow(model=frozen, epochs=1, optimizer=lambda ps, model: torch.optim.SGD(model[0].parameters(), lr=0.1))


def test_sparse_gradients_need_an_optimizer_that_takes_them() -> None:
    model = nn.Sequential(nn.EmbeddingBag(5, 3, sparse=True), nn.Linear(3, 2))
    for factory in (None, torch.optim.Adam):
        with pytest.raises(ValueError, match=r"table '0' gives sparse gradients.*sparse=False, or .*SGD"):
            make_optimizer(factory, model)
    assert make_optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1), model)
    assert make_optimizer(None, model[1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": torch.optim.SGD(small_net().parameters(), lr=0.1)}, r"exists already \(SGD\): pass a function"),
        ({"optimizer": "adam"}, "must be a function that makes an optimizer from parameters, not 'adam'"),
        ({"optimizer": lambda parameters: None}, "must make a torch.optim.Optimizer, and made a NoneType"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS cannot train a network that grows"),
        ({"optimizer": lambda p: torch.optim.SparseAdam(list(p))}, "SparseAdam cannot train a network that grows"),
        (
            {"scheduler": torch.optim.lr_scheduler.StepLR(torch.optim.SGD(small_net().parameters(), lr=0.1), 1)},
            "scheduler= is a StepLR: pass a function that makes one",
        ),
        ({"scheduler": lambda optimizer: None}, "scheduler= must make a scheduler of torch.*NoneType"),
    ],
)
def test_what_is_no_factory_is_refused_in_one_line(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        quick_grow(**settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("slot", "group"), [("1", "group 1 (lr 0.025,"), ("0", "group 0 (lr 0.2, weight_decay 0.1)")])
def test_a_seed_inherits_the_settings_of_its_neighbours_and_says_so(slot: str, group: str) -> None:
    # Slot 1 is a ReLU without parameters: there the group of most of the model's parameters lends its settings.
    rates = {}

    def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        rates["optimizer"] = optimizer
        return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda _: 1.0, lambda _: 0.5])

    grown = quick_grow(slots=[slot], optimizer=by_layer, scheduler=scheduler)
    (story,) = grown.history.seeds()
    assert story.fate is Stage.FOSSILIZED
    assert story.settings.startswith(f"as optimizer {group}")
    groups = rates["optimizer"].param_groups
    assert groups[2]["lr"] == groups[int(group[6])]["lr"]  # the scheduler moves it as it moves its neighbours
    assert grown.history.to_json()["seeds"][0]["settings"] == story.settings


# -- one learning-rate schedule for everything ---------------------------------------------------------------------


class Rates:
    """An optimizer that notes the rates it steps with."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def __call__(self, parameters: list[Tensor]) -> torch.optim.Optimizer:
        seen: list[float] = []
        self.seen.append(seen)
        made = torch.optim.SGD(parameters, lr=0.1)
        made.register_step_pre_hook(lambda optimizer, *_: seen.append(optimizer.param_groups[0]["lr"]))
        return made


def test_the_rate_falls_at_the_end_as_in_built_in_tasks_and_for_the_control_too() -> None:
    rates = Rates()
    quick_grow(optimizer=rates, control=True, epochs=10, updates_per_epoch=10)
    growing, control = rates.seen
    assert growing == control
    assert growing[:70] == [0.1] * 70
    assert growing[85] == pytest.approx(0.05)
    assert growing[99] == pytest.approx(0.1 / 30)


def test_a_schedule_of_ones_own_is_all_there_is() -> None:
    rates = Rates()
    quick_grow(optimizer=rates, scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda _: 1.0), epochs=3)
    assert set(rates.seen[0]) == {0.1}

"""`esper.grow` on a person's own model and data: what it accepts, what it refuses, what comes back.

Covers: R149
"""

from __future__ import annotations

import json
import os
import random
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import esper
from esper.actions import Action, Op
from esper.engine.eager import EpochRecord
from esper.env.situation import Situation
from esper.growth.attach import AttachError
from esper.growth.plain import grafted
from esper.lifecycle import Rules, Stage
from esper.policy.schedule import FixedSchedule, Planting
from esper.training.own.run import DivergedError
from esper.training.own.stepper import StateError

QUICK = Rules(training_epochs=1, blending_epochs=1, prune_age=1, shadow_benefit=-100.0, contribution=-100.0)


def rings(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points in the plane; the class is the ring they lie on."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 2, generator=generator)
    return x, (x.norm(dim=1) * 1.5).long().clamp(max=2)


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))


def plant(blueprint: str = "mlp", slot: int = 0) -> FixedSchedule:
    return FixedSchedule("test", [Planting(1, slot, {"dense": blueprint})])


def quick_grow(**changes: object) -> esper.Grown:
    settings: dict[str, object] = {
        "slots": ["1", "3"],
        "controller": plant(),
        "epochs": 6,
        "batch_size": 32,
        "rules": QUICK,
        "device": "cpu",
    }
    settings.update(changes)
    model = settings.pop("model", None) or small_net()
    train, val = settings.pop("train", rings(256, 0)), settings.pop("val", rings(128, 1))
    return esper.grow(model, train, val, **settings)  # type: ignore[arg-type]


def test_a_persons_model_grows_and_comes_back_plain() -> None:
    grown = quick_grow(test_data=rings(128, 2), control=True)
    assert [story.fate for story in grown.history.seeds()] == [Stage.FOSSILIZED]
    assert grown.parameters > grown.history.host_parameters
    assert sum(len(module._forward_hooks) for module in grown.model.modules()) == len(grafted(grown.model)) == 1
    assert grown.test is not None
    assert grown.control is not None
    x, y = rings(128, 2)
    accuracy = 100 * (grown.model.eval()(x).argmax(1) == y).float().mean().item()
    assert accuracy == pytest.approx(grown.test.accuracy, abs=1e-4)


def accuracy_of(model: nn.Module) -> float:
    x, y = rings(128, 1)
    assert not model.training
    return 100 * (model(x).argmax(1) == y).float().mean().item()


@pytest.mark.parametrize(("rent", "paid"), [(0.0, True), (1000.0, False)])
def test_the_network_without_growth_comes_back_too_and_whether_growing_paid(
    rent: float, paid: bool, tmp_path: Path
) -> None:
    grown = quick_grow(epochs=14, rent=rent, control=True)
    assert grown.control is not None
    assert grown.ungrown is not None
    assert accuracy_of(grown.ungrown) == pytest.approx(grown.control.accuracy, abs=1e-4)
    assert accuracy_of(grown.model) == pytest.approx(grown.validation.accuracy, abs=1e-4)
    assert sum(p.numel() for p in grown.ungrown.parameters()) == grown.history.host_parameters
    grown.save(tmp_path)
    assert grown.paid is paid
    assert any(remark.startswith("Growing did not pay") for remark in grown.remarks) is not paid
    assert (tmp_path / "ungrown" / "model.safetensors").exists() is not paid
    if not paid:  # it is a model folder like any other
        again = esper.load(tmp_path / "ungrown", host=small_net())
        assert accuracy_of(again.eval()) == pytest.approx(grown.control.accuracy, abs=1e-4)


def test_a_folder_that_is_used_again_keeps_no_network_of_an_earlier_run(tmp_path: Path) -> None:
    unpaid, paid = (quick_grow(epochs=14, rent=rent, control=True) for rent in (1000.0, 0.0))
    unpaid.save(tmp_path)
    (tmp_path / "ungrown" / "notes.txt").write_text("of the user")
    for name in ("growth.png", "report.html"):
        (tmp_path / name).write_text("of the earlier run")
        os.utime(tmp_path / name, (paid.ended - 60.0, paid.ended - 60.0))
    paid.save(tmp_path)
    assert [path.name for path in (tmp_path / "ungrown").iterdir()] == ["notes.txt"]
    assert not {"growth.png", "report.html"} & {path.name for path in tmp_path.iterdir()}

    (tmp_path / "growth.png").write_text("of this run")
    (tmp_path / "ungrown" / "notes.txt").unlink()
    unpaid.save(tmp_path)
    paid.save(tmp_path)
    assert (tmp_path / "growth.png").exists()
    assert not (tmp_path / "ungrown").exists()


def test_somebody_elses_files_in_a_new_folder_stay(tmp_path: Path) -> None:
    grown = quick_grow(epochs=4, controller="none")
    (tmp_path / "report.html").write_text("of the user")
    os.utime(tmp_path / "report.html", (0.0, 0.0))
    grown.save(tmp_path)
    assert (tmp_path / "report.html").exists()


def test_the_same_seed_gives_the_same_model() -> None:
    first, second = quick_grow(), quick_grow()
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_loaders_serve_as_well_as_tensors() -> None:
    train = DataLoader(TensorDataset(*rings(256, 0)), batch_size=32)
    val = DataLoader(TensorDataset(*rings(128, 1)), batch_size=50)
    grown = quick_grow(train=train, val=val, test_data=val)
    assert grown.test is not None
    assert grown.test.accuracy == pytest.approx(grown.validation.accuracy)


def test_regression_has_a_default_objective() -> None:
    x = torch.randn(256, 2, generator=torch.Generator().manual_seed(0))
    y = x.prod(1, keepdim=True)
    net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    grown = quick_grow(model=net, train=(x, y), val=(x, y), slots=["1"], epochs=4)
    with torch.no_grad():
        residual = (grown.model(x) - y).square().mean()
    explained = 100 * (1 - residual / y.var(unbiased=False)).item()
    assert grown.validation.accuracy == pytest.approx(explained, abs=1e-3)


def test_own_loss_metric_optimizer_and_scheduler_are_used() -> None:
    seen = set()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.add("loss")
        return nn.functional.cross_entropy(outputs, targets, label_smoothing=0.1)

    def metric(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.add("metric")
        return 100.0 * (outputs.argmax(1) == targets).float().mean()

    grown = quick_grow(
        loss=loss,
        metric=metric,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=48),
    )
    assert seen == {"loss", "metric"}
    assert 0.0 <= grown.validation.accuracy <= 100.0


def test_what_was_saved_loads_again(tmp_path: Path) -> None:
    grown = quick_grow()
    grown.save(tmp_path)
    history = json.loads((tmp_path / "history.json").read_text())
    assert len(history["epochs"]) == 6
    assert history["seeds"][0]["blueprint"] == "mlp"
    x, _ = rings(7, 3)
    loaded = esper.load(tmp_path, trust_program=True)
    with torch.no_grad():
        assert torch.allclose(loaded(x), grown.model.eval()(x), atol=1e-5)


def test_ctrl_c_keeps_what_was_grown() -> None:
    def interrupt(record: object, control: object) -> None:
        if record.epoch == 3:  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGINT)

    grown = quick_grow(epochs=50, on_epoch=interrupt)
    assert grown.interrupted
    assert len(grown.history.records) == 4
    assert grown.parameters > grown.history.host_parameters


def test_unfinished_seeds_that_do_not_help_are_taken_out_at_the_end() -> None:
    never_blends = Rules(training_epochs=1, shadow_benefit=1000.0)
    grown = quick_grow(rules=never_blends)
    assert grown.parameters == grown.history.host_parameters
    assert grown.history.seeds()[0].why_ended == "the run ended first"


def test_a_seed_whose_removal_the_end_of_the_run_cuts_short_keeps_the_reason_of_the_decision() -> None:
    class Removes:
        name = "removes"

        def reset(self, seeds: object) -> None: ...

        def decide(self, situations: list[Situation]) -> list[Action]:
            script = {0: Action(Op.GERMINATE, 0, "mlp", "linear"), 5: Action(Op.PRUNE, 0, reason="enough of it")}
            return [script.get(situation.epoch, Action()) for situation in situations]

    (story,) = quick_grow(controller=Removes(), rules=Rules(training_epochs=1, shadow_benefit=-100.0)).history.seeds()
    assert (story.fate, story.ended, story.why_ended) == (Stage.PRUNED, 6, "enough of it")


FIVE_WIDE = (torch.zeros(8, 5), torch.zeros(8, dtype=torch.long))


def nan_data() -> tuple[Tensor, Tensor]:
    x, y = rings(64, 0)
    x[5, 1] = float("nan")
    return x, y


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": nan_data()}, "train inputs contain NaN"),
        ({"val": (torch.randn(4, 3), torch.zeros(4, dtype=torch.long))}, "val inputs have shape"),
        ({"train": FIVE_WIDE, "val": FIVE_WIDE}, "does not accept the example batch"),
        ({"train": (torch.randn(8, 2), torch.zeros(7, dtype=torch.long))}, "8 inputs but 7 targets"),
        ({"slots": ["layer9"]}, "matches no module"),
        ({"budget": 10}, "smaller than the host"),
        ({"controller": "heuristics"}, "did you mean 'heuristic'"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"device": "cuda:77"}, "cannot be used here"),
        ({"device": "mps"}, "no double precision.*device='cpu'"),
        ({"train": [("a", "b", "c")], "val": [("a", "b", "c")]}, "pairs"),
    ],
)
def test_bad_input_is_refused_with_the_reason(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        quick_grow(**changes)
    assert "\n" not in str(caught.value)


def test_hopeless_training_says_so() -> None:
    with pytest.raises(DivergedError, match="learning rate"):
        quick_grow(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e18))


# -- what a state must hold ---------------------------------------------------------------------------------------


class Counting(nn.Module):
    """An average in a buffer that `state_dict()` leaves out, a count that is no tensor, random numbers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.passes = nn.Linear(2, 6), nn.Linear(6, 3), 0
        self.register_buffer("mean", torch.zeros(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.training:
            self.passes += 1
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
            h = h * (0.5 + random.random()) * (0.5 + np.random.rand())
        hidden: Tensor = self.last((h - self.mean).relu())
        return hidden

    def get_extra_state(self) -> object:
        return {"passes": self.passes}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.passes = state["passes"]


class Untellable(Counting):
    def get_extra_state(self) -> object:
        return Path()


def of_generator(batches: bool) -> DataLoader[tuple[Tensor, ...]]:
    """Five whole batches: at the end of the pass a sampler draws a permutation that is not used."""
    data, generator = TensorDataset(*rings(160, 0)), torch.Generator().manual_seed(5)
    if batches:
        return DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data, generator=generator), 32, False))
    return DataLoader(data, batch_size=32, shuffle=True, generator=generator)


@pytest.mark.parametrize("what", ["model", "loader", "batch sampler"])
def test_a_run_that_was_stopped_goes_on_exactly(what: str, tmp_path: Path) -> None:
    def run(**more: object) -> esper.Grown:
        of_model: dict[str, object] = {"model": Counting(), "slots": ["first"]}
        val = DataLoader(TensorDataset(*rings(128, 1)), batch_size=64)
        of_loader = {"train": of_generator(what != "loader"), "val": val}
        return quick_grow(control=True, **(of_model if what == "model" else of_loader), **more)

    def stop(record: EpochRecord, control: EpochRecord | None) -> None:
        if record.epoch == 2:
            raise InterruptedError

    whole = run()
    with pytest.raises(InterruptedError):
        run(checkpoint=tmp_path, on_epoch=stop)
    resumed = run(checkpoint=tmp_path)
    assert resumed.history.control == whole.history.control
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(whole.model.buffers(), resumed.model.buffers(), strict=True):
        assert torch.equal(one, other)


def test_the_network_of_the_best_epoch_has_all_buffers_of_then() -> None:
    later = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda update: 0.1 if update < 32 else 2.0)
    settings = {"optimizer": partial(torch.optim.SGD, lr=1.0), "scheduler": later}
    grown = quick_grow(model=Counting(), slots=["first"], controller="none", keep_best=True, **settings)
    assert grown.history.kept is not None
    assert grown.validation.accuracy == max(record.measured.accuracy for record in grown.history.records)


def test_what_a_model_says_of_itself_must_be_data_to_be_kept(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="_extra_state of the model is no plain data, so no state can be kept"):
        quick_grow(model=Untellable(), slots=["first"], checkpoint=tmp_path)


# -- unusual models -----------------------------------------------------------------------------------------------


class OfForces(nn.Module):
    """A gradient is a part of its forward pass, as in models of energies and forces."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.energy, self.first, self.last = nn.Linear(2, 4), nn.Linear(2, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            place = x.detach().requires_grad_()
            energy = self.energy(place).tanh().sum()
            (force,) = torch.autograd.grad(energy, place, create_graph=self.training)
        classes: Tensor = self.last((self.first(x + force)).relu())
        return classes


def test_a_model_that_takes_gradients_in_its_pass_grows_and_is_saved(tmp_path: Path) -> None:
    assert esper.slots(OfForces(), rings(4, 0)[0]).flops is None  # torch's counter cannot follow such a pass
    grown = quick_grow(model=OfForces(), slots=["first"])
    assert [story.fate for story in grown.history.seeds()] == [Stage.FOSSILIZED]
    assert any("FLOPs of the network could not be counted" in remark for remark in grown.remarks)
    assert accuracy_of(grown.model) == pytest.approx(grown.validation.accuracy, abs=1e-4)
    grown.save(tmp_path)
    assert torch.equal(esper.load(tmp_path, host=OfForces())(rings(9, 0)[0]), grown.model(rings(9, 0)[0]))


def test_a_sparse_buffer_is_refused_with_the_cure() -> None:
    model = small_net()
    model.register_buffer("edges", torch.eye(2).to_sparse())
    with pytest.raises(AttachError, match=r"'edges' is a sparse tensor, .*: make it dense, or hold it in an attribute"):
        quick_grow(model=model)


# -- test data ----------------------------------------------------------------------------------------------------


def test_test_data_that_do_not_fit_are_refused_before_the_training() -> None:
    def unreached(record: EpochRecord, control: EpochRecord | None) -> None:
        raise AssertionError("an epoch was trained")

    x, y = rings(32, 2)
    for wrong in ((x.double(), y), DataLoader(TensorDataset(x[:, :1], y), batch_size=8)):
        with pytest.raises(ValueError, match="the test data do not fit: Sequential does not accept"):
            quick_grow(test_data=wrong, on_epoch=unreached)


def test_what_was_grown_is_not_lost_with_a_damaged_batch_of_test_data() -> None:
    x, y = rings(16, 2)
    grown = quick_grow(test_data=[(x[:8], y[:8]), (x[8:].double(), y[8:])], control=True)
    assert grown.test is None
    assert grown.control is not None
    assert accuracy_of(grown.ungrown) == pytest.approx(grown.control.accuracy, abs=1e-4)
    assert any("test data could not be measured: mat1 and mat2 must have the same dtype" in r for r in grown.remarks)


def test_a_program_that_torch_cannot_write_is_left_out(tmp_path: Path) -> None:
    class OnGraph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.edges = nn.Linear(2, 6), nn.Linear(6, 3), torch.eye(2).to_sparse()

        def forward(self, x: Tensor) -> Tensor:
            classes: Tensor = self.last(self.first(torch.sparse.mm(self.edges, x.T).T).relu())
            return classes

    saved = quick_grow(model=OnGraph(), slots=["first"]).save(tmp_path)
    assert "model.pt2" not in saved.files
    assert any("no model.pt2 (torch.export said: Cannot access storage" in warning for warning in saved.warnings)

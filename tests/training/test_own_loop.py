"""`esper.Growth` in a loop of one's own, and runs that go on after they were killed."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.lifecycle import Rules, Stage
from esper.training.own.growth import Growth
from esper.training.own.stepper import StateError

torch.manual_seed(0)
X = torch.randn(300, 2)
Y = (X.norm(dim=1) * 1.5).long().clamp(max=2)  # which of three rings
VAL = (X[200:], Y[200:])
RULES = Rules(training_epochs=1, blending_epochs=1, gradient_activity=0.0, shadow_benefit=-100.0, contribution=-100.0)
EPOCHS = 8


def net(*extra: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 6), nn.ReLU(), *extra, nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))


def growth_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **settings: object) -> Growth:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    given = {"slots": ["1"], "validate": VAL, "epochs": EPOCHS, "controller": "schedule", "rules": RULES} | settings
    return esper.Growth(model, optimizer, **given)  # type: ignore[arg-type]


def run_epoch(growth: Growth, epochs: int = 1) -> None:
    for _ in range(epochs):
        for rows in torch.arange(200).split(50):
            growth.backward((X[rows], Y[rows]))
            growth.step()
        growth.end_epoch()


def weights(model: nn.Module) -> list[Tensor]:
    return [tensor.clone() for tensor in model.state_dict().values()]


def same(first: nn.Module, second: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(first), weights(second), strict=True))


def stages(growth: Growth) -> list[Stage]:
    return [slot.stage for slot in growth.learner.model.slots]


def test_before_any_seed_acts_the_host_trains_as_it_would_alone() -> None:
    """The same minibatches: seedless epochs and one of incubation, bit for bit."""
    growth, alone = growth_of(net()), net()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.01)
    for _ in range(3):
        for rows in torch.arange(200).split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(alone(X[rows]), Y[rows]).backward()
            optimizer.step()
    run_epoch(growth, 3)
    assert Stage.TRAINING in growth.records[2].stages
    assert same(growth.model, alone)


def test_the_loop_grows_and_gives_a_plain_model() -> None:
    model = net()
    growth = growth_of(model)
    run_epoch(growth, EPOCHS)
    assert growth.over
    grown = growth.finish()
    assert [seed.fate for seed in grown.history.seeds()] == [Stage.FOSSILIZED]
    right = (grown.model(VAL[0]).argmax(1) == VAL[1]).float().mean()
    assert float(100 * right) == pytest.approx(grown.validation.accuracy, abs=1e-3)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_accumulated_gradients_are_those_of_the_whole_batch() -> None:
    one, two = growth_of(net()), growth_of(net())
    for growth, parts in ((one, 1), (two, 4)):
        for _ in range(3):
            for rows in torch.arange(200).split(200):
                for part in rows.split(200 // parts):
                    growth.backward((X[part], Y[part]), accumulate=parts)
                growth.step()
            growth.end_epoch()
    for a, b in zip(one.learner.model.parameters(), two.learner.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    assert len(one.learner.model.seeds) == 1
    assert two.records[2].trained.loss == pytest.approx(one.records[2].trained.loss, rel=1e-4)


def test_a_function_that_makes_the_pass_trains_host_and_seed_as_a_batch_does() -> None:
    one, two = growth_of(net()), growth_of(net())
    for _ in range(3):
        for rows in torch.arange(200).split(50):
            one.backward((X[rows], Y[rows]))
            two.backward(lambda rows=rows: nn.functional.cross_entropy(two.model(X[rows]), Y[rows]))  # type: ignore[misc]
            one.step()
            two.step()
        one.end_epoch()
        two.end_epoch()
    assert Stage.TRAINING in one.records[2].stages
    for a, b in zip(one.learner.model.parameters(), two.learner.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_a_scaler(dtype: torch.dtype) -> None:
    growth = growth_of(net(), autocast=dtype)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    optimizer = growth.learner.optimizer.optimizer
    for _ in range(EPOCHS):
        for rows in torch.arange(200).split(50):
            growth.backward((X[rows], Y[rows]), scaler=scaler)
            scaler.unscale_(optimizer)
            growth.clip_grad_norm_(1.0)
            growth.step(scaler)
        growth.end_epoch()
    grown = growth.finish()
    assert [seed.fate for seed in grown.history.seeds()] == [Stage.FOSSILIZED]
    assert grown.validation.accuracy > 60.0


def test_clipping_leaves_no_part_above_the_limit() -> None:
    growth = growth_of(net())
    run_epoch(growth, 2)
    growth.backward((X[:50], Y[:50]))
    model = growth.learner.model
    growth.clip_grad_norm_(0.01)
    host, seed = growth.learner.gradient_norms().tolist()
    assert model.incubating
    assert host == pytest.approx(0.01, rel=1e-3)
    assert seed <= 0.0101


@pytest.mark.parametrize(
    "make", [torch.optim.lr_scheduler.CosineAnnealingLR, torch.optim.lr_scheduler.ReduceLROnPlateau]
)
def test_seeds_follow_schedulers_that_the_loop_steps(make: type) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = make is torch.optim.lr_scheduler.ReduceLROnPlateau
    scheduler = make(optimizer, patience=0, threshold=10.0) if plateau else make(optimizer, EPOCHS)
    growth = growth_of(model, optimizer, schedulers=[scheduler])
    for _ in range(EPOCHS):
        run_epoch(growth)
        scheduler.step(*([1.0] if plateau else []))
    rates = [group["lr"] for group in optimizer.param_groups]
    assert len(rates) == 2
    assert rates[0] == rates[1] < 0.1


# -- what would leave a seed untrained ----------------------------------------------------------------------------


def test_an_update_without_the_seeds_pass_is_refused() -> None:
    growth = growth_of(net())
    run_epoch(growth, 2)
    growth.begin_epoch()
    assert growth.learner.model.incubating
    nn.functional.cross_entropy(growth.model(X), Y).backward()
    with pytest.raises(RuntimeError, match=r"an update was made without growth.backward\(\), so the seed at 1"):
        growth.learner.optimizer.optimizer.step()


def test_an_attached_model_that_nobody_grows_warns() -> None:
    growing = esper.attach(net(), ["1"], X[:2])
    growing.germinate(growing.slots[0], "mlp", "linear", epoch=0)
    growing.train()
    with pytest.warns(esper.GrowthWarning, match="nothing trains it, measures it or moves it on"):
        growing(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        growing(X)  # once


def test_seeds_follow_the_hosts_mode() -> None:
    growth = growth_of(net())
    run_epoch(growth, 5)
    seed = growth.learner.model.seeds["0"]
    for training in (False, True):
        growth.model.train(training)
        growth.model(X[:4])
        assert seed.training is training


def test_misuse_is_one_line() -> None:
    growth = growth_of(net())
    with pytest.raises(RuntimeError, match=r"end_epoch\(\) was never called"):
        growth.finish()
    with pytest.raises(RuntimeError, match="no update was made in this epoch"):
        growth.end_epoch()
    growth.backward((X, Y))
    with pytest.raises(StateError, match="a state is taken between two epochs"):
        growth.state_dict()
    growth.step()
    for parameter in growth.model.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()
    with pytest.raises(RuntimeError, match="overwritten in place"):
        growth.end_epoch()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    with pytest.raises(ValueError, match=r"pass schedulers=\[scheduler\]"):
        growth_of(model, optimizer)
    with pytest.raises(ValueError, match=r"no group of the optimizer has the parameter '0\.weight'"):
        growth_of(net(), torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))


# -- to go on after a stop ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("controller", ["small", "heuristic", "schedule", "random"])
def test_every_epoch_can_be_gone_on_from_exactly(controller: str, tmp_path: Path) -> None:
    """Dropout and statistics included, and the controller's memory: all seeds, weights and records are the same."""

    def fresh() -> Growth:
        model = net(nn.BatchNorm1d(6), nn.Dropout(0.2))
        return growth_of(model, slots=["1", "5"], controller=controller, epochs=10, max_seeds=2)

    whole, stopped = fresh(), fresh()
    torch.manual_seed(1)
    run_epoch(whole, 10)
    torch.manual_seed(1)
    for _ in range(10):
        run_epoch(stopped)
        stopped.save_state(tmp_path / "growth.pt")
        stopped = fresh()
        torch.manual_seed(77)  # what a new process has is not what the old one had
        assert stopped.load_state(tmp_path / "growth.pt")
    assert [record.effect for record in stopped.records] == [record.effect for record in whole.records]
    assert stopped.records[1:] == whole.records[1:]  # in the first, nan is not nan
    assert same(stopped.learner.model, whole.learner.model)
    assert same(stopped.finish().model, whole.finish().model)


def test_a_state_of_another_run_is_refused(tmp_path: Path) -> None:
    growth = growth_of(net())
    run_epoch(growth)
    growth.save_state(tmp_path / "growth.pt")
    with pytest.raises(StateError, match="of another run: its epochs is 8, not 9"):
        growth_of(net(), epochs=9).load_state(tmp_path / "growth.pt")
    (tmp_path / "growth.pt").write_bytes(b"torn")
    with pytest.raises(StateError, match=r"growth.pt cannot be read; remove it to begin anew"):
        growth_of(net()).load_state(tmp_path / "growth.pt")
    assert not growth_of(net()).load_state(tmp_path / "nothing.pt")


KILLED = """
import os, signal, sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import esper
torch.set_num_threads(1)
folder, kind, last = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.manual_seed(0)
x = torch.randn(300, 2); y = (x.norm(dim=1) * 1.5).long().clamp(max=2)
model = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Dropout(0.1), nn.Linear(6, 3))
train = DataLoader(TensorDataset(x[:200], y[:200]), batch_size=50, shuffle=True)
val = DataLoader(TensorDataset(x[200:], y[200:]), batch_size=50)
same = dict(slots=["1"], epochs=9, controller="schedule")
def die(epoch):
    if epoch + 1 == last:
        os.kill(os.getpid(), signal.SIGKILL)
if kind == "grow":
    grown = esper.grow(model, train, val, control=True, checkpoint=folder, on_epoch=lambda a, b: die(a.epoch), **same)
else:
    growth = esper.Growth(model, torch.optim.AdamW(model.parameters(), lr=0.01), validate=val, **same)
    growth.load_state(f"{folder}/growth.pt")
    while not growth.over:
        for i, batch in enumerate(train):
            growth.backward(batch)
            growth.step()
            if i == 2:
                die(growth.epoch)  # in the middle of an epoch
        growth.end_epoch()
        growth.save_state(f"{folder}/growth.pt")
    grown = growth.finish()
torch.save(grown.model.state_dict(), f"{folder}/end.pt")
"""


@pytest.mark.parametrize("kind", ["loop", "grow"])
def test_a_killed_run_ends_with_the_weights_of_one_that_was_not(kind: str, tmp_path: Path) -> None:
    def run(folder: str, last: int) -> int:
        (tmp_path / folder).mkdir(exist_ok=True)
        words = [sys.executable, "-c", KILLED, str(tmp_path / folder), kind, str(last)]
        return subprocess.run(words, env=dict(os.environ), check=False, timeout=60).returncode

    assert run("whole", 0) == 0
    assert run("killed", 6) == -signal.SIGKILL
    assert run("killed", 0) == 0
    whole, killed = (torch.load(tmp_path / folder / "end.pt") for folder in ("whole", "killed"))
    assert whole.keys() == killed.keys()
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
    assert any("seed" in name for name in whole)


def test_a_checkpoint_needs_whole_passes(tmp_path: Path) -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=50)
    with pytest.raises(StateError, match="whole passes over the training loader"):
        esper.grow(net(), loader, loader, slots=["1"], epochs=9, updates_per_epoch=4, checkpoint=tmp_path)


# -- what the documentation shows ---------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]


def test_the_loop_of_the_documentation_is_within_a_point_of_grow(capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = (part.partition("```")[0] for part in (ROOT / "docs/own_loop.md").read_text().split("```python\n")[1:])
    names: dict[str, object] = {}
    exec(snippet, names)
    x, y = names["x"], names["y"]
    assert isinstance(x, Tensor)
    assert isinstance(y, Tensor)
    torch.manual_seed(0)
    torch.randn(600, 2)
    model = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    grown = esper.grow(
        model,
        (x[:400], y[:400]),
        (x[400:], y[400:]),
        slots=["1", "3"],
        controller="heuristic",
        epochs=20,
        batch_size=50,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    )
    print(names["grown"].validation.accuracy, grown.validation.accuracy)  # type: ignore[attr-defined]
    assert names["grown"].validation.accuracy >= grown.validation.accuracy - 1.0  # type: ignore[attr-defined]


def test_the_example_grows(capsys: pytest.CaptureFixture[str]) -> None:
    assert len((ROOT / "examples/own_loop.py").read_text().splitlines()) < 80
    names = runpy.run_path(str(ROOT / "examples/own_loop.py"))
    assert names["main"]().validation.accuracy > 85.0


def test_a_part_that_its_owner_froze_in_evaluation_mode_stays_so() -> None:
    """Measuring and the beginning of an epoch would else let the running averages of a frozen BatchNorm move."""
    model = net(nn.BatchNorm1d(6))
    model[2].eval()
    before = model[2].running_mean.clone()
    growth = growth_of(model)
    run_epoch(growth, EPOCHS)
    assert model.training
    assert not model[2].training
    assert torch.equal(model[2].running_mean, before)
    assert len(growth.finish().history.seeds()) > 0


def test_a_model_on_a_device_without_double_precision_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.training.own.gpu.WITHOUT_DOUBLE", {"cpu"})  # as if it were a Mac's
    with pytest.raises(ValueError, match="cannot grow on cpu, which has no double precision"):
        growth_of(net())

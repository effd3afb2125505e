"""In a loop of one's own: averages of weights, schedulers by update, and several processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_own_loop import EPOCHS, VAL, X, Y, growth_of, net, run_epoch, same, stages
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import esper
from esper.growth.plain import grafted
from esper.lifecycle import Rules, Stage
from esper.training.own.stepper import StateError

# -- averages of weights ----------------------------------------------------------------------------------------------


def test_without_a_seed_the_average_is_torchs() -> None:
    model = net()
    growth = growth_of(model, controller="none", average=0.9)
    reference = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(2):
        for rows in torch.arange(200).split(50):
            growth.backward((X[rows], Y[rows]))
            growth.step()
            reference.update_parameters(model)
        growth.end_epoch()
    assert same(growth.averaged, reference.module)


def test_a_seed_joins_the_average_with_its_first_weights_and_follows() -> None:
    model = net()
    growth = growth_of(model, average=0.5)
    expected: dict[str, torch.Tensor] = {}
    while Stage.FOSSILIZED not in stages(growth):
        for rows in torch.arange(200).split(50):
            growth.backward((X[rows], Y[rows]))
            growth.step()
            seed = growth.learner.model.slots[0].seed
            for name, p in {} if seed is None else dict(seed.body.named_parameters()).items():
                expected[name] = p.detach().clone() if name not in expected else (expected[name] + p.detach()) / 2
        growth.end_epoch()
    found = dict(grafted(growth.averaged)[0][1].seed.named_parameters())
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    # The training does not notice.
    run_epoch(growth, EPOCHS - growth.epoch)
    grown, plain = growth.finish(), growth_of(net())
    run_epoch(plain, EPOCHS)
    assert same(grown.model, plain.finish().model)
    averaged = growth.averaged
    assert [path for path, _ in grafted(averaged)] == [path for path, _ in grafted(grown.model)]
    assert not same(averaged, grown.model)
    with torch.no_grad():
        assert (averaged(VAL[0]).argmax(1) == VAL[1]).float().mean() > 0.4


def test_an_average_goes_on_exactly_and_belongs_to_its_run(tmp_path: Path) -> None:
    whole = growth_of(net(), average=0.9)
    run_epoch(whole, 5)
    whole.save_state(tmp_path / "growth.pt")
    run_epoch(whole, EPOCHS - 5)
    again = growth_of(net(), average=0.9)
    assert again.load_state(tmp_path / "growth.pt")
    run_epoch(again, EPOCHS - 5)
    whole.finish()
    again.finish()
    assert same(whole.averaged, again.averaged)
    with pytest.raises(StateError, match="of a run with average="):
        growth_of(net()).load_state(tmp_path / "growth.pt")


def test_an_epoch_that_is_undone_leaves_no_trace_in_the_average() -> None:
    growth = growth_of(net(), controller="none", average=0.5)
    run_epoch(growth)
    before = growth.averaged
    for rows in torch.arange(200).split(50):
        growth.backward(lambda rows=rows: nn.functional.cross_entropy(growth.model(X[rows]), Y[rows]) * torch.nan)
        growth.step()
    assert growth.end_epoch().verdict is not None
    assert same(growth.averaged, before)


def test_what_is_no_average() -> None:
    for decay in (0.0, 1.0, 2.0, -0.1):
        with pytest.raises(ValueError, match="average= is the decay of a moving average, between 0 and 1"):
            growth_of(net(), average=decay)
    with pytest.raises(RuntimeError, match="no average was kept: pass average="):
        growth_of(net()).averaged  # noqa: B018


# -- after growth -----------------------------------------------------------------------------------------------------


def test_the_model_that_was_trained_is_the_grown_one_and_its_optimizer_goes_on() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    growth = growth_of(model, optimizer)
    run_epoch(growth, EPOCHS)
    expected = model.eval()(X).detach()
    grown = growth.finish(in_place=True)
    assert grown.model is model
    assert len(grafted(model)) == 1
    assert torch.equal(model(X), expected)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}
    assert len(optimizer.state) == len(held)  # moments, too
    # A second growth of the same model, by the same optimizer, at the same place.
    again = growth_of(model.train(), optimizer, rules=Rules(training_epochs=1, shadow_benefit=1000.0))
    run_epoch(again, EPOCHS)
    assert {story.fate for story in again.finish(in_place=True).history.seeds()} <= {Stage.PRUNED}
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == held  # the first seed's stay
    assert len(grafted(model)) == 1


# -- schedulers by update ---------------------------------------------------------------------------------------------

LONG = Rules(training_epochs=99)


@pytest.mark.parametrize("kind", ["onecycle", "linear"])
def test_seeds_follow_a_scheduler_that_steps_with_every_update(kind: str, tmp_path: Path) -> None:
    def run(epochs: int, resume: bool = False) -> tuple[esper.Growth, list[float]]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedulers = torch.optim.lr_scheduler
        scheduler = (
            schedulers.OneCycleLR(optimizer, 0.2, total_steps=4 * EPOCHS)
            if kind == "onecycle"
            else schedulers.LinearLR(optimizer, 1.0, 0.1, 4 * EPOCHS)
        )
        growth = growth_of(model, optimizer, schedulers=[scheduler], rules=LONG)
        if resume:
            assert growth.load_state(tmp_path / "growth.pt")
        rates: list[float] = []
        while growth.epoch < epochs:
            for rows in torch.arange(200).split(50):
                growth.backward((X[rows], Y[rows]))
                growth.step()
                scheduler.step()
                assert len({group["lr"] for group in optimizer.param_groups}) == 1  # seeds and host alike
                rates.append(optimizer.param_groups[0]["lr"])
            growth.end_epoch()
        return growth, rates

    whole, rates = run(EPOCHS)
    assert len(whole.learner.optimizer.optimizer.param_groups) == 2
    model = net()
    alone = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedulers = torch.optim.lr_scheduler
    reference = (
        schedulers.OneCycleLR(alone, 0.2, total_steps=4 * EPOCHS)
        if kind == "onecycle"
        else schedulers.LinearLR(alone, 1.0, 0.1, 4 * EPOCHS)
    )
    for rate in rates:
        alone.step()
        reference.step()
        assert rate == pytest.approx(alone.param_groups[0]["lr"], rel=1e-12)
    half, _ = run(4)
    half.save_state(tmp_path / "growth.pt")
    again, _ = run(EPOCHS, resume=True)
    assert same(whole.finish().model, again.finish().model)


# -- several processes ------------------------------------------------------------------------------------------------


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match=r"Growth trains in one process: gradients of seeds are not exchanged .*DDP"):
        growth_of(net())


def test_a_parallel_wrapper_is_refused(tmp_path: Path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(net())
        with pytest.raises(ValueError, match=r"is a parallel wrapper: pass its \.module"):
            growth_of(wrapped)
    finally:
        torch.distributed.destroy_process_group()

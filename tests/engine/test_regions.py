"""Regional compilation: slots stay outside, failures are told and survived.

Covers: R141
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException

from esper.actions import WAIT
from esper.engine import regions
from esper.engine.graphs import GraphEngine
from esper.engine.precision import Precision
from esper.engine.prepare import task_learner
from esper.engine.regions import Region, compile_regions
from esper.growth.export import plain_model
from esper.lifecycle import Rules
from esper.training.speed import Work, generated_images
from small_worlds import BUILT_IN, FOREIGN, germinate, learner_for, run_epoch


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    """The tests below put something else in the place of `torch.compile`, which must neither be kept nor be found."""
    for known in (regions._compiled, regions.compiled_loss, regions.compiler_works):
        known.cache_clear()
    yield
    for known in (regions._compiled, regions.compiled_loss, regions.compiler_works):
        known.cache_clear()


def no_compiler(function: Any, **options: Any) -> Any:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise TorchDynamoException("no compiler on this machine\nlong trace")

    return fail


def test_regions_hold_no_slot_and_cover_all_other_parameters() -> None:
    for name, world in (BUILT_IN | FOREIGN).items():
        model = world.grown()
        slots = {slot.module for slot in model.slots}
        for region in model.regions:
            assert not any(module in slots for module in region.modules() if module is not region), name
        inside = {id(p) for region in model.regions for p in region.parameters()}
        if name not in ("nested", "tangled"):  # a block with a slot in it, and a layer that is called twice, stay out
            assert inside == {id(p) for p in model.host.parameters()} or name == "gpt", name


def test_compiled_networks_train_as_before_and_seeds_are_compiled_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile
    # "eager": dynamo traces and guards, and no compiler for C++ is needed
    monkeypatch.setattr(torch, "compile", lambda f, **options: compiled(f, backend="eager", **options))
    plain, regional = learner_for(BUILT_IN["conv1d"]), learner_for(BUILT_IN["conv1d"])
    compile_regions(regional.model)
    for action in (None, germinate(0, "conv"), None):
        expected, seen = run_epoch(plain, action), run_epoch(regional, action)
        assert seen.measured.loss == pytest.approx(expected.measured.loss, rel=1e-5)
        assert seen.trained.loss == pytest.approx(expected.trained.loss, rel=1e-5)
    assert isinstance(vars(regional.model.seeds["0"])["forward"], Region)
    assert isinstance(vars(regional.model.host)["pool"], Region)  # between the slots too, but in no module
    for region in regional.model.regions:
        compiled_forward = vars(region).get("forward")
        assert (compiled_forward is None) == (not list(region.children()))  # a single layer has nothing to fuse
        assert compiled_forward is None or compiled_forward.failure == ""


def test_the_graph_engine_trains_compiled_networks_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions, seeds and the loss, through a seed's whole life; a shadow pass asks for no gradients of the host."""
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compiled(f, backend="eager", **options))
    monkeypatch.setattr("esper.engine.precision.BF16_DEVICES", frozenset({"cpu"}))
    task = generated_images(Work(channels=(4, 6), size=8, batch=16, updates=3, validation=16))
    rules = Rules(training_epochs=1, gradient_activity=0.0, shadow_benefit=-1e9, blending_epochs=2)
    losses, captures = [], []
    for regional in (False, True):
        learners = [task_learner(task, i, 9, rules=rules, precision=Precision.BF16, compiled=regional) for i in (0, 1)]
        engine = GraphEngine(learners, [None, None])
        records = [engine.step([germinate(i, "conv") if epoch == 1 else WAIT for i in (0, 1)]) for epoch in range(6)]
        losses.append([x for row in records for r in row for x in (r.trained.loss, r.measured.loss)])
        captures.append(engine.cache.captures)
        assert isinstance(learners[0].loss, Region) == regional
    assert learners[0].loss is learners[1].loss  # or they could not share what was captured
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert captures[0] == captures[1]


def test_a_region_that_does_not_compile_runs_as_it_is_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "compile", no_compiler)
    plain, regional = learner_for(BUILT_IN["mlp"]), learner_for(BUILT_IN["mlp"])
    compile_regions(regional.model)
    with caplog.at_level(logging.WARNING):
        seen = run_epoch(regional)
    assert seen.measured == run_epoch(plain).measured
    told = [record.getMessage() for record in caplog.records]
    layered = [region for region in regional.model.regions if list(region.children())]
    assert len(told) == len(layered) > 0  # once each, not at every call
    assert all("runs uncompiled: no compiler on this machine" in message for message in told)


def test_where_nothing_compiles_networks_run_as_they_are_and_the_log_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "compile", no_compiler)
    task = generated_images(Work(channels=(4, 6), size=8, batch=16, updates=3, validation=16))
    with caplog.at_level(logging.WARNING):
        learners = [task_learner(task, seed, 9, compiled=True) for seed in range(3)]
        run_epoch(learners[0], germinate(0, "conv"))
    assert [record.getMessage() for record in caplog.records] == [
        "torch.compile does not work on cpu, so nothing is compiled: no compiler on this machine"
    ]
    assert learners[0].loss is task.loss


def test_an_exported_network_has_nothing_compiled_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    learner = learner_for(BUILT_IN["conv1d"])
    own = learner.model.host.stages[1].forward
    learner.model.host.stages[1].__dict__["forward"] = own  # somebody's own, which stays
    compile_regions(learner.model)
    run_epoch(learner, germinate(0, "conv"))
    exported = plain_model(learner.model)
    assert any(isinstance(value, Region) for module in learner.model.modules() for value in vars(module).values())
    assert not any(isinstance(value, Region) for module in exported.modules() for value in vars(module).values())
    assert "forward" in vars(exported.stages[1])
    assert "forward" not in vars(exported.stages[0])
    assert "pool" not in vars(exported)

"""Regional compilation: slots stay outside, failures are told and survived.

Covers: R141
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException

from esper.engine.regions import Region, compile_regions
from small_worlds import BUILT_IN, FOREIGN, germinate, learner_for, run_epoch


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
    assert all(vars(region)["forward"].failure == "" for region in regional.model.regions)


def test_a_region_that_does_not_compile_runs_as_it_is_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(function: Any, **options: Any) -> Any:
        def fail(*args: Any, **kwargs: Any) -> None:
            raise TorchDynamoException("no compiler on this machine\nlong trace")

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    plain, regional = learner_for(BUILT_IN["mlp"]), learner_for(BUILT_IN["mlp"])
    compile_regions(regional.model)
    with caplog.at_level(logging.WARNING):
        seen = run_epoch(regional)
    assert seen.measured == run_epoch(plain).measured
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == len(regional.model.regions)  # once each, not at every call
    assert all("runs uncompiled: no compiler on this machine" in message for message in told)

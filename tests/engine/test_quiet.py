"""The garbage collector while a GPU works: what was there before is left alone, and only until the end."""

from __future__ import annotations

import gc

import pytest
import torch

from esper.engine.quiet import quiet_collector

GPU = torch.device("cuda")  # named, never used


def test_what_was_there_is_frozen_until_the_end_even_of_a_failure() -> None:
    with quiet_collector(GPU):
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
    with pytest.raises(RuntimeError, match="broken"), quiet_collector(GPU):
        raise RuntimeError("broken")
    assert gc.get_freeze_count() == 0


def test_garbage_is_collected_before_and_not_frozen() -> None:
    class Circle:
        def __init__(self) -> None:
            self.itself = self

    Circle()
    with quiet_collector(GPU):
        gc.unfreeze()
        assert not any(type(thing) is Circle for thing in gc.get_objects())


def test_a_freeze_of_somebody_else_stays_and_a_cpu_needs_none() -> None:
    with quiet_collector(torch.device("cpu")):
        assert gc.get_freeze_count() == 0
    with quiet_collector(GPU):
        with quiet_collector(GPU):
            pass
        assert gc.get_freeze_count() > 0


def test_a_full_collection_comes_only_when_it_is_asked_for() -> None:
    usual = gc.get_threshold()
    full: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            full.append(1)

    with quiet_collector(GPU):
        gc.callbacks.append(note)
        try:
            kept = [[[i]] for i in range(400_000)]  # so many young objects that there would be several
        finally:
            gc.callbacks.remove(note)
    assert kept
    assert not full
    assert gc.get_threshold() == usual

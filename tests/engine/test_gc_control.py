"""The garbage collector while a GPU works: what was there before is left alone, and only until the end."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from esper.engine.gc_control import FROZEN_AT_START, FULL, collect_garbage, deferred_gc

GPU = torch.device("cuda")  # named, never used


def test_what_was_there_is_frozen_until_the_end_even_of_a_failure() -> None:
    with deferred_gc(GPU):
        assert gc.get_freeze_count() > FROZEN_AT_START
    assert gc.get_freeze_count() <= FROZEN_AT_START
    with pytest.raises(RuntimeError, match="broken"), deferred_gc(GPU):
        raise RuntimeError("broken")
    assert gc.get_freeze_count() <= FROZEN_AT_START


class Circle:
    """Garbage that only a collector can free, as a network is."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_is_collected_before_and_not_frozen() -> None:
    Circle()
    with deferred_gc(GPU):
        gc.unfreeze()
        assert not any(type(thing) is Circle for thing in gc.get_objects())


def test_a_freeze_of_somebody_else_stays_and_a_cpu_needs_none() -> None:
    with deferred_gc(torch.device("cpu")):
        assert gc.get_freeze_count() <= FROZEN_AT_START
    with deferred_gc(GPU):
        with deferred_gc(GPU):
            pass
        assert gc.get_freeze_count() > FROZEN_AT_START


def test_the_few_objects_that_an_interpreter_has_frozen_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = gc.get_threshold()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)  # as Python 3.12 says when nobody has frozen anything
    with deferred_gc(GPU):
        assert gc.get_threshold() != usual
    assert gc.get_threshold() == usual


def test_a_full_collection_comes_only_when_it_is_asked_for() -> None:
    usual = gc.get_threshold()
    full: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            full.append(1)

    with deferred_gc(GPU):
        gc.callbacks.append(note)
        try:
            kept = [[[i]] for i in range(400_000)]  # so many young objects that there would be several
        finally:
            gc.callbacks.remove(note)
    assert kept
    assert not full
    assert gc.get_threshold() == usual


def test_what_was_dropped_since_the_last_call_is_collected_and_older_garbage_after_some_calls() -> None:
    with deferred_gc(GPU):
        collect_garbage()
        older, kept = Circle(), [[[i]] for i in range(50_000)]  # many young collections pass over it
        watched = weakref.ref(older)
        collect_garbage()
        del older
        young = weakref.ref(Circle())
        collect_garbage()
        assert young() is None
        assert watched() is not None  # it outlived a call, and counts as old
        for _ in range(FULL):
            collect_garbage()
        assert watched() is None
        assert kept


def test_networks_that_lived_through_a_collection_by_somebody_else_are_collected_at_once() -> None:
    with deferred_gc(GPU):
        collect_garbage()
        network = Circle()
        watched = weakref.ref(network)
        gc.collect(1)  # as torch.compile does
        gc.collect(1)
        del network
        collect_garbage()
        assert watched() is None


def test_networks_that_are_no_longer_young_are_collected_where_nothing_is_quiet() -> None:
    older = Circle()
    watched = weakref.ref(older)
    gc.collect()
    del older
    collect_garbage()
    assert watched() is None

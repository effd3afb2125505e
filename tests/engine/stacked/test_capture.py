"""Stacks take the streams of stacks that are gone: every stream that cuBLAS has seen keeps memory for good."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import pytest
import torch

from esper.engine.stacked.capture import Capture


class NoGraph:
    def capture_begin(self, **settings: object) -> None: ...
    def capture_end(self) -> None: ...


def test_a_stream_is_used_again_once_its_stack_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(object()) or made[-1])
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 0)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", NoGraph)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    device = torch.device("cpu", 7)  # of no other test
    first, second = Capture(device), Capture(device)
    assert first.stream is not second.stream
    for _ in range(5):
        del first
        gc.collect()
        first = Capture(device)
        assert first.stream is not second.stream
    assert len(made) == 2

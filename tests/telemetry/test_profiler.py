"""Phase timers, and torch's profiler on whatever device there is.

Covers: R135, R136
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity

from esper.telemetry.profiler import PhaseTimers, accelerator, activities, profiling


def test_timers_add_up_by_phase_and_start_afresh() -> None:
    timers = PhaseTimers()
    for _ in range(2):
        with timers("outer"):
            time.sleep(0.01)
            with timers("inner"):
                time.sleep(0.01)
    seen = timers.drain()
    assert set(seen) == {"seconds/outer", "seconds/inner"}
    assert 0.02 <= seen["seconds/inner"] < seen["seconds/outer"]
    assert timers.drain() == {}


def test_a_phase_that_fails_is_timed_too() -> None:
    timers = PhaseTimers()
    with pytest.raises(KeyError), timers("broken"):
        raise KeyError
    assert timers.seconds["broken"] > 0.0


def test_a_timer_costs_next_to_nothing() -> None:
    timers = PhaseTimers()
    began = time.perf_counter()
    for _ in range(10_000):
        with timers("phase"):
            pass
    assert time.perf_counter() - began < 0.5  # 1 µs each on an idle machine; 50 µs would fail


def test_a_profile_lands_in_the_folder_that_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with profiling(Path("profile"), wait=1, warm_up=1, active=2) as profile:
        monkeypatch.chdir(tmp_path / "elsewhere")
        for _ in range(6):
            torch.ones(16, 16) @ torch.ones(16, 16)
            profile.step()
    assert profile.folder == tmp_path / "profile"
    assert [file.name for file in profile.files] == ["trace-1.json", "summary-1.txt"]
    trace = json.loads((tmp_path / "profile" / "trace-1.json").read_text())
    assert any("matmul" in str(event.get("name")) for event in trace["traceEvents"])
    assert "aten::" in (tmp_path / "profile" / "summary-1.txt").read_text()


def test_a_second_profile_does_not_overwrite_the_first(tmp_path: Path) -> None:
    for number in (1, 2):
        with profiling(tmp_path, wait=0, warm_up=1, active=1) as profile:
            for _ in range(2):
                torch.ones(3).sum()
                profile.step()
        assert profile.files[0].name == f"trace-{number}.json"


def test_without_a_folder_nothing_is_profiled() -> None:
    with profiling(None) as profile:
        profile.step()
    assert profile.files == []


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot write profiles to"), profiling(tmp_path / "file" / "in"):
        pass


@pytest.mark.parametrize(
    ("available", "expected"),
    [
        ((True, False, False), "cuda"),
        ((False, True, False), "xpu"),
        ((False, False, True), "mps"),
        ((False,) * 3, "cpu"),
    ],
)
def test_any_accelerator(available: tuple[bool, ...], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, here in zip((torch.cuda, torch.xpu, torch.backends.mps), available, strict=True):
        monkeypatch.setattr(module, "is_available", lambda here=here: here)
    assert accelerator() == expected


def test_activities() -> None:
    assert activities("cuda") == [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    assert activities("xpu") == [ProfilerActivity.CPU, ProfilerActivity.XPU]
    assert activities("mps") == activities("cpu") == [ProfilerActivity.CPU]
    with pytest.raises(ValueError, match="cannot profile 'tpu'"):
        activities("tpu")

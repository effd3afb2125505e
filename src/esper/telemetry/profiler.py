"""Where the time goes: phase timers that are always on, and torch's profiler for those who ask.

A timer costs about a microsecond a phase. It does not wait for the device: on a GPU the time of a phase is that of
handing out work, plus whatever waiting the phase does itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch
from torch.profiler import ProfilerActivity

TIMER_PREFIX = "seconds/"
WAIT, WARM_UP, ACTIVE = 1, 1, 3
"""Steps that torch's profiler leaves out, runs without keeping, and keeps."""
SUMMARY_ROWS = 40


class PhaseTimers:
    """Wall time by named phase. Phases may nest; an inner one counts in the outer one too."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """Since the last `drain`."""

    def __call__(self, name: str) -> _PhaseTimer:
        """`with timers("collect"): …`"""
        return _PhaseTimer(self.seconds, name)

    def drain(self) -> dict[str, float]:
        """Seconds by phase since the last call, under their logged names."""
        named = {TIMER_PREFIX + name: seconds for name, seconds in self.seconds.items()}
        self.seconds.clear()
        return named


class _PhaseTimer:
    __slots__ = ("_began", "_name", "_seconds")

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds, self._name = seconds, name

    def __enter__(self) -> None:
        self._began = perf_counter()

    def __exit__(self, *error: object) -> None:
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + perf_counter() - self._began


@dataclass(slots=True)
class Profile:
    """A running profile; `step` marks the end of each unit of work (an update)."""

    folder: Path | None
    files: list[Path] = field(default_factory=list)
    """What has been written."""
    _profiler: torch.profiler.profile | None = None

    def step(self) -> None:
        if self._profiler is not None:
            self._profiler.step()

    def _write(self, profiler: torch.profiler.profile) -> None:
        assert self.folder is not None
        number = len(list(self.folder.glob("trace-*.json"))) + 1
        trace, summary = self.folder / f"trace-{number}.json", self.folder / f"summary-{number}.txt"
        profiler.export_chrome_trace(str(trace))
        key = "self_cpu_time_total" if accelerator() in ("cpu", "mps") else f"self_{accelerator()}_time_total"
        summary.write_text(profiler.key_averages().table(sort_by=key, row_limit=SUMMARY_ROWS), "utf-8")
        self.files += [trace, summary]


def accelerator() -> str:
    """The kind of accelerator that torch can use here: cuda, xpu, mps, or cpu for none."""
    if torch.cuda.is_available():
        return "cuda"
    if torch.xpu.is_available():
        return "xpu"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def activities(kind: str) -> list[ProfilerActivity]:
    """What torch's profiler can see on that kind of device (R135); MPS has a profiler of its own besides."""
    seen = {"cuda": [ProfilerActivity.CUDA], "xpu": [ProfilerActivity.XPU], "mps": [], "cpu": []}
    if kind not in seen:
        raise ValueError(f"cannot profile {kind!r}: choose one of {', '.join(seen)}")
    return [ProfilerActivity.CPU, *seen[kind]]


@contextmanager
def profiling(
    folder: Path | None, *, wait: int = WAIT, warm_up: int = WARM_UP, active: int = ACTIVE
) -> Iterator[Profile]:
    """Profile the steps inside, on whatever device there is, into `folder`; None profiles nothing.

    Of the steps, `wait` are left out and `warm_up` run without being kept; then `active` are kept, once: traces are
    large. The folder is made absolute at once, so that it does not move with the working directory.
    """
    if folder is None:
        yield Profile(None)
        return
    target = folder.expanduser().absolute()
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"cannot write profiles to {target}: {error.strerror}") from error
    kind = accelerator()
    profile = Profile(target)
    profile._profiler = torch.profiler.profile(
        activities=activities(kind),
        schedule=torch.profiler.schedule(wait=wait, warmup=warm_up, active=active, repeat=1),
        on_trace_ready=profile._write,
        record_shapes=True,
        profile_memory=True,
    )
    with _mps_signposts(kind), profile._profiler:
        yield profile


@contextmanager
def _mps_signposts(kind: str) -> Iterator[None]:
    """Apple's Instruments reads these; torch's own profiler does not see MPS kernels."""
    if kind != "mps":
        yield
        return
    torch.mps.profiler.start()
    try:
        yield
    finally:
        torch.mps.profiler.stop()

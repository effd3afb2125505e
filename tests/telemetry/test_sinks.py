"""TensorBoard and Weights & Biases: a clear error when missing, the right numbers when present.

Covers: R092
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from telemetry_samples import record_update, sample_episodes

from esper.telemetry.recorder import RunRecorder
from esper.telemetry.records import Event
from esper.telemetry.sinks import PackageMissingError, ScalarSink, TensorBoardSink, WandbSink


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_with_the_way_to_get_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [m for m in sys.modules if m.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)  # an import of None is an ImportError
    with pytest.raises(ImportError, match=rf"pip install 'esper\[{name}\]'") as caught:
        TensorBoardSink(tmp_path) if name == "tensorboard" else WandbSink("project")
    assert isinstance(caught.value, PackageMissingError)


class Calls:
    """Stands for the writer of either package: notes every call."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *words, **options: self.seen.append((name, words, options))


def use(sink: RunRecorder) -> None:
    sink.episodes(sample_episodes(1, {"score": 40.0}, {"score": 60.0}))
    record_update(sink, 2)
    sink.metrics(1, {"kl": 0.5})
    sink.event(Event("lifecycle", 1, "not of interest"))
    sink.flush()
    sink.close()


def test_tensorboard_gets_numbers_and_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, module = Calls(), ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = lambda folder: calls  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    use(TensorBoardSink(tmp_path))
    scalars = {words for name, words, _ in calls.seen if name == "add_scalar"}
    assert ("kl", 0.5, 1) in scalars
    assert ("train/score", 60.0, 2) in scalars
    assert [words for name, words, _ in calls.seen if name == "add_text"] == [("governor", "the loss diverged", 2)]
    assert [name for name, _, _ in calls.seen][-2:] == ["flush", "close"]


def test_wandb_gets_numbers_and_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, module, began = Calls(), ModuleType("wandb"), {}
    module.init = lambda **options: began.update(options) or calls  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    use(WandbSink("esper", name="a", folder=tmp_path, settings={"envs": 16}, mode="offline"))
    assert began == {"project": "esper", "name": "a", "dir": str(tmp_path), "config": {"envs": 16}, "mode": "offline"}
    logged = {options["step"]: words[0] for name, words, options in calls.seen if name == "log"}
    assert logged[2]["train/score"] == 60.0
    assert logged[1]["kl"] == 0.5
    assert [options["level"] for name, _, options in calls.seen if name == "alert"] == ["WARN"]
    assert calls.seen[-1][0] == "finish"


def test_means_of_episodes_wait_for_their_update_and_nothing_piles_up() -> None:
    sink = ScalarSink()
    for score in (40.0, 60.0):
        sink.episodes(sample_episodes(2, {"score": score}))
    sink.episodes(sample_episodes(1))
    sink.episodes(sample_episodes(2, {"score": 70.0}, arm="heuristic"))
    found = sink.with_means(2, {})
    assert (found["train/score"], found["heuristic/score"]) == (50.0, 70.0)
    assert sink.with_means(2, {}) == {}
    assert not sink._results


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed (an optional extra)")
def test_tensorboard_can_read_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    use(TensorBoardSink(tmp_path))
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    assert [(e.step, round(e.value, 6)) for e in reader.Scalars("kl")] == [(2, 0.02), (1, 0.5)]
    assert [(e.step, e.value) for e in reader.Scalars("train/score")] == [(2, 60.0)]

"""The benchmark of the engine and `esper bench`: what they refuse, and what an interruption leaves behind."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from esper.cli import main
from esper.training.speed import Images

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import engine as benchmark

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "cuda", "--parts", "steps,pictures"], "no pictures; there are steps, images"),
        (["--device", "cpu", "--parts", "steps"], "--parts is for a GPU"),
    ],
)
def test_parts_that_cannot_be_measured_are_refused(words: list[str], said: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="2"):
        benchmark.main(words)
    assert said in capsys.readouterr().err


def test_a_run_that_is_cut_off_keeps_the_results_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_off(device: torch.device) -> Iterator[Images]:
        yield Images("work", 64, "eager", "fp32", 2.0, 1.0, 3.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmark, "images", cut_off)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "some GPU")
    file = tmp_path / "results.json"
    with pytest.raises(KeyboardInterrupt):
        benchmark.main(["--device", "cuda", "--parts", "images", "--json", str(file)])
    assert [one["per_second"] for one in json.loads(file.read_text())["images"]] == [2.0]


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--compiled"], "--compiled is for CUDA graphs"), (["--precision", "bf16"], "--precision bf16 is for GPUs")],
)
def test_bench_says_what_a_cpu_cannot_do(words: list[str], message: str, capsys: Capture) -> None:
    assert main(["bench", "--device", "cpu", *words]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"esper bench: {message}")
    assert said.endswith("leave it out, or name a GPU\n")
    assert said.count("\n") == 1

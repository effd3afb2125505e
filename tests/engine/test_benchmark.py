"""`esper bench`: what it measures, and what it refuses."""

from __future__ import annotations

import json

import pytest

from esper.cli import main

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("words", [["--epochs", "4"], ["--bare"]])
def test_bench_measures_what_it_is_asked_for(words: list[str], capsys: Capture) -> None:
    shared = ["bench", "--device", "cpu", "--work", "tiny", "--envs", "1,2", "--episodes", "1"]
    assert main([*shared, *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["envs"] for one in found] == [1, 2]
    for one in found:
        assert one["work"] == "8-16-16 channels, 8×8 images, batch 64"
        assert one["engine"] == "eager"
        assert 0.0 < one["slowest"] <= one["per_second"] <= one["fastest"]
        assert one["live"] == (None if "--bare" in words else 1.0)
    assert main([*shared, *words]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5  # a title, an empty line, the head, and a line per size


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--compiled"], "--compiled is for GPUs"), (["--precision", "bf16"], "--precision bf16 is for GPUs")],
)
def test_bench_says_what_a_cpu_cannot_do(words: list[str], message: str, capsys: Capture) -> None:
    assert main(["bench", "--device", "cpu", *words]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"esper bench: {message}")
    assert said.endswith("leave it out, or name a GPU\n")
    assert said.count("\n") == 1

"""`make demo`: the commands that it shows are ones that there are, and a second demo leaves the first one alone."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from esper.agent.shipped import shipped_names
from esper.cli import _parse
from esper.cli.compare import Compare
from esper.cli.grow import Grow
from esper.tasks.family import get_family


@pytest.fixture
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", Path(__file__).parents[2] / "examples" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_demos(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[list[str]] = []

    def esper(words: list[str]) -> int:
        asked.append(words)
        Path(words[words.index("--out") + 1]).mkdir(parents=True)
        return 0

    monkeypatch.setattr(demo, "esper", esper)
    demo.main()
    demo.main()
    commands = [_parse(words[0], words[1:]) for words in asked]
    compared = [command for command in commands if isinstance(command, Compare)]
    grown = [command for command in commands if isinstance(command, Grow)]
    assert [command.out for command in compared] == [Path("runs/demo/comparison"), Path("runs/demo-2/comparison")]
    assert [command.out for command in grown] == [Path("runs/demo/grown"), Path("runs/demo-2/grown")]
    (first, _), (judged, _) = grown, compared
    assert first.controller in shipped_names()
    assert judged.controllers == f"none,heuristic,{first.controller}"
    assert first.task == judged.task
    assert first.draw is not None
    assert first.draw < judged.episodes  # one of those in the table
    assert get_family(first.task).draw(first.draw, held_out=True).facts["answer"] != "none"
    assert "train --preset demo" in capsys.readouterr().out


def test_a_demo_ends_where_a_command_fails(demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[str] = []
    monkeypatch.setattr(demo, "esper", lambda words: asked.append(words[0]) or 130)
    with pytest.raises(SystemExit) as stopped:
        demo.main()
    assert stopped.value.code == 130
    assert asked == ["compare"]

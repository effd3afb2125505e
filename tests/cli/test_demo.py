"""`make demo`: the commands that it shows are ones that there are, and a second demo leaves the first one alone."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from esper.cli import _parse
from esper.cli.grow import Grow
from esper.cli.train import Train
from esper.tasks.family import get_family


@pytest.fixture
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", Path(__file__).parents[2] / "examples" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_demos(demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[list[str]] = []

    def esper(words: list[str]) -> int:
        asked.append(words)
        if words[0] == "train":
            Path(words[words.index("--run") + 1]).mkdir(parents=True)
        return 0

    monkeypatch.setattr(demo, "esper", esper)
    demo.main()
    demo.main()
    commands = [_parse(words[0], words[1:]) for words in asked]
    trained = [command for command in commands if isinstance(command, Train)]
    grown = [command for command in commands if isinstance(command, Grow)]
    assert [command.run_dir for command in trained] == [Path("runs/demo"), Path("runs/demo-2")]
    assert [command.controller for command in grown] == ["runs/demo", "runs/demo-2"]
    assert [command.out for command in grown] == [Path("runs/demo/grown"), Path("runs/demo-2/grown")]
    (first, _) = grown
    assert first.draw is not None
    assert get_family(first.task).draw(first.draw, held_out=True).facts["answer"] != "none"


def test_a_demo_ends_where_a_command_fails(demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[str] = []
    monkeypatch.setattr(demo, "esper", lambda words: asked.append(words[0]) or 130)
    with pytest.raises(SystemExit) as stopped:
        demo.main()
    assert stopped.value.code == 130
    assert asked == ["train"]

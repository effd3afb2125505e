"""Configuration files are strict: what is wrong is said, with the nearest right word.

Covers: R054
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import tyro

from esper.config import ConfigError, checked, read_config


@dataclass(frozen=True)
class Settings:
    name: str = "x"
    rate: float = 0.5
    count: int = 3
    folder: Path | None = None
    flag: bool = False
    mode: Literal["slow", "fast"] = "slow"
    out_dir: Annotated[str, tyro.conf.arg(name="out")] = "here"
    agent: dict[str, Any] | None = None
    pair: tuple[float, float] = (1.0, 2.0)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_values_replace_defaults(tmp_path: Path) -> None:
    path = write(tmp_path / "a.toml", 'rate = 2\nfolder = "out"\nflag = true\nmode = "fast"\n')
    assert read_config(path, Settings) == Settings(rate=2.0, folder=Path("out"), flag=True, mode="fast")


def test_json_and_dashes_work_too(tmp_path: Path) -> None:
    assert read_config(write(tmp_path / "a.json", '{"count": 7}'), Settings).count == 7


def test_an_option_has_the_name_that_the_shell_knows_it_by(tmp_path: Path) -> None:
    assert read_config(write(tmp_path / "a.toml", 'out = "there"'), Settings).out_dir == "there"
    with pytest.raises(ConfigError, match="did you mean 'out'"):
        read_config(write(tmp_path / "b.toml", 'out_dir = "there"'), Settings)


def test_tables_and_lists(tmp_path: Path) -> None:
    found = read_config(write(tmp_path / "a.toml", "pair = [3, 4.5]\n[agent]\nepochs = 2\n"), Settings)
    assert found.agent == {"epochs": 2}
    assert found.pair == (3.0, 4.5)
    assert checked({"count": 4}, Settings, "there") == {"count": 4}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cuont = 3", "did you mean 'count'"),
        ("count = 2.5", "must be int"),
        ("count = true", "must be int"),
        ("name = 3", "must be str"),
        ('mode = "quick"', "must be one of slow, fast"),
        ("count = ", "not valid TOML"),
        ("agent = 3", "must be a table"),
        ("pair = [1]", "must be a list of 2"),
        ('pair = [1, "x"]', "must be float"),
    ],
)
def test_mistakes_are_named(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(write(tmp_path / "a.toml", text), Settings)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.toml"):
        read_config(tmp_path / "nothing.toml", Settings)

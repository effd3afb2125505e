"""Configuration files are strict: what is wrong is said, with the nearest right word.

Covers: R054
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest
import tyro

from esper.config import WHOLE_AT_LEAST_1, ConfigError, check_ranges, read_table, settings_from


@dataclass(frozen=True)
class Agent:
    epochs: int = 4
    discount: float = 0.9

    def __post_init__(self) -> None:
        check_ranges(self, {"epochs": WHOLE_AT_LEAST_1})


@dataclass(frozen=True)
class Settings:
    name: str = "x"
    rate: float = 0.5
    count: int = 3
    folder: Path | None = None
    flag: bool = False
    mode: Literal["slow", "fast"] = "slow"
    out_dir: Annotated[str, tyro.conf.arg(name="out")] = "here"
    agent: Agent = Agent()
    pair: tuple[float, float] = (1.0, 2.0)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def read_config(path: Path, kind: type[Settings]) -> Settings:
    return settings_from(read_table(path), kind, str(path))


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
    assert found.agent == Agent(epochs=2)
    assert found.pair == (3.0, 4.5)


def test_data_replace_the_values_of_a_default_also_inside_a_table() -> None:
    default = Settings(count=7, agent=Agent(discount=0.5))
    found = settings_from({"rate": 1, "agent": {"epochs": 2}}, Settings, "there", default=default)
    assert found == Settings(rate=1.0, count=7, agent=Agent(epochs=2, discount=0.5))


def test_a_setting_is_read_under_its_former_name() -> None:
    assert settings_from({"agent": {"gamma": 0.8}}, Settings, "there").agent.discount == 0.8


def test_what_must_be_complete_is_refused_if_it_is_not() -> None:
    assert settings_from({"epochs": 1, "discount": 1}, Agent, "there", complete=True) == Agent(1, 1.0)
    with pytest.raises(ConfigError, match=r"^there: missing \['discount'\]$"):
        settings_from({"epochs": 1}, Agent, "there", complete=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cuont = 3", "did you mean 'count'"),
        ("count = 2.5", "must be a whole number"),
        ("count = true", "must be a whole number"),
        ("name = 3", "must be text"),
        ('mode = "quick"', "must be one of slow, fast"),
        ("count = ", "not valid TOML"),
        ("agent = 3", "must be a table"),
        ("[agent]\nepochs = 0", "agent: epochs must be a whole number of at least 1, not 0"),
        ("[agent]\nepochs = 99999999999999999999", "agent: epochs must be a whole number and below 2.63, not 9"),
        ("[agent]\nepoch = 1", "agent: unknown setting 'epoch'; did you mean 'epochs'"),
        ("pair = [1]", "must be a list of 2"),
        ('pair = [1, "x"]', "must be a number"),
    ],
)
def test_mistakes_are_named(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(write(tmp_path / "a.toml", text), Settings)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.toml"):
        read_config(tmp_path / "nothing.toml", Settings)

"""A run's configuration that is damaged, or holds the wrong types, is refused in one line or is a sound one.

ESPER_FUZZ multiplies the number of cases: 10,000 of them take a quarter of a minute.
"""

from __future__ import annotations

import copy
import json
import os
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from esper.cli import main
from esper.cli.train import Train
from esper.config import COUNTS, ConfigError, read_table, settings_from
from esper.offline.recording import Recording
from esper.rollout.episodes import Episodes
from esper.training.run_folder import RunFolder
from esper.training.train_config import PRESETS, TrainConfig, read_train_config

CASES = 1_000 * int(os.environ.get("ESPER_FUZZ", "1"))
HOSTILE: list[Any] = [
    *(None, True, False, 0, -1, 1.5, 2**63, 10**400, -(10**400), float("nan"), float("inf"), 1e308, -0.0),
    *("", "x", "\0", "\udcff", "[/bold]", "a\nb", "../..", "nan", "1", "x" * 10_000),
    *([], {}, [[]], [None], [1, 2, 3, 4], ["a"] * 4, {"a": 1}, {"": {}}, [[[[]]]]),
]


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(found for key, value in inner for found in places(value, (*path, key)))]


def damaged(data: dict[str, Any], rng: random.Random) -> Any:
    """One to three hostile values, in place of others, beside them, or gone."""
    data = copy.deepcopy(data)
    for _ in range(rng.randint(1, 3)):
        *way, last = rng.choice([path for path in places(data) if path] or [("x",)])
        inside: Any = data
        for key in way:
            inside = inside[key]
        kind = rng.random()
        if kind < 0.7 or isinstance(inside, list):
            inside[last] = copy.deepcopy(rng.choice(HOSTILE))
        elif kind < 0.85:
            del inside[last]
        else:
            inside[rng.choice(["unknown", "", "seed", "PPO", "-"])] = copy.deepcopy(rng.choice(HOSTILE))
    return data if rng.random() < 0.97 else rng.choice(HOSTILE)


def damaged_text(text: str, rng: random.Random) -> bytes:
    """Flipped bits, cut, or nested far too deep."""
    content = bytearray(text.encode())
    kind = rng.randrange(4)
    if kind == 0:
        del content[rng.randrange(len(content)) :]
    elif kind == 1:
        return b'{"ppo": ' + rng.choice([b"[", b'{"a":']) * 100_000
    else:
        for _ in range(kind):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return bytes(content)


def test_a_damaged_configuration_is_refused_or_sound(tmp_path: Path) -> None:
    rng = random.Random(22)
    file = tmp_path / "config.json"
    accepted = longest = 0
    for _ in range(CASES):
        whole = rng.choice(list(PRESETS.values())).to_json()
        if rng.random() < 0.8:
            file.write_text(json.dumps(damaged(whole, rng)))
        else:
            file.write_bytes(damaged_text(json.dumps(whole), rng))
        try:
            config = read_train_config(file)
        except ValueError as error:
            longest = max(longest, len(str(error)))
            continue
        accepted += 1
        assert_sound(config)
        with suppress(ValueError, OSError):
            config.family().draw(config.draw_ids(1)[0])  # what `esper train --resume` does next
    assert accepted < CASES / 2
    assert longest < 1_500


def assert_sound(config: TrainConfig) -> None:
    """Of the right types and in range, and the same once more."""
    for name, wanted in COUNTS.items():
        value = getattr(config, name)
        assert value is None or (type(value) is int and wanted.least <= value <= wanted.most), name
    assert all(type(value) in (float, type(None)) for value in (config.floor, config.ppo.clip, config.ppo.target_kl))
    assert TrainConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize("content", ["null", "[]", "3", '"text"', "", "{", '{"ppo": 1}', "[" * 100_000, "\xff"])
def test_what_is_no_configuration_is_one_line(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    RunFolder.create(Path("r"), TrainConfig(task="digits"))
    Path("r/config.json").write_bytes(content.encode("latin-1"))
    for words in (["train", "--resume", "r"], ["grow", "--controller", "r"], ["train", "--init", "r"]):
        assert main(words) == 1
        said = capsys.readouterr().err
        assert "is not the configuration of a training run" in said
        assert said.count("\n") == 1
        assert len(said) < 500


def test_a_configuration_file_of_a_command_never_breaks_the_reader(tmp_path: Path) -> None:
    """The same for `--config`, in TOML and JSON."""
    rng = random.Random(23)
    whole = {"task": "digits", "envs": 3, "floor": 0.1, "run": "r", "ppo": {"clip": 0.2}, "tensorboard": True}
    for _ in range(CASES // 2):
        file = tmp_path / rng.choice(["c.json", "c.toml"])
        text = json.dumps(damaged(whole, rng) if rng.random() < 0.7 else whole)
        file.write_bytes(damaged_text(text, rng) if rng.random() < 0.5 else text.encode())
        with suppress(ConfigError):
            settings_from(read_table(file), Train, str(file))


@pytest.mark.parametrize("task", [[], {}, None, 3, ["digits"]])
def test_a_recording_whose_task_is_no_name_has_none(task: Any) -> None:
    episodes: Episodes = None  # type: ignore[assignment]
    assert Recording(episodes, ({"task": "digits"}, {"task": task})).task is None
    assert Recording(episodes, ({"task": task},)).task is None
    assert Recording(episodes, ({"task": "digits"}, {"task": "digits"})).task == "digits"

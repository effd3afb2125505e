"""Recordings: what goes in comes out, appends survive crashes, and nothing damaged, foreign or hostile is read.

Covers: R083, R085, R081
"""

from __future__ import annotations

import errno
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from toy_recordings import TOY, record_toy, toy_mixture

from esper import files
from esper.agent.tensor_files import read_header, write_tensor_file
from esper.offline import recording
from esper.offline.recording import (
    RecordingError,
    Schema,
    append,
    check,
    growth_schema,
    next_draw,
    of_controller,
    read,
)
from esper.rollout.episodes import Episodes, join

HERE = {"task": "toy"}


def same(a: Episodes, b: Episodes) -> bool:
    return a.controllers == b.controllers and all(
        torch.equal(x, y) for x, y in zip(a.tensors().values(), b.tensors().values(), strict=True)
    )


@given(
    count=st.integers(1, 5), noise=st.sampled_from([0.0, 0.5, 1.0]), seed=st.integers(0, 50), files=st.integers(1, 3)
)
def test_what_is_appended_is_read(
    tmp_path_factory: pytest.TempPathFactory, count: int, noise: float, seed: int, files: int
) -> None:
    folder = tmp_path_factory.mktemp("recording")
    parts = [record_toy("half knows", count, noise, 100 * seed + i) for i in range(files)]
    for part in parts:
        append(folder, part, TOY, HERE)
    found = read(folder, TOY)
    assert same(found.episodes, join(parts))
    assert found.provenance == (HERE,) * files
    assert found.task == "toy"


def test_a_file_holds_the_tensors_that_earlier_versions_read(tmp_path: Path) -> None:
    """What was done is called `taken` there; neither log-probabilities nor reports are written."""
    path = append(tmp_path, record_toy("waits", 2, 0.5, 0), TOY, HERE)
    seen = {"overall", "slots", "blueprints", "costs", "present"}
    plain = {"label", "taken", "reward", "terminated", "lengths", "draw", "controller"}
    masks = {f"masks.{name}" for name in ("op", "slot", "blueprint", "blend")}
    assert load_file(path).keys() == {f"observation.{name}" for name in seen} | masks | plain


def test_the_order_of_the_files_does_not_matter(tmp_path: Path) -> None:
    """Workers finish in any order; the same episodes must teach the same."""
    a, b = record_toy("waits", 3, 0.0, 0), record_toy("random", 3, 0.0, 0)
    for part in (a, b):
        append(tmp_path / "ab", part, TOY, HERE)
    for part in (b, a):
        append(tmp_path / "ba", part, TOY, HERE)
    ab, ba = read(tmp_path / "ab", TOY).episodes, read(tmp_path / "ba", TOY).episodes
    names = [[e.controllers[i] for i in e.controller] for e in (ab, ba)]
    assert names[0] == names[1] == ["random", "waits"] * 3
    assert torch.equal(ab.action, ba.action)


def test_one_controller_can_be_picked() -> None:
    mixture = toy_mixture(3, 0.0, 0)
    alone = of_controller(mixture, "half knows")
    assert alone.controllers == ("half knows",)
    assert torch.equal(alone.action, record_toy("half knows", 3, 0.0, 2).action)
    check(alone, TOY)
    with pytest.raises(RecordingError, match="nothing was recorded of 'heuristic'; the controllers are waits, random"):
        of_controller(mixture, "heuristic")


def test_episodes_of_different_length_and_slots_are_padded(tmp_path: Path) -> None:
    """Joined, the shorter and narrower ones gain steps that are not valid and slots that are not legal."""
    long = growth_episodes(slots=3, steps=4, draw=0)
    short = growth_episodes(slots=2, steps=3, draw=1)
    both = join([long, short])
    assert both.valid.tolist() == [[True] * 4, [True] * 3 + [False]]
    assert both.observation.slots.shape[:3] == (2, 4, 3)
    assert both.observation.present[1, 0].tolist() == [True, True, False]
    assert not both.masks.slot[1, ..., 2].any()
    check(both, growth_schema())
    append(tmp_path, long, growth_schema(), HERE)
    append(tmp_path, short, growth_schema(), HERE)
    assert same(read(tmp_path, growth_schema()).episodes, both)
    assert next_draw(tmp_path, growth_schema(), 0) == 2
    assert next_draw(tmp_path / "new", growth_schema(), 7) == 7


def growth_episodes(slots: int, steps: int, draw: int) -> Episodes:
    """One episode in which everything is legal and nothing is done."""
    from esper.env.spaces import ActionMasks, Observation

    schema, row = growth_schema(), (1, steps)
    kinds = len(schema.blueprints)
    return Episodes(
        observation=Observation(
            torch.rand(*row, schema.overall_features),
            torch.rand(*row, slots, schema.slot_features),
            torch.zeros(*row, slots, dtype=torch.int64),
            torch.rand(*row, slots, kinds),
            torch.ones(*row, slots, dtype=torch.bool),
        ),
        masks=ActionMasks(
            torch.ones(*row, 4, dtype=torch.bool),
            torch.ones(*row, 4, slots, dtype=torch.bool),
            torch.ones(*row, slots, kinds, dtype=torch.bool),
            torch.ones(*row, slots, 3, dtype=torch.bool),
        ),
        label=torch.zeros(*row, 4, dtype=torch.int64),
        action=torch.zeros(*row, 4, dtype=torch.int64),
        reward=torch.ones(row),
        terminated=(torch.arange(steps) == steps - 1)[None],
        lengths=torch.tensor([steps]),
        draw=torch.tensor([draw]),
        controller=torch.tensor([0]),
        controllers=("none",),
    )


# -- crashes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_an_append_that_fails_leaves_the_earlier_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    first = record_toy("waits", 3, 0.0, 0)
    append(tmp_path, first, TOY, HERE)

    def crash(*_: object) -> None:
        raise failure

    monkeypatch.setattr(files.os, "fsync", crash)
    with pytest.raises(type(failure)):
        append(tmp_path, record_toy("random", 3, 0.0, 1), TOY, HERE)
    monkeypatch.undo()
    assert same(read(tmp_path, TOY).episodes, first)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_process_that_dies_in_the_middle_leaves_a_file_nobody_reads(tmp_path: Path) -> None:
    first = record_toy("waits", 3, 0.0, 0)
    path = append(tmp_path, first, TOY, HERE)
    half = path.read_bytes()[: path.stat().st_size // 2]
    (tmp_path / f".{path.name}.4711.tmp").write_bytes(half)  # what os.kill(-9) leaves behind
    assert same(read(tmp_path, TOY).episodes, first)
    append(tmp_path, record_toy("waits", 2, 0.0, 5), TOY, HERE)
    assert len(read(tmp_path, TOY).episodes) == 5


def test_two_processes_do_not_write_over_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_files", lambda folder: [])  # both looked before either wrote
    append(tmp_path, record_toy("waits", 2, 0.0, 0), TOY, HERE)
    append(tmp_path, record_toy("waits", 2, 0.0, 1), TOY, HERE)
    monkeypatch.undo()
    assert len(read(tmp_path, TOY).episodes) == 4


# -- refusals -----------------------------------------------------------------------------------------------------


def refusal(folder: Path, schema: Schema = TOY) -> str:
    with pytest.raises(RecordingError) as caught:
        read(folder, schema)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 800
    return message


def test_what_is_not_there(tmp_path: Path) -> None:
    assert "there is no recording" in refusal(tmp_path / "nothing")
    assert "holds no recorded episodes" in refusal(tmp_path)
    (tmp_path / "episodes-x.safetensors").write_bytes(b"")
    assert "does not have the name of a recorded file" in refusal(tmp_path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return append(tmp_path, toy_mixture(2, 0.2, 0), TOY, HERE)


@pytest.mark.parametrize("keep", [0, 7, 8, 100, 0.5, 0.99, -1])
def test_a_truncated_file(file: Path, keep: float) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    assert file.name in refusal(file.parent)


@given(at=st.floats(0, 0.999), bits=st.integers(1, 255))
def test_flipped_bits_are_refused(tmp_path_factory: pytest.TempPathFactory, at: float, bits: int) -> None:
    path = append(tmp_path_factory.mktemp("bits"), record_toy("half knows", 2, 0.2, 0), TOY, HERE)
    content = bytearray(path.read_bytes())
    content[int(at * len(content))] ^= bits
    path.write_bytes(content)
    refusal(path.parent)


def test_recordings_from_before_there_was_a_digest_are_read(file: Path) -> None:
    """They have version 1; one of version 2 must have a digest."""
    episodes = read(file.parent, TOY).episodes
    header, _ = read_header(file, "esper-episodes")
    assert header is not None
    for version, wanted in ((1, None), (2, "has lost the digest of its contents")):
        text = json.dumps({**json.loads(header), "version": version})
        save_file(load_file(file), file, metadata={"esper-episodes": text})
        if wanted is None:
            assert same(read(file.parent, TOY).episodes, episodes)
        else:
            assert wanted in refusal(file.parent)


class Hostile:
    """Unpickling this runs a command."""

    def __init__(self, target: str) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self.target,)


@pytest.mark.parametrize("dump", [lambda o, p: p.write_bytes(pickle.dumps(o)), lambda o, p: torch.save(o, p)])
def test_a_hostile_file_does_not_run(file: Path, dump: Callable[[object, Path], None]) -> None:
    target = file.parent / "owned"
    dump(Hostile(str(target)), file)
    assert "damaged, cut short, or no safetensors file" in refusal(file.parent)
    assert not target.exists()


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (None, "no recorded episodes"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "says no version"),
        ({"version": "1"}, "says no version"),
        ({"version": 99}, "it has version 99, this Esper reads 2"),
        ({"version": 1}, "names no controllers"),
        ({"version": 1, "controllers": []}, "names no controllers"),
        ({"version": 1, "controllers": [3]}, "names no controllers"),
        ({"version": 1, "controllers": ["a"], "provenance": {}}, "no schema or no provenance"),
        ({"version": 1, "controllers": ["a"], "provenance": {}, "schema": {"layout": "x" * 10_000}}, "another schema"),
    ],
)
def test_a_bad_header(file: Path, header: object, message: str) -> None:
    text = header if isinstance(header, str) else json.dumps(header)
    save_file(load_file(file), file, metadata=None if header is None else {"esper-episodes": text})
    assert message in refusal(file.parent)


def test_another_schema_is_refused_with_every_difference(file: Path) -> None:
    other = replace(TOY, layout="growth observation 9", blueprints=(*TOY.blueprints, "mine"))
    said = refusal(file.parent, other)
    assert "layout: recorded 'op-conditional', here 'growth observation 9'" in said
    assert "blueprints: recorded" in said
    with pytest.raises(RecordingError, match="another schema"):
        append(file.parent, toy_mixture(1, 0.0, 1), replace(TOY, layout="next"), HERE)
    assert len(list(file.parent.iterdir())) == 1


def _set(name: str, value: float, where: tuple[int, ...] = (0, 0)) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][where] = value  # type: ignore[assignment]

    return change


def _swap(name: str, new: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = new(tensors[name]).contiguous()

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("reward"), "missing or unknown: reward"),
        (lambda t: t.update(extra=torch.zeros(1)), "missing or unknown: extra"),
        (lambda t: t.update(action=t["taken"].clone()), "missing or unknown: action"),
        (_set("reward", float("nan")), "reward holds a number that is not finite"),
        (_set("observation.overall", float("inf"), (0, 0, 0)), "observation.overall holds a number"),
        (_set("lengths", 0, (0,)), "length is not from 1 to 5"),
        (_set("lengths", 6, (0,)), "length is not from 1 to 5"),
        (_set("controller", 3, (0,)), "a controller that is not named"),
        (_set("controller", -1, (0,)), "a controller that is not named"),
        (_set("terminated", 1), "goes on after it terminated"),
        (_set("taken", 4, (0, 0, 3)), "action names an operation, slot, blueprint or blend that does not exist"),
        (_set("label", -1, (0, 0, 0)), "label names an operation"),
        (_swap("reward", lambda r: r.double()), "reward is torch.float64"),
        (_swap("taken", lambda a: a[:, :, :3]), "action is torch.int64"),
        (_swap("reward", lambda r: r[0]), "reward is not [episodes, steps]"),
        (_swap("reward", lambda r: r[:0]), "observation.overall is"),
        (_swap("masks.op", torch.zeros_like), "masks under which nothing can be decided"),
    ],
)
def test_content_that_would_teach_nonsense(
    file: Path, change: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    """Also where the digest agrees, as it does for whoever writes such a file on purpose."""
    header, _ = read_header(file, "esper-episodes")
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    write_tensor_file(file, tensors, "esper-episodes", json.loads(header or ""))
    assert message in refusal(file.parent)


def test_a_forbidden_decision_is_refused(tmp_path: Path) -> None:
    episodes = growth_episodes(slots=2, steps=3, draw=0)
    episodes.masks.blueprint[0, 1, 1, 0] = False
    episodes.action[0, 1] = torch.tensor([1, 0, 0, 1])  # GERMINATE at slot 1, which does not take blueprint 0 there
    with pytest.raises(RecordingError, match="action holds a decision that its masks forbid"):
        append(tmp_path, episodes, growth_schema(), HERE)
    episodes.action[0, 1, 3] = 2  # PRUNE does not ask for a blueprint
    append(tmp_path, episodes, growth_schema(), HERE)

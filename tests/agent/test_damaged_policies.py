"""Policy files that are damaged, or made to do harm: one line, at once, and never a policy that decides by NaN."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from toy_environments import CueMemory, make_agent, train

import esper
from esper.agent.checkpoints import (
    CheckpointError,
    inspect_checkpoint,
    load_checkpoint,
    save_checkpoint,
    upgrade_checkpoint,
)
from esper.agent.config import PPOConfig
from esper.agent.normalisers import ObservationNormaliser, ValueNormaliser
from esper.agent.policies import LearnedController, load_policy, save_policy
from esper.agent.shipped import shipped_path

Change = Callable[[dict[str, Tensor], dict[str, Any]], object]

OLD_POLICY = Path(__file__).with_name("schema_1.safetensors")
"""What shipped in version 0.1."""


def changed(path: Path, change: Change) -> Path:
    """The default policy, but for a change of its tensors or of its data."""
    whole = load_checkpoint(shipped_path("small"))
    tensors, data = dict(whole.tensors), json.loads(json.dumps(whole.data))
    change(tensors, data)
    save_checkpoint(path, tensors, data)
    return path


def refused(read: Callable[[Path], object], path: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert path.name in str(caught.value)


def test_the_policy_itself_loads(tmp_path: Path) -> None:
    LearnedController.load(changed(tmp_path / "same.safetensors", lambda tensors, data: None))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["network/op_head.out.bias", "observations/overall/mean", "values/mean"])
def test_numbers_that_are_none(tmp_path: Path, name: str, value: float) -> None:
    def spoil(tensors: dict[str, Tensor], data: dict[str, Any]) -> None:
        tensors[name] = tensors[name].clone()
        tensors[name].view(-1)[0] = value

    path = changed(tmp_path / "bad.safetensors", spoil)
    refused(LearnedController.load, path, f"{name} contains NaN or infinity: this policy cannot decide")
    host = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    data = (torch.randn(8, 2), torch.zeros(8, dtype=torch.long))
    for given in (path, str(path)):
        with pytest.raises(CheckpointError, match="contains NaN or infinity"):
            esper.grow(host, data, data, slots=["1"], epochs=1, controller=given, device="cpu")


WRONG_TENSORS: list[tuple[Change, str]] = [
    (lambda t, d: t.pop("network/op_head.out.bias"), r"it lacks network/op_head.out.bias \(1 such tensors\)"),
    (lambda t, d: t.update({"network/more": torch.zeros(2)}), "has no place for network/more"),
    (
        lambda t, d: t.update({"network/op_head.out.bias": torch.zeros(9)}),
        r"\[9\], and should be torch.float32 \[4\]",
    ),
    (lambda t, d: t.update({"network/op_head.out.bias": torch.zeros(4).char()}), "int8"),
    (lambda t, d: t.pop("observations/slots/mean"), "it lacks observations/slots/mean"),
    (lambda t, d: t["observations/slots/variance"].fill_(-1.0), "a negative variance"),
    (lambda t, d: [t.pop(name) for name in list(t) if name.startswith("network/")], "the file holds 0 layers"),
]
WRONG_DATA: list[tuple[Change, str]] = [
    (lambda t, d: d.pop("network"), "holds no policy"),
    (lambda t, d: d.clear(), "holds no policy"),
    (lambda t, d: d["network"].pop("hidden"), r"missing \['hidden'\]"),
    (lambda t, d: d["network"].update(more=1), "unknown setting 'more'"),
    (lambda t, d: d["network"].update(hidden="x"), "hidden must be a whole number, not 'x'"),
    (lambda t, d: d["network"].update(hidden=True), "hidden must be a whole number, not True"),
    (lambda t, d: d["network"].update(layers=None), "layers must be a whole number, not None"),
    (lambda t, d: d["network"].update(slots=-1), "slots must be a whole number of at least 1, not -1"),
    (lambda t, d: d["network"].update(slot_features=0), "slot encoder needs slot_features"),
    (lambda t, d: d["network"].update(floor="x"), "floor must be a number, not 'x'"),
    (lambda t, d: d["network"].update(policy_gain=float("nan")), "policy_gain must be a number"),
    (lambda t, d: d["network"].update(policy_gain=10**30), "policy_gain must be a number"),
    (lambda t, d: d["network"].update(encoder="x"), "encoder must be one of slots, vector, not 'x'"),
    (lambda t, d: d["network"].update(layout=3), "layout must be text, not 3"),
    (lambda t, d: d["network"].update(layout="a\nb"), "layout must be a line of text"),
    (lambda t, d: d["network"].update(layout="x" * 10_000), "layout must be a line of text"),
    *((lambda t, d, s=space: d["network"].update(space=s), "space: uses must be a list") for space in (5, [[1]], [5])),
    (lambda t, d: d["network"].update(space=[]), "an action space must have an operation"),
    (lambda t, d: d["network"].update(space=[[False] * 4]), "must use the op head"),
    (lambda t, d: d["caller"].update(blueprints=7), "the kinds of seed that it knows must be a list, not 7"),
]


@pytest.mark.parametrize(("change", "match"), WRONG_TENSORS + WRONG_DATA)
def test_a_policy_that_is_not_what_it_says(tmp_path: Path, change: Change, match: str) -> None:
    refused(LearnedController.load, changed(tmp_path / "bad.safetensors", change), match)


SIZES = ["overall_features", "slot_features", "blueprints", "blends", "slots", "hidden", "slot_width", "embedding"]


@pytest.mark.parametrize("name", [*SIZES, "layers", "feature_layers"])
@pytest.mark.parametrize("size", [10**9, 10**30])
def test_sizes_that_the_file_cannot_hold_are_refused_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, size: int
) -> None:
    path = changed(tmp_path / "huge.safetensors", lambda t, d: d["network"].update({name: size}))
    monkeypatch.setattr("esper.agent.policies.FactoredRecurrentActorCritic", None)
    refused(load_policy, path, f"says {name} = {size}, but the file holds 1 layers|{name} must be .* and below 2")


def test_sizes_between_are_compared_without_memory(tmp_path: Path) -> None:
    path = changed(tmp_path / "large.safetensors", lambda t, d: d["network"].update(hidden=200_000))  # 640 GB
    refused(load_policy, path, "and should be torch.float32")


HEADERS = [
    '{"version": Infinity, "data": {}}',
    '{"version": "2", "data": {}}',
    '{"version": 2, "data": []}',
    '{"version": 2, "data": {"caller": 7}}',
    '{"version": 2, "data": {"network": null}}',
    '{"version": 2}',
    "[]",
    '{"version": 2, "data": ' + "[" * 100_000 + "]" * 100_000 + "}",
]


@pytest.mark.parametrize("header", HEADERS)
def test_damaged_headers(tmp_path: Path, header: str) -> None:
    path = tmp_path / "bad.safetensors"
    save_file({"x": torch.zeros(1)}, path, metadata={"esper": header})
    for read in (inspect_checkpoint, load_checkpoint, upgrade_checkpoint, LearnedController.load):
        refused(read, path, "has a damaged header")


def test_a_run_does_not_go_on_from_a_damaged_checkpoint(tmp_path: Path) -> None:
    agent, path = make_agent(CueMemory(2), PPOConfig()), tmp_path / "run.safetensors"
    agent.save(path)
    whole = load_checkpoint(path)
    for name in ("update_count", "generator", "values/mean", "network/op_head.out.bias"):
        save_checkpoint(path, {n: t for n, t in whole.tensors.items() if n != name}, whole.data)
        refused(agent.load, path, "is damaged: .*" + name.rpartition("/")[2])


WRONG_STATES: list[tuple[Change, str]] = [
    (lambda t, d: t.update({"optimizer/0/exp_avg": t["optimizer/0/exp_avg"][:1].clone()}), "optimizer/0/exp_avg is"),
    (lambda t, d: t.update({"optimizer/3/exp_avg_sq": torch.zeros(1)}), "optimizer/3/exp_avg_sq is"),
    (lambda t, d: t.update({"optimizer/0/exp_avg": t["optimizer/0/exp_avg"].double()}), "is torch.float64"),
    (lambda t, d: t.update({"optimizer/0/step": torch.zeros(2)}), "optimizer/0/step is"),
    (lambda t, d: t.update({"optimizer/0/step": torch.tensor(-5.0)}), "optimizer/0/step contains a negative"),
    (lambda t, d: t["optimizer/0/exp_avg"].fill_(float("nan")), "optimizer/0/exp_avg contains NaN"),
    (lambda t, d: t["optimizer/0/exp_avg_sq"].fill_(-1.0), "optimizer/0/exp_avg_sq contains a negative"),
    (lambda t, d: t.pop("optimizer/1/exp_avg_sq"), r"it lacks optimizer/1/exp_avg_sq \(1"),
    (
        lambda t, d: [t.pop(f"optimizer/1/{k}") for k in ("step", "exp_avg", "exp_avg_sq")],
        r"it lacks optimizer/1/\w+ \(",
    ),
    (lambda t, d: t.update({"optimizer/999/step": torch.zeros(())}), "no place for optimizer/999/step"),
    (lambda t, d: t.update({"optimizer/x": torch.zeros(())}), "no place for optimizer/x"),
    (lambda t, d: t.update({"more": torch.zeros(())}), "no place for more"),
    (lambda t, d: t.update({"generator": torch.zeros(9, dtype=torch.uint8)}), "generator is"),
    (lambda t, d: t["generator"].fill_(255), "generator holds no state of a random generator"),
    (lambda t, d: t.pop("generator"), "lacks generator"),
    (lambda t, d: t.update({"update_count": torch.tensor(1.5)}), "update_count is"),
    (lambda t, d: t.update({"update_count": torch.tensor(-1)}), "update_count is negative"),
]


@pytest.mark.parametrize(("change", "match"), WRONG_STATES)
def test_a_run_takes_nothing_over_that_does_not_fit(tmp_path: Path, change: Change, match: str) -> None:
    """Moments of other shapes made the fused optimizer write past their end: a segmentation fault at --resume."""
    env = CueMemory(2)
    agent, path = make_agent(env, PPOConfig()), tmp_path / "run.safetensors"
    train(env, agent, 2 * 4)
    agent.save(path)
    whole, before = load_checkpoint(path), agent.state_dict()
    tensors, data = dict(whole.tensors), dict(whole.data)
    change(tensors, data)
    save_checkpoint(path, tensors, data)
    refused(agent.load, path, "is damaged: a run cannot go on from it .*" + match)
    after = agent.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)  # nothing was taken over, not even in part


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("values", [False, True])
def test_every_flipped_bit_is_noticed(tmp_path: Path, values: bool, every: int) -> None:
    """One bit of each byte (or eighth byte) of the header, whose entries repeat; a sample of the tensors' bits."""
    agent, path = make_agent(CueMemory(2), PPOConfig()), tmp_path / "run.safetensors"
    agent.save(path)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    rng = random.Random(0)
    places = rng.sample(range(header, len(whole)), 150 // every) if values else [*range(8), *range(8, header, every)]
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        refused(load_checkpoint, path, "damaged|holds tensors, but is not|version")


def test_files_from_before_there_was_a_digest_are_read(tmp_path: Path) -> None:
    """As they are: they have version 2. The policies that come with Esper are such files."""
    path = tmp_path / "old.safetensors"
    header = json.dumps({"version": 2, "data": {"n": 1}})
    save_file({"x": torch.ones(2)}, path, metadata={"esper": header})
    assert load_checkpoint(path).data == {"n": 1}
    assert inspect_checkpoint(OLD_POLICY).version == 2
    LearnedController.load(OLD_POLICY)
    assert upgrade_checkpoint(path) == (2, path)
    assert inspect_checkpoint(path).version == 3
    save_file({"x": torch.ones(2)}, path, metadata={"esper": header.replace("2", "3", 1)})
    refused(load_checkpoint, path, "has lost the digest of its contents")


def test_a_policy_that_cannot_decide_is_not_written(tmp_path: Path) -> None:
    env = CueMemory(2)
    network = make_agent(env, PPOConfig()).network
    units = ObservationNormaliser(network.config.overall_features, network.config.slot_features), ValueNormaliser()
    path = tmp_path / "policy.safetensors"
    save_policy(path, network, *units, {})
    path.unlink()
    with torch.no_grad():
        network.value_output.bias.fill_(float("nan"))
    refused(lambda path: save_policy(path, network, *units, {}), path, "was not written: .* contains NaN or infinity")
    assert not path.exists()

"""Controllers that come with Esper: whole, small, from known places, and after rounding still the same policy.

Covers: R068, R081
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest
import torch

from esper.agent import shipped
from esper.agent.actor import PolicyActor
from esper.agent.checkpoints import inspect_checkpoint, load_checkpoint
from esper.agent.policies import LAYOUT, LearnedController, load_policy
from esper.agent.shipped import ShippedError, provenance, shipped_names, shipped_path
from esper.cli import doctor
from esper.env.observation import OVERALL_FIELDS, SLOT_FIELDS
from esper.env.spaces import ActionMasks, Observation
from esper.growth.blueprints import blueprint_names
from esper.training.catalogue import RULES, make_controller, policy_file

ROOT = Path(__file__).parents[2]
HALF_STEP = 2.0**-11
"""Largest relative error of rounding to float16."""


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The shipped controllers, in a folder where they may be damaged."""
    folder = tmp_path / "shipped"
    shutil.copytree(shipped.SHIPPED_FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(shipped, "SHIPPED_FOLDER", folder)
    return folder


@pytest.fixture
def ship(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # as if it were run as a script
    spec = importlib.util.spec_from_file_location("ship", ROOT / "benchmarks" / "ship.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- what ships --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shipped_names())
def test_every_shipped_controller_says_where_it_comes_from(name: str) -> None:
    known = provenance(name)
    assert known.layout in (LAYOUT, "growth observation 1")  # which is read as the other
    assert tuple(known.blueprints) == blueprint_names()[: len(known.blueprints)]
    assert known.commands
    assert known.env_steps > 0
    assert known.score is not None
    assert "\n" not in str(known)
    assert make_controller(name).name == name
    assert name not in RULES


@pytest.mark.parametrize("name", shipped_names())
def test_every_shipped_policy_is_whole_and_small(name: str) -> None:
    path = shipped_path(name)
    assert path.stat().st_size < 1_000_000
    info = inspect_checkpoint(path)
    assert {tensor.split("/")[0] for tensor in info.shapes} == {"network", "observations", "values"}
    kept = load_checkpoint(path).tensors
    assert {t.dtype for tensor, t in kept.items() if tensor.startswith("network/")} == {torch.float16}
    controller = make_controller(name)
    assert isinstance(controller, LearnedController)
    assert {p.dtype for p in controller.network.parameters()} == {torch.float32}


def test_the_demo_controller_is_there() -> None:
    assert "small" in shipped_names()
    assert make_controller(shipped.DEFAULT_CONTROLLER).name == shipped.DEFAULT_CONTROLLER


def test_names_need_no_torch(tmp_path: Path) -> None:
    code = "import sys, esper.agent.shipped as s; s.provenance(s.shipped_names()[0]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False).returncode == 0


def test_a_name_means_the_same_beside_a_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("small", "heuristic"):
        Path(name).mkdir()
        assert make_controller(name).name == name
    with pytest.raises(ValueError, match="holds no training run"):
        make_controller("./small")


def test_misspelt_names_are_answered_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match=r"choose one of none, .*, small.*; did you mean 'small'\?"):
        make_controller("smal")
    with pytest.raises(ValueError, match=r"there is no checkpoint smal; .*by name: small$"):
        policy_file("smal")
    with pytest.raises(ShippedError, match=r"no controller '\.\./x' comes with Esper"):
        shipped_path("../x")


# -- damage ------------------------------------------------------------------------------------------------------------


def test_a_flipped_byte_is_noticed(copies: Path) -> None:
    weights = copies / "small.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    for name in ("small",):
        with pytest.raises(ShippedError, match="not the file that was shipped as 'small'"):
            make_controller(name)
        assert provenance(name).summary  # what is known about it can still be read
    weights.unlink()
    with pytest.raises(ShippedError, match=r"small\.safetensors is missing: install Esper again"):
        make_controller("small")


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'"x"', b"\xff", b'{"sha256": 1}'])
def test_a_damaged_provenance_is_one_line(copies: Path, content: bytes) -> None:
    (copies / "small.json").write_bytes(content)
    for name in ("small",):
        with pytest.raises(ShippedError, match="install Esper again") as refused:
            make_controller(name)
        assert "\n" not in str(refused.value)
    (copies / "small.json").unlink()
    with pytest.raises(ShippedError, match=r"small\.json cannot be read"):
        provenance("small")


def test_a_hostile_file_with_the_right_sum_does_not_run(copies: Path, tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "owned"),)

    weights = copies / "small.safetensors"
    weights.write_bytes(pickle.dumps(Hostile()))
    known = json.loads((copies / "small.json").read_text())
    known["sha256"] = hashlib.sha256(weights.read_bytes()).hexdigest()
    (copies / "small.json").write_text(json.dumps(known))
    with pytest.raises(ValueError, match="was not loaded"):
        make_controller("small")
    assert not (tmp_path / "owned").exists()


# -- making one --------------------------------------------------------------------------------------------------------


def random_step(environments: int, slots: int, generator: torch.Generator) -> tuple[Observation, ActionMasks]:
    """Everything is legal; features anywhere in their range."""
    kinds = len(blueprint_names())
    observation = Observation(
        overall=torch.rand(environments, len(OVERALL_FIELDS), generator=generator) * 2 - 1,
        slots=torch.rand(environments, slots, len(SLOT_FIELDS), generator=generator) * 2 - 1,
        blueprints=torch.randint(0, kinds + 1, (environments, slots), generator=generator),
        costs=torch.rand(environments, slots, kinds, generator=generator),
        present=torch.ones(environments, slots, dtype=torch.bool),
    )
    shapes = ((4,), (4, slots), (slots, kinds), (slots, 3))
    return observation, ActionMasks(*(torch.ones(environments, *shape, dtype=torch.bool) for shape in shapes))


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_rounding_keeps_the_decisions(slots: int) -> None:
    """The shipped policy beside one in float32 that rounding would have made it from."""
    policy, normaliser = load_policy(shipped_path("small"))
    finer, _ = load_policy(shipped_path("small"))
    generator = torch.Generator().manual_seed(slots)
    with torch.no_grad():
        for parameter in finer.parameters():
            parameter *= 1 + HALF_STEP * (torch.rand(parameter.shape, generator=generator) * 2 - 1)
    actors = [PolicyActor(network, normaliser) for network in (policy, finer)]
    for actor in actors:
        actor.reset(range(400))
    same = []
    for _ in range(6):  # the memory drifts apart, too
        seen = random_step(400, slots, generator)
        coarse, fine = (actor.act((), *seen).action for actor in actors)
        same.append((coarse == fine).all(-1).float())
    assert torch.cat(same).mean() > 0.99


STATED = {
    "summary": "a test",
    "commands": ["esper train"],
    "seeds": [0],
    "env_steps": 1,
    "wall_seconds": 1.0,
    "machine": "this",
    "git_commit": "none",
    "torch": "any",
}


def test_shipping_is_repeatable_and_keeps_a_score_with_its_weights(ship: ModuleType, tmp_path: Path) -> None:
    made = ship.ship("small", "other", STATED, None, tmp_path)
    assert made.score is None
    assert made.sha256 == provenance("small").sha256
    again = ship.ship(str(tmp_path / "other.safetensors"), "again", STATED, None, tmp_path / "again")
    twice = ship.ship(str(tmp_path / "again" / "again.safetensors"), "twice", STATED, None, tmp_path / "again")
    assert twice.sha256 == again.sha256
    shutil.rmtree(tmp_path / "again")
    arms = {"none": {"score": [3.0, 3.0, 3.0]}, "small": {"score": [3.0, 3.0, 3.0], "made": {"sha256": made.sha256}}}
    facts = {"mixed": {"draws": [0, 1, 2], "arms": arms}}
    measured = tmp_path / "mixed.json"
    measured.write_text(json.dumps(facts))
    judged = ship.ship("small", "other", STATED, measured, tmp_path)
    assert judged.sha256 == made.sha256
    said = "score 3.0 (3.0 to 3.0) on held-out draws 0 to 2 of mixed; +0.0 (+0.0 to +0.0) against none"
    assert str(judged) == f"a test; {said}"
    again = ship.ship("small", "other", asdict(judged), None, tmp_path)
    assert again == judged
    other = ship.ship("small", "other", {**asdict(judged), "sha256": "of other weights"}, None, tmp_path)
    assert other.score is None
    arms["small"]["made"] = {"sha256": "of other weights"}
    measured.write_text(json.dumps(facts))
    with pytest.raises(
        ValueError, match=r"not what `results\.py measure mixed` made of the policy that ships as third"
    ):
        ship.ship("small", "third", STATED, measured, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mixed.json", "other.json", "other.safetensors"]


def test_what_cannot_be_shipped_is_refused(ship: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be a controller's name"):
        ship.ship("small", "heuristic", STATED, None, tmp_path)
    with pytest.raises(ValueError, match="must state summary"):
        ship.ship("small", "other", {"seeds": [0]}, None, tmp_path)
    with pytest.raises(ValueError, match="float16 cannot"):
        ship.rounded({"network/x": torch.tensor([1e6])})
    assert set(ship.rounded({"network/x": torch.ones(1), "optimizer/0/step": torch.ones(1)})) == {"network/x"}
    assert list(tmp_path.iterdir()) == []


# -- in the package ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(
    importlib.util.find_spec("hatchling") is None, reason="hatchling, which builds the wheel, is missing"
)
def test_the_wheel_and_the_source_archive_hold_the_files(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy, so that nothing is written into the checkout
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src" / "esper", source / "src" / "esper", ignore=shutil.ignore_patterns("__pycache__"))
    words = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path / "dist"), "-t", "wheel", "-t", "sdist"]
    subprocess.run(words, cwd=source, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    (archive,) = (tmp_path / "dist").glob("*.tar.gz")
    shutil.unpack_archive(archive, tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    with zipfile.ZipFile(wheel) as packed:
        for name in shipped_names():
            for file in (f"{name}.json", f"{name}.safetensors"):
                content = (shipped.SHIPPED_FOLDER / file).read_bytes()
                assert packed.read(f"esper/agent/shipped/{file}") == content
                assert (unpacked / "src" / "esper" / "agent" / "shipped" / file).read_bytes() == content
        names = set(packed.namelist())
        (metadata,) = (packed.read(name).decode() for name in names if name.endswith("/METADATA"))
    inside = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "esper").rglob("*") if path.is_file()}
    assert {name for name in inside if "__pycache__" not in name} <= names
    assert not [name for name in names if not name.startswith(("esper/", "esper-"))]
    needed = [
        line.split()[1] for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra" not in line
    ]
    assert {re.split("[<>=]", name)[0] for name in needed} == set(doctor.CORE)

"""`save_seeds` and `load_seeds`: the seeds without their host, in Esper's files and in checkpoints of others."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from growing import grow
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import esper
from esper.errors import GrowthWarning
from esper.growth.export import ExportError, LoadError, plain_model
from esper.growth.folder import with_digests
from esper.growth.graft import SEEDS
from esper.growth.plain import graft_from, grafted
from esper.growth.seeds import DOCUMENT, WEIGHTS, seed_state


class Net(nn.Module):
    """A slot that is an nn.Sequential, one that is a layer, and one that is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.skip = nn.Sequential()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return self.head(torch.relu(self.conv(h) + self.skip(h)).mean((2, 3)))


X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
PLANTINGS = [
    (0, "conv", "gated", "HOLDING"),
    (1, "depthwise", "linear", "BLENDING"),
    (2, "norm", "linear", "FOSSILIZED"),
]
SLOTS = ["body", "conv", "skip"]


@pytest.fixture(scope="module")
def grown() -> nn.Module:
    torch.manual_seed(0)
    growing = grow(Net(), X, PLANTINGS, slots=SLOTS)
    model = plain_model(growing).eval()
    assert torch.equal(model(X), growing(X))
    assert len(grafted(model)) == 3
    return model


def host_of(grown: nn.Module) -> nn.Module:
    """A fresh host with the trained weights, by the keys that they always had."""
    host = Net()
    missing, unexpected = host.load_state_dict(grown.state_dict(), strict=False)
    assert not missing
    assert all(SEEDS in key for key in unexpected)
    return host.eval()


# -- keys -------------------------------------------------------------------------------------------------------------


def test_host_and_grown_model_load_each_others_checkpoints(grown: nn.Module) -> None:
    assert {key for key in grown.state_dict() if SEEDS not in key} == set(Net().state_dict())
    host = host_of(grown)
    other = plain_model(grow(Net(), X, PLANTINGS, slots=SLOTS))
    missing, unexpected = other.load_state_dict(host.state_dict(), strict=False)
    assert not unexpected
    assert all(SEEDS in key for key in missing)
    assert torch.equal(other.head.weight, grown.head.weight)
    other.load_state_dict(grown.state_dict())  # of the same growth: strictly
    assert torch.equal(other.eval()(X), grown(X))


def test_a_checkpoint_of_another_kind_of_seed_is_refused_even_where_shapes_fit(grown: nn.Module) -> None:
    changed = [PLANTINGS[0], (1, "depthwise", "sigmoid", "BLENDING"), PLANTINGS[2]]
    other = plain_model(grow(Net(), X, changed, slots=SLOTS))
    with pytest.raises(ValueError, match=r"the seed at 'conv' has blend 'sigmoid', and the checkpoint's has 'linear'"):
        other.load_state_dict(grown.state_dict())


def test_modules_keep_their_classes_and_lengths(grown: nn.Module) -> None:
    fresh = Net()
    for path, module in fresh.named_modules():
        assert type(grown.get_submodule(path)) is type(module), path
    assert len(grown.body) == 3
    assert len(grown.skip) == 0
    assert grown.body[-1] is list(grown.body)[-1]
    assert grown.conv.kernel_size == (3, 3)


# -- round trips ------------------------------------------------------------------------------------------------------


def _folder(grown: nn.Module, path: Path) -> Any:
    return esper.save_seeds(grown, path / "seeds")


def _state(grown: nn.Module, path: Path) -> Any:
    return grown.state_dict()


def _torch_save(grown: nn.Module, path: Path) -> Any:
    torch.save(grown.state_dict(), path / "model.pt")
    return path / "model.pt"


def _safetensors(grown: nn.Module, path: Path) -> Any:
    save_file(grown.state_dict(), path / "model.safetensors")
    return path


@pytest.mark.parametrize("write", [_folder, _state, _torch_save, _safetensors])
def test_seeds_come_back_into_a_host_with_its_weights(
    grown: nn.Module, write: Callable[..., Any], tmp_path: Path
) -> None:
    host, before = host_of(grown), torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = esper.load_seeds(host, write(grown, tmp_path))
    assert again is host
    assert torch.equal(before, torch.get_rng_state())
    torch.testing.assert_close(again(X), grown(X), rtol=0, atol=1e-6)
    assert {key: value.shape for key, value in again.state_dict().items()} == {
        key: value.shape for key, value in grown.state_dict().items()
    }
    again.train()(X).sum().backward()
    assert all(p.grad is not None for _, seed in grafted(again) for p in seed.parameters())


def test_seeds_of_a_model_inside_of_another_and_of_a_part_of_it(grown: nn.Module, tmp_path: Path) -> None:
    class Around(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

    torch.save({"state_dict": Around(grown).state_dict()}, tmp_path / "lit.ckpt")
    around = esper.load_seeds(Around(host_of(grown)), tmp_path / "lit.ckpt")
    torch.testing.assert_close(around.net(X), grown(X), rtol=0, atol=1e-6)
    # The other way round: a part, taken out with its seeds.
    taken = {key.removeprefix("net."): value for key, value in around.state_dict().items()}
    torch.testing.assert_close(esper.load_seeds(host_of(grown), taken)(X), grown(X), rtol=0, atol=1e-6)
    assert [path for path, _ in grafted(around)] == ["net.body", "net.conv", "net.skip"]


def test_a_host_with_other_weights_is_loud_and_precision_follows_the_host(grown: nn.Module, tmp_path: Path) -> None:
    folder = esper.save_seeds(grown, tmp_path)
    with pytest.warns(GrowthWarning, match="grew in a host with other weights than this Net"):
        esper.load_seeds(Net(), folder)
    with pytest.warns(GrowthWarning):
        double = esper.load_seeds(host_of(grown).double(), folder)
    torch.testing.assert_close(double(X.double()).float(), grown(X), rtol=0, atol=1e-5)


def test_a_growing_model_gives_its_acting_seeds(tmp_path: Path) -> None:
    plantings = [(0, "conv", "linear", "TRAINING"), (1, "conv", "linear", "HOLDING")]
    growing = grow(Net(), X, plantings, slots=SLOTS)
    esper.save_seeds(growing, tmp_path)
    assert [seed["path"] for seed in json.loads((tmp_path / DOCUMENT).read_text())["seeds"]] == ["conv"]
    with pytest.raises(ExportError, match=r"seeds still grow in this Net .* save the GrowingModel"):
        esper.save_seeds(growing.host, tmp_path)


def test_a_model_without_seeds_gives_a_folder_without_seeds(tmp_path: Path) -> None:
    host = Net().eval()
    esper.save_seeds(host, tmp_path)
    assert torch.equal(esper.load_seeds(host, tmp_path)(X), host(X))


# -- files made to do harm --------------------------------------------------------------------------------------------


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """With digests that fit."""
    document = json.loads((folder / DOCUMENT).read_text())
    change(document)
    document.pop("digests", None)
    files = {WEIGHTS: (folder / WEIGHTS).read_bytes()}
    (folder / DOCUMENT).write_text(json.dumps(with_digests(document, files, DOCUMENT)))


def refused(source: Any, match: str, host: nn.Module | None = None) -> None:
    host = host or Net()
    keys = list(host.state_dict())
    with pytest.raises(LoadError, match=match) as caught:
        esper.load_seeds(host, source)
    assert "\n" not in str(caught.value)
    assert list(host.state_dict()) == keys  # nothing half done


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda d: d.update(version=2), "has format 2; this Esper reads up to 1: update Esper"),
        (lambda d: d.update(format="other"), "does not describe seeds"),
        (lambda d: d.pop("seeds"), "it has no 'seeds'"),
        (lambda d: d["seeds"][0].update(path="nowhere"), "do not fit this Net"),
        (lambda d: d["seeds"][0].update(alpha=7.0), "alpha must lie between 0 and 1"),
        (lambda d: d["seeds"][0].update(blueprint="__import__"), "is not registered here"),
        (lambda d: d["seeds"][0].update(layout=["conv2d"]), "layout must be"),
        (lambda d: d["seeds"][0]["arguments"].update(channels=2**30), "do not fit|larger seeds"),
        (lambda d: d["seeds"][0]["arguments"].update(channels=9), "do not fit"),
        (lambda d: d["seeds"].append(d["seeds"][0]), "do not fit"),
    ],
)
@pytest.mark.filterwarnings("ignore::esper.GrowthWarning")
def test_documents_that_do_not_fit(
    grown: nn.Module, tmp_path: Path, change: Callable[[dict[str, Any]], Any], match: str
) -> None:
    esper.save_seeds(grown, tmp_path)
    edit(tmp_path, change)
    refused(tmp_path, match)


def test_damaged_files_are_refused(grown: nn.Module, tmp_path: Path) -> None:
    folder = esper.save_seeds(grown, tmp_path / "seeds")
    for name in (DOCUMENT, WEIGHTS):
        whole = (folder / name).read_bytes()
        for content in (b"", whole[:-9], whole[:-20] + bytes([whole[-20] ^ 1]) + whole[-19:]):
            (folder / name).write_bytes(content)
            refused(folder, f"{name} (is|has|does)")
        (folder / name).write_bytes(whole)
    (folder / WEIGHTS).unlink()
    refused(folder, "without the weights there are no seeds")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "holds no seeds: there is neither seeds.json nor model.safetensors")
    refused(tmp_path / "none", "does not exist")
    torch.save(Net().state_dict(), tmp_path / "host.pt")
    refused(tmp_path / "host.pt", "holds no seeds: no key of it has 'esper_seeds'")


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


def test_a_pickle_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    refused(tmp_path / "x.pt", "cannot be read as a checkpoint of tensors .load it yourself")
    torch.save(Bomb(tmp_path / "exploded"), tmp_path / "y.ckpt")
    refused(tmp_path / "y.ckpt", "cannot be read as a checkpoint of tensors")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"holder": 3, "grown": {}}', b"[" * 99_999, b"\xff"])
def test_records_in_a_checkpoint_that_are_no_records(grown: nn.Module, text: bytes) -> None:
    state = dict(grown.state_dict())
    key = next(key for key in state if key.endswith("_extra_state"))
    state[key] = torch.tensor(list(text), dtype=torch.uint8)
    refused(state, "record of a seed is damaged")
    with pytest.raises(ValueError, match="record of a seed is damaged"):
        grown.load_state_dict(state)


def test_a_checkpoint_without_its_record_and_one_for_another_host(grown: nn.Module) -> None:
    state = {key: value for key, value in grown.state_dict().items() if not key.endswith("_extra_state")}
    refused(state, "record of a seed is damaged")
    refused(grown.state_dict(), "does not fit this Linear", nn.Linear(2, 2))
    state = grown.state_dict()
    smaller = {key: value[..., :1] if ".seed." in key and value.dim() else value for key, value in state.items()}
    refused(smaller, "do not fit this Net")


def test_a_host_with_seeds_is_refused(grown: nn.Module) -> None:
    host = esper.load_seeds(host_of(grown), grown.state_dict())
    with pytest.raises(LoadError, match="the host has a seed at 'body' already: pass a fresh Net"):
        esper.load_seeds(host, grown.state_dict())


def test_seed_state_is_the_seeds_part_of_the_state(grown: nn.Module, tmp_path: Path) -> None:
    assert set(seed_state(grown)) == set(grown.state_dict()) - set(Net().state_dict())
    save_file(seed_state(grown), tmp_path / "x.safetensors")
    assert set(load_file(tmp_path / "x.safetensors")) == set(seed_state(grown))
    again = esper.load_seeds(host_of(grown), tmp_path / "x.safetensors")
    torch.testing.assert_close(again(X), grown(X), rtol=0, atol=1e-6)


def test_the_strength_of_an_unfinished_seed_comes_with_its_weights(grown: nn.Module) -> None:
    fresh = plain_model(grow(Net(), X, PLANTINGS, slots=SLOTS)).eval()
    (blending,) = (seed for _, seed in grafted(fresh) if seed.alpha < 1.0)
    blending.alpha = 0.125
    fresh.load_state_dict(grown.state_dict())
    assert torch.equal(fresh(X), grown(X))
    state = dict(grown.state_dict())
    key = next(key for key in state if key.endswith("_extra_state"))
    text = bytes(state[key].tolist()).replace(b'"alpha": 1.0', b'"alpha": "x"')
    state[key] = torch.tensor(list(text), dtype=torch.uint8)
    with pytest.raises(ValueError, match="alpha of a seed must lie between 0 and 1, not be 'x'"):
        fresh.load_state_dict(state)


@pytest.mark.parametrize("how", ["folder", "seeds", "in_place"])
def test_a_sequential_and_its_last_layer_that_both_grew_keep_their_seeds_apart(tmp_path: Path, how: str) -> None:
    torch.manual_seed(0)
    plantings = [(0, "norm", "linear", "FOSSILIZED"), (1, "norm", "linear", "FOSSILIZED")]
    model = plain_model(grow(Net(), X, plantings, slots=["body.2", "body"])).eval()
    for number, (_, seed) in enumerate(grafted(model)):
        torch.nn.init.constant_(next(seed.parameters()), 2.0 + number)
    if how == "folder":
        esper.growth.export.save(model, tmp_path, X)
        again = esper.load(tmp_path, host=Net())
    else:
        again = Net().eval()
        again.load_state_dict(model.state_dict(), strict=False)
        if how == "seeds":
            esper.load_seeds(again, esper.save_seeds(model, tmp_path))
        else:
            graft_from(model, again)
    assert torch.equal(again(X), model(X))
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name

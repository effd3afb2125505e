"""The seeds of a grown model alone, without its host: `seeds.safetensors`, and `seeds.json` that says what they are.

`load_seeds` puts them into a host again. It also takes checkpoints that other tools wrote of a grown model, because
the seeds in a `state_dict()` say what they are (see `graft.py`). Data only: nothing is unpickled, and nothing is run.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from safetensors.torch import save as serialize
from torch import Tensor, nn

from esper.config import read_small
from esper.errors import GrowthWarning, refused
from esper.files import write_whole
from esper.growth.folder import (
    ARCHITECTURE,
    MOST_JSON_BYTES,
    LoadError,
    Sizes,
    TooLargeError,
    check_digests,
    check_plain,
    with_digests,
    without_memory,
)
from esper.growth.graft import SEEDS, fill, graft, holder_of, read_record
from esper.growth.model import GrowingModel, planted_modules
from esper.growth.plain import ExportError, grafted, grafts_of, plain_model
from esper.growth.randomness import preserved_rng
from esper.growth.saved import build_seed, class_of, read_graft
from esper.growth.standalone import Graft
from esper.growth.tensors import count_parameters

DOCUMENT, WEIGHTS = "seeds.json", "seeds.safetensors"
FORMAT, FORMAT_VERSION = "esper-seeds", 1
IN_CHECKPOINT = SEEDS
"""The key under which a checkpoint of Lightning keeps seeds beside the `state_dict` of the host."""

_KEY = re.compile(rf"(?:(?P<holder>.+)\.)?{SEEDS}\.(?P<number>\d+)\.(?P<name>.+)")


@dataclass(frozen=True, slots=True)
class Found:
    """One seed of a file: what it is, and its weights."""

    record: Graft
    weights: dict[str, Tensor]
    root: str = ""
    """The part of the host that the grown model is; the record's path begins there."""


def save_seeds(model: nn.Module, directory: str | Path) -> Path:
    """Write what grew in `model`, plain or growing, to `directory`; `load_seeds` puts it into a host again."""
    if isinstance(model, GrowingModel):
        model = plain_model(model, share=True)
    elif planted := planted_modules(model):
        raise ExportError(
            f"seeds still grow in this {type(model).__name__} (at {planted[0]}): save the GrowingModel that holds it"
        )
    grafts = grafts_of(model)
    tensors = {
        f"{number}.{name}": value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for number, (_, seed) in enumerate(grafts)
        for name, value in seed.state_dict().items()
    }
    files = {WEIGHTS: serialize(tensors)}
    document = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "torch": str(torch.__version__),
        "host": {"class": type(model).__name__, "weights": _fingerprint(model)},
        "seeds": [asdict(record) for record, _ in grafts],
    }
    files[DOCUMENT] = json.dumps(with_digests(document, files, DOCUMENT), indent=1).encode()
    folder = Path(directory)
    with refused(ExportError, f"cannot write the seeds to {folder}", OSError):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / DOCUMENT).unlink(missing_ok=True)  # until the new one says that all is there
        for name, content in files.items():
            write_whole(folder / name, content)
    return folder


def load_seeds(host: nn.Module, source: str | Path | Mapping[str, Any]) -> nn.Module:
    """Put seeds into `host`, the object itself, and give it back. Their weights come from `source`, the host's do not.

    `source` is a folder that `save_seeds` wrote; or a checkpoint of a grown model: a folder of `save_pretrained`, a
    checkpoint of Lightning, a `.safetensors`, a file of `torch.save(model.state_dict())`, or such a `state_dict()`.
    """
    if not isinstance(host, nn.Module):
        raise ValueError(f"the host must be a torch.nn.Module, not {type(host).__name__}")
    if there := [*planted_modules(host), *(path for path, _ in grafted(host))]:
        raise LoadError(f"the host has a seed at {there[0]!r} already: pass a fresh {type(host).__name__}")
    where = "the state_dict" if isinstance(source, Mapping) else str(source)
    if not isinstance(source, Mapping) and (Path(source) / DOCUMENT).exists():
        found = _read_folder(Path(source), host)
    else:
        state = source if isinstance(source, Mapping) else _read_checkpoint(Path(source))
        found = _find(host, state, where)
    wrong = (TypeError, ValueError, KeyError, AttributeError, RuntimeError, OverflowError)
    with (
        refused(LoadError, f"the seeds of {where} do not fit this {type(host).__name__}", *wrong),
        refused(LoadError, f"{where} describes larger seeds than its weights", TooLargeError),
    ):
        placed = [(host.get_submodule(one.root), _placed(host.get_submodule(one.root), one)) for one in found]
    for root, place in placed:  # all are built by now: a host gets all of its seeds, or none
        graft(root, [place])
    return host


def seed_state(model: nn.Module) -> dict[str, Tensor]:
    """The part of a plain model's `state_dict()` that is its seeds'."""
    return {key: value for key, value in model.state_dict().items() if _KEY.fullmatch(key)}


# -- reading ------------------------------------------------------------------------------------------------------


def _placed(host: nn.Module, found: Found) -> tuple[str, nn.Module, float, dict[str, Any]]:
    """A seed with its weights, as `graft` takes it."""
    record, module = found.record, host.get_submodule(found.record.path)
    with preserved_rng(torch.device("cpu")):
        with without_memory(Sizes.of(found.weights)):
            nn.ModuleList([build_seed(record)])  # a list registers, and so counts, it
        seed = build_seed(record)
    fill(seed, found.weights, {})
    like = next(module.parameters(), next(host.parameters()))
    named = replace(record, class_name=class_of(record).__name__, parameters=count_parameters(seed))
    seed.to(like.device, like.dtype).train(module.training)
    return record.path, seed, float(record.alpha), asdict(named)


def _read_folder(folder: Path, host: nn.Module) -> list[Found]:
    path, weights = folder / DOCUMENT, folder / WEIGHTS
    with refused(LoadError, f"{path} is damaged or cannot be read", OSError, ValueError, TypeError, RecursionError):
        document = json.loads(read_small(path, MOST_JSON_BYTES))
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise LoadError(f"{path} does not describe seeds that Esper saved")
        version = document.get("version")
        if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
            raise LoadError(f"{path} has format {version!r:.60}; this Esper reads up to {FORMAT_VERSION}: update Esper")
        check_digests(document, folder, DOCUMENT, (WEIGHTS,))
        if not isinstance(document.get("seeds"), list):
            raise LoadError(f"{path} is damaged: it has no 'seeds'")
        records = [read_graft(data, str(path)) for data in document["seeds"]]
    if not weights.exists():
        raise LoadError(f"there is no {weights}: without the weights there are no seeds")
    tensors = _tensors(weights)
    if strange := [name for name in tensors if name.partition(".")[0] not in {str(i) for i in range(len(records))}]:
        raise LoadError(f"{weights} belongs to other seeds than {path} describes: it has {strange[0]!r:.60}")
    if isinstance(document.get("host"), dict) and document["host"].get("weights") != _fingerprint(host):
        warnings.warn(
            f"the seeds of {folder} grew in a host with other weights than this {type(host).__name__} has: load those, "
            "too, or its outputs are not what was measured",
            GrowthWarning,
            stacklevel=3,
        )
    return [
        Found(record, {name.removeprefix(f"{i}."): t for name, t in tensors.items() if name.startswith(f"{i}.")})
        for i, record in enumerate(records)
    ]


def _read_checkpoint(path: Path) -> Mapping[str, Any]:
    """What a checkpoint has of seeds, of whatever tool it is."""
    if path.is_dir():
        files = sorted(path.glob("model*.safetensors"))
        if (path / ARCHITECTURE).exists():
            raise LoadError(f"{path} holds a whole model: use esper.load({str(path)!r}, host=…)")
        if not files:
            raise LoadError(f"{path} holds no seeds: there is neither {DOCUMENT} nor model.safetensors in it")
        return {name: tensor for file in files for name, tensor in _tensors(file, SEEDS).items()}
    if not path.exists():
        raise LoadError(f"{path} does not exist")
    check_plain(path)
    if path.suffix == ".safetensors":
        return _tensors(path, SEEDS)
    cure = "load it yourself, and pass its state_dict"
    with refused(LoadError, f"{path} cannot be read as a checkpoint of tensors ({cure})", Exception):
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(loaded, Mapping):
        raise LoadError(f"{path} holds a {type(loaded).__name__}, not a checkpoint with a state_dict")
    return loaded


def _tensors(path: Path, part: str = "") -> dict[str, Tensor]:
    """Those with this in their name."""
    check_plain(path)
    with refused(LoadError, f"{path} is damaged", SafetensorError, OSError, ValueError):
        if not part:
            return load_file(path)
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys() if part in name}  # noqa: SIM118 (no mapping)


def _find(host: nn.Module, state: Mapping[str, Any], where: str) -> list[Found]:
    """The seeds among the keys of a checkpoint, in the order in which they act."""
    may_be_empty = isinstance(state.get(IN_CHECKPOINT), Mapping)  # a place for seeds, where none may act yet
    for part in (IN_CHECKPOINT, "state_dict"):
        if isinstance(state.get(part), Mapping):
            state = state[part]
            break
    seeds: dict[tuple[str, int], dict[str, Tensor]] = {}
    for key, value in state.items():
        if (match := _KEY.fullmatch(str(key))) and isinstance(value, Tensor) and len(match["number"]) < 10:
            seeds.setdefault((match["holder"] or "", int(match["number"])), {})[match["name"]] = value
    if not seeds and not may_be_empty:
        raise LoadError(f"{where} holds no seeds: no key of it has {SEEDS!r} in it")
    found: dict[tuple[nn.Module, int], Found] = {}
    for (holder, number), tensors in sorted(seeds.items(), key=lambda item: item[0][1]):
        with refused(LoadError, f"a seed of {where} does not fit this {type(host).__name__}", *_MISFITS):
            record = read_record(tensors.get("_extra_state"))  # type: ignore[arg-type]  # None is damaged, too
            root, path = _place(record["grown"].get("path"), record["holder"], holder)
            read = read_graft({**record["grown"], "path": path}, where)
            if holder_of(host.get_submodule(root), path)[0] is not host.get_submodule(holder):
                raise LoadError(f"the seed of {where} at {path!r} lies under {holder!r}, where this host has none")
        weights = {name.removeprefix("seed."): t for name, t in tensors.items() if name.startswith("seed.")}
        found.setdefault(
            (host.get_submodule(holder), number), Found(read, weights, root)
        )  # a module may have two names
    return list(found.values())


_MISFITS = (TypeError, ValueError, KeyError, AttributeError)


def _place(slot: Any, then: str, now: str) -> tuple[str, str]:
    """(root, path from there) of a slot in this host, whose `holder` had another path then.

    The grown model may have become a part of the host, or the host may be a part of what it was.
    """
    if not isinstance(slot, str):
        raise LoadError("the checkpoint's record of a seed is damaged")
    if now == then:
        return "", slot
    if not then or now.endswith(f".{then}"):
        return now[: len(now) - len(then)].removesuffix("."), slot
    return "", slot.removeprefix(then[: len(then) - len(now)])


def _fingerprint(model: nn.Module) -> str:
    """Of the host's weights; seeds do not count."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if isinstance(value, Tensor) and not _KEY.fullmatch(name):
            digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return f"sha256:{digest.hexdigest()}"

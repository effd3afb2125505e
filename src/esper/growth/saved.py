"""Read a saved model back. Data only: nothing is unpickled, and no code that lies in the directory is run.

Esper's own hosts, and others given as `host=`, are rebuilt from `architecture.json` and `model.safetensors`. A host
whose class is the user's can only come back as the program in `model.pt2`. A program may be made to run any code, so
it is loaded only with `trust_program`, and checked even then (see `program.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from esper.actions import BLENDS
from esper.errors import refused
from esper.growth.blueprints import LAYOUTS, VISIBILITIES, SlotShape, blueprint_names, enclosed, get_blueprint
from esper.growth.folder import (
    FIRST_WITH_HOST_KEYS,
    LoadError,
    Sizes,
    TooLargeError,
    check_plain,
    read_architecture,
    without_memory,
)
from esper.growth.graft import fill, graft
from esper.growth.older import renamed
from esper.growth.program import read_program
from esper.growth.randomness import preserved_rng
from esper.growth.standalone import Graft, find_host
from esper.lifecycle import IN_FORWARD, Stage

__all__ = ["LoadError", "assemble", "load"]


def load(directory: str | Path, *, host: nn.Module | None = None, trust_program: bool = False) -> nn.Module:
    """The model that `save` wrote to `directory`, on the CPU and in evaluation mode.

    With one of Esper's own hosts this is an ordinary module that can be trained further. For a host of the user's own
    class, pass a fresh `host` built as the saved one was; it is taken over, grafted and filled. Neither runs anything
    that lies in the directory.

    Without the class, `trust_program=True` loads the exported program: it gives the same outputs, and can neither
    change its mode nor be grown. A program of unknown origin is as dangerous as a Python file of unknown origin:
    Esper refuses what it recognises, and cannot recognise everything.
    """
    folder = Path(directory)
    architecture = read_architecture(folder)
    known = isinstance(architecture["host"], dict) and architecture["host"].get("config") is not None
    if host is None and not known:
        return _load_program(folder, architecture, trusted=trust_program)
    weights = folder / "model.safetensors"
    sizes = _weight_sizes(weights)
    model = assemble(architecture, folder / "architecture.json", sizes, host)
    damage = (SafetensorError, OSError, ValueError, TypeError, AttributeError, RuntimeError)
    with refused(LoadError, f"{weights} is damaged or belongs to another model", *damage):
        tensors, tied = load_file(weights), architecture["tied"]
        _check_tied(tied, tensors.keys(), folder / "architecture.json")
        if architecture["version"] < FIRST_WITH_HOST_KEYS:
            tensors, tied = renamed(model, tensors, tied)
        _check_kinds(model, tensors)
        fill(model, tensors, tied)
    return model.eval()


def _weight_sizes(weights: Path) -> Sizes:
    if not weights.exists():
        raise LoadError(f"there is no {weights}: without the weights there is no model")
    check_plain(weights)
    with refused(LoadError, f"{weights} is damaged", SafetensorError, OSError):
        return Sizes.read(weights)


def _check_kinds(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Precision may differ from what the constructor gives; integers for real numbers may not."""
    for name, own in model.state_dict().items():
        saved = tensors.get(name)
        if isinstance(own, Tensor) and saved is not None and _kind(own) != _kind(saved):
            raise ValueError(f"{name} is {saved.dtype} where the model has {own.dtype}")


def _kind(tensor: Tensor) -> tuple[bool, bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex(), tensor.dtype is torch.bool


def assemble(architecture: dict[str, Any], path: Path, sizes: Sizes, host: nn.Module | None = None) -> nn.Module:
    """The network that an architecture describes, with fresh weights: in the given host, or in one built from data.

    It is built without memory first, and refused if it has more than weights of these `sizes` could fill.
    """
    whose = "a model that can be built" if host is None else f"this {type(host).__name__}"
    wrong = (TypeError, ValueError, KeyError, AttributeError, RuntimeError, StopIteration, OverflowError)
    with (
        refused(LoadError, f"{path} does not describe {whose}", *wrong),
        refused(LoadError, f"{path} describes another model than the weights beside it", TooLargeError),
    ):
        sizes.check_modules(len(architecture["grafts"]))
        grafts = [read_graft(graft_data, str(path)) for graft_data in architecture["grafts"]]
        if architecture["version"] < FIRST_WITH_HOST_KEYS:
            grafts.reverse()  # of a module that grew twice, the later seed came first
        with preserved_rng(torch.device("cpu")):
            with without_memory(sizes):
                if host is None:
                    _grafted(_build_host(architecture["host"], path), grafts)
                else:
                    nn.ModuleList(build_seed(record) for record in grafts)  # a list registers, and so counts, them
            return _grafted(_build_host(architecture["host"], path) if host is None else host, grafts)


def _grafted(model: nn.Module, grafts: list[Graft]) -> nn.Module:
    device = next(model.parameters()).device
    places = []
    for record in grafts:
        named = replace(record, class_name=class_of(record).__name__)  # the seed's own, never the file's
        places.append((record.path, build_seed(record).to(device), float(record.alpha), asdict(named)))
    graft(model, places)
    return model


def _build_host(data: dict[str, Any], path: Path) -> nn.Module:
    if find_host(data["class"]) is None:
        # Registers Esper's own hosts. By name, for growth must not depend on any host; it only finds what is there.
        import_module("esper.tasks")
    kind = find_host(data["class"])
    if kind is None:
        raise LoadError(
            f"{path} needs the host {data['class']!r:.60}: import the file that registers it, or pass host="
        )
    _check_types(data["config"], kind.__init__, f"{path} is damaged: the host's")
    return kind(**data["config"])


def read_graft(data: Any, path: str) -> Graft:
    """One entry of the grafts, with nothing in it that no growing model could have written."""
    graft = Graft(**data)
    damaged = f"{path} does not describe a model that grew: a graft's"
    _check_types(data, Graft, damaged)
    if not 0.0 <= graft.alpha <= 1.0:
        raise LoadError(f"{damaged} alpha must lie between 0 and 1, not be {graft.alpha}")
    if not graft.path:  # to torch, the whole model
        raise LoadError(f"{damaged} path must name a module of the host, not be empty")
    if not graft.class_name.isidentifier():
        raise LoadError(f"{damaged} class_name must be a name, not {graft.class_name!r:.60}")
    stages = [stage.name for stage in Stage if stage in IN_FORWARD]
    for name, known in (("blend", BLENDS), ("layout", LAYOUTS), ("stage", stages), ("visibility", VISIBILITIES)):
        if getattr(graft, name) not in known:
            raise LoadError(f"{damaged} {name} must be one of {', '.join(known)}, not {data[name]!r:.60}")
    return graft


def _check_types(data: dict[str, Any], annotated: Any, damaged: str) -> None:
    """Refuse plain data of another type than annotated. It may pass for something else: 'no' is true to Python."""
    try:
        hints = get_type_hints(annotated)
    except NameError:  # a user's host, with types that only the type checker can resolve
        return
    for name, wanted in hints.items():
        if name in data and not _fits(data[name], wanted):
            kind = wanted.__name__ if isinstance(wanted, type) and get_origin(wanted) is None else wanted
            raise LoadError(f"{damaged} {name} must be {kind}, not {data[name]!r:.60}")


def _fits(value: Any, wanted: Any) -> bool:
    """Types other than those of JSON are the host's own matter."""
    origin, parts = get_origin(wanted), get_args(wanted)
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is list:
        return isinstance(value, list) and all(_fits(item, parts[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict)
    if wanted is float:
        return type(value) in (int, float)
    return type(value) is wanted if wanted in (int, str, bool, NoneType) else True


def _check_tied(tied: Any, saved: Collection[str], path: Path) -> None:
    """Names that share a tensor: each must be new, and share one that was saved. `fill` ensures that both exist."""
    if not isinstance(tied, dict):
        raise LoadError(f"{path} is damaged or belongs to other weights: 'tied' must be an object, not {tied!r:.60}")
    for name, other in tied.items():
        if name in saved or not isinstance(other, str) or other not in saved:
            raise LoadError(
                f"{path} is damaged or belongs to other weights: {name!r:.60} cannot share {other!r:.60}, because "
                + ("it has weights of its own" if name in saved else "there is no such tensor")
            )


def class_of(record: Graft) -> type[nn.Module]:
    if record.blueprint not in blueprint_names():
        raise LoadError(
            f"the model grew the blueprint {record.blueprint!r:.60}, which is not registered here: "
            "import the file that defines it, then load again"
        )
    return get_blueprint(record.blueprint, record.layout).module  # type: ignore[arg-type]  # `read_graft` has looked


def build_seed(record: Graft) -> nn.Module:
    # The saved arguments, not today's options: a blueprint may have been re-tuned since.
    body = class_of(record)(**record.arguments)
    shape = SlotShape(
        record.layout,  # type: ignore[arg-type]
        record.arguments["channels"],
        visibility=record.visibility,  # type: ignore[arg-type]
        channels_last=record.channels_last,
    )
    return enclosed(body, shape, record.blend)


def _load_program(folder: Path, architecture: dict[str, Any], *, trusted: bool) -> nn.Module:
    path = folder / "model.pt2"
    name = architecture["host"].get("class") if isinstance(architecture["host"], dict) else None
    name = name if isinstance(name, str) and name.isidentifier() else "host"
    if not path.exists():
        raise LoadError(f"{path} does not exist, and Esper cannot rebuild a {name}: pass host= with a fresh one")
    check_plain(path)
    if not trusted:
        raise LoadError(
            f"{folder} holds a {name}, which Esper cannot rebuild from data, and a program (model.pt2), which can "
            f"run any code on this computer: pass host= with a fresh {name} to use the weights alone, or "
            "trust_program=True if you trust whoever made the folder"
        )
    with refused(LoadError, f"{path} cannot be read", OSError):
        return read_program(path)

"""Read a saved model back. Data only: nothing is unpickled, and no code that lies in the directory is run.

Esper's own hosts, and others given as `host=`, are rebuilt from `architecture.json` and `model.safetensors`. A host
whose class is the user's can only come back as the program in `model.pt2`, which is checked first (see `program.py`).
"""

from __future__ import annotations

import json
from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from esper.actions import BLENDS
from esper.growth.blueprints import LAYOUTS, VISIBILITIES, SlotShape, blueprint_names, enclosed, get_blueprint
from esper.growth.graft import fill, graft
from esper.growth.program import ProgramError, read_program
from esper.growth.slot import preserved_rng
from esper.growth.standalone import Graft, find_host
from esper.lifecycle import IN_FORWARD, Stage

FORMAT = "esper-model"
FORMAT_VERSION = 2
"""2: grafts say what they may read (`visibility`), and may stand where channels come last."""


class LoadError(ValueError):
    """A directory that holds no usable model, with the reason."""


def load(directory: str | Path, *, host: nn.Module | None = None) -> nn.Module:
    """The model that `save` wrote to `directory`, on the CPU and in evaluation mode.

    With one of Esper's own hosts this is an ordinary module that can be trained further. With a host of the user's own
    class it is the exported program: it gives the same outputs, and can neither change its mode nor be grown. To get
    an ordinary module there, too, pass a fresh `host` built as the saved one was; it is taken over, grafted and filled.
    """
    folder = Path(directory)
    architecture = _read_architecture(folder)
    known = isinstance(architecture["host"], dict) and architecture["host"].get("config") is not None
    if host is None and not known:
        return _load_program(folder, architecture)
    model = assemble(architecture, folder / "architecture.json", host)
    weights = folder / "model.safetensors"
    try:
        tensors = load_file(weights)
        _check_tied(architecture["tied"], tensors.keys(), folder / "architecture.json")
        fill(model, tensors, architecture["tied"])
    except FileNotFoundError:
        raise LoadError(f"there is no {weights}: without the weights there is no model") from None
    except LoadError:
        raise
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise LoadError(f"{weights} is damaged or belongs to another model: {_first_line(error)}") from error
    return model.eval()


def _read_architecture(folder: Path) -> dict[str, Any]:
    path = folder / "architecture.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LoadError(f"{folder} holds no saved model: there is no architecture.json in it") from None
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path} is damaged: {_first_line(error)}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise LoadError(f"{path} does not describe a model saved by Esper")
    version = found.get("version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise LoadError(f"{path} has format {version}; this Esper reads up to {FORMAT_VERSION}: update Esper")
    if missing := [key for key in ("host", "grafts", "tied") if key not in found]:
        raise LoadError(f"{path} is damaged: it has no {missing[0]!r}")
    return found


def assemble(architecture: dict[str, Any], path: Path, host: nn.Module | None = None) -> nn.Module:
    """The network that an architecture describes, with fresh weights: in the given host, or in one built from data."""
    try:
        grafts = [_read_graft(graft_data, path) for graft_data in architecture["grafts"]]
        with preserved_rng(torch.device("cpu")):
            model = _build_host(architecture["host"], path) if host is None else host
            device = next(model.parameters()).device
            graft(model, [(g.path, _build_seed(g).to(device), float(g.alpha), _plain(g)) for g in grafts])
    except LoadError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, StopIteration) as error:
        whose = "a model that can be built" if host is None else f"this {type(host).__name__}"
        raise LoadError(f"{path} does not describe {whose}: {_first_line(error)}") from error
    return model


def _build_host(data: dict[str, Any], path: Path) -> nn.Module:
    if find_host(data["class"]) is None:
        # Registers Esper's own hosts. By name, for growth must not depend on any host; it only finds what is there.
        import_module("esper.tasks")
    kind = find_host(data["class"])
    if kind is None:
        raise LoadError(f"{path} needs the host {data['class']!r}: import the file that registers it, or pass host=")
    _check_types(data["config"], kind.__init__, f"{path} is damaged: the host's")
    return kind(**data["config"])


def _read_graft(data: Any, path: Path) -> Graft:
    """One entry of the grafts, with nothing in it that no growing model could have written."""
    graft = Graft(**data)
    damaged = f"{path} does not describe a model that grew: a graft's"
    _check_types(data, Graft, damaged)
    if not 0.0 <= graft.alpha <= 1.0:
        raise LoadError(f"{damaged} alpha must lie between 0 and 1, not be {graft.alpha}")
    stages = [stage.name for stage in Stage if stage in IN_FORWARD]
    for name, known in (("blend", BLENDS), ("layout", LAYOUTS), ("stage", stages), ("visibility", VISIBILITIES)):
        if getattr(graft, name) not in known:
            raise LoadError(f"{damaged} {name} must be one of {', '.join(known)}, not {data[name]!r:.60}")
    return graft


def _check_types(data: dict[str, Any], annotated: Any, damaged: str) -> None:
    """Refuse plain data of another type than annotated. It may pass for something else: 'no' is true to Python."""
    try:
        hints = get_type_hints(annotated)
    except NameError:  # somebody's own host, with types that are known to the type checker alone
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
    """Names that share a tensor: each must be new, and share one that was saved. `fill` sees to it that both exist."""
    if not isinstance(tied, dict):
        raise LoadError(f"{path} is damaged or belongs to other weights: 'tied' must be an object, not {tied!r:.60}")
    for name, other in tied.items():
        if name in saved or not isinstance(other, str) or other not in saved:
            raise LoadError(
                f"{path} is damaged or belongs to other weights: {name!r} cannot share {other!r:.60}, because "
                + ("it has weights of its own" if name in saved else "there is no such tensor")
            )


def _build_seed(record: Graft) -> nn.Module:
    if record.blueprint not in blueprint_names():
        raise LoadError(
            f"the model grew the blueprint {record.blueprint!r}, which is not registered here: "
            "import the file that defines it, then load again"
        )
    # The saved arguments, not today's options: a blueprint may have been re-tuned since.
    body = get_blueprint(record.blueprint, record.layout).module(**record.arguments)  # type: ignore[arg-type]
    shape = SlotShape(
        record.layout,  # type: ignore[arg-type]  # `_read_graft` has looked
        record.arguments["channels"],
        visibility=record.visibility,  # type: ignore[arg-type]
        channels_last=record.channels_last,
    )
    return enclosed(body, shape, record.blend)


def _plain(record: Graft) -> dict[str, Any]:
    return {name: getattr(record, name) for name in Graft.__dataclass_fields__}


def _load_program(folder: Path, architecture: dict[str, Any]) -> nn.Module:
    path = folder / "model.pt2"
    if not path.exists():
        name = architecture["host"].get("class") if isinstance(architecture["host"], dict) else "host"
        raise LoadError(f"{path} does not exist, and Esper cannot rebuild a {name}: pass host= with a fresh one")
    try:
        return read_program(path)
    except (ProgramError, OSError) as error:
        raise LoadError(str(error)) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__

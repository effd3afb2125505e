"""A grown model, out of Esper: as a plain `nn.Module`, and as files that load without Esper installed.

`save` writes `model.pt2` (a program, see `program.py`), `model.safetensors` with `architecture.json` (weights, and the
plain data that rebuilds the network), and for Esper's own hosts `model.py` (see `standalone.py`). `saved.py` reads it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as serialize
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from esper.files import write_whole
from esper.growth.costs import countable_flops
from esper.growth.folder import ARCHITECTURE, FORMAT, FORMAT_VERSION, Sizes, with_digests
from esper.growth.graft import is_record
from esper.growth.model import GrowingModel, planted_modules
from esper.growth.plain import ExportError, copied, grafts_of, output_gap, plain_model
from esper.growth.probe import AttachError, arguments, call, try_batch, untouched, with_batch
from esper.growth.program import Program, packed, trace
from esper.growth.saved import LoadError, assemble, load
from esper.growth.standalone import NotPortableError, find_host, model_source
from esper.growth.tensors import count_parameters

__all__ = ["ExportError", "LoadError", "Saved", "grafts_of", "load", "plain_model", "save"]

TOLERANCE = 1e-5
"""Largest difference of outputs, relative to values above 1, that a saved model may have."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What `save` wrote, and its warnings."""

    directory: Path
    files: tuple[str, ...]
    warnings: tuple[str, ...]
    """One line for each thing that is not as one would wish: a file that is missing, a batch size that is fixed."""


# -- to files -----------------------------------------------------------------------------------------------------


def save(model: nn.Module, directory: str | Path, example: Any, *, history: Any = None) -> Saved:
    """Write a growing model, or a plain one made from it, to `directory`; `example` is a batch for its forward.

    `history` is plain data for `history.json`. All files are made before the first is written, and each appears
    complete or not at all, `architecture.json` last.
    """
    if not isinstance(model, GrowingModel) and (planted := planted_modules(model)):
        raise ExportError(
            f"seeds still grow in this {type(model).__name__} (at {planted[0]}): save the GrowingModel that holds it"
        )
    plain = plain_model(model) if isinstance(model, GrowingModel) else copied(model)
    plain.eval()
    package = _check_example(plain, example)
    warnings: list[str] = []
    if isinstance(model, GrowingModel):
        warnings += _difference(model, plain, example, "the plain model")
    plain.cpu()  # a model that was trained on a GPU must load where there is none
    example = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), example)

    program = trace(plain, example)
    if program.exported is not None:
        fitting = with_batch(example, 3) if program.batch == "any" else example
        warnings += _difference(plain, program.exported.module(), fitting, "model.pt2")
    program, content = packed(program)
    tensors, tied = _tensors(plain)
    architecture = _architecture(plain, example, tied)
    source, no_source = _source(plain, architecture)
    if warning := _what_is_missing(type(plain).__name__, program, no_source, package):
        warnings.append(warning)
    architecture["model.pt2"] = {"batch": program.batch, "why": program.problem}
    architecture["model.py"] = {"written": bool(source), "why": no_source}
    architecture["warnings"] = warnings

    files = {
        "model.safetensors": serialize(tensors),
        "model.pt2": content,
        "model.py": source.encode(),
        "history.json": b"" if history is None else _json(history),
    }
    files[ARCHITECTURE] = _json(with_digests(architecture, files))
    _write(Path(directory), files)
    return Saved(Path(directory), tuple(name for name, content in files.items() if content), tuple(warnings))


def _check_example(plain: nn.Module, example: Any) -> str:
    """The package of what the model returns, if it is neither torch's nor Python's."""
    try:
        kind = type(try_batch(plain, example))
    except AttachError as error:
        raise ExportError(str(error)) from error
    package = kind.__module__.partition(".")[0]
    return "" if package in ("builtins", "torch", "collections") else package


def _what_is_missing(name: str, program: Program, no_source: str, package: str) -> str:
    """One line about the forms in which a model is not there, and what to use in their place."""
    if program.exported is None:
        neither = f"no model.py ({no_source}) and " if no_source else ""
        use = f"use esper.load(folder, host=…) with a fresh {name}" if no_source else "use model.py, or esper.load"
        return f"{neither}no model.pt2 ({program.problem}): {use}"
    hints = [f"import {package} before you load it"] if package else []
    hints += [] if program.cache else ["it has no key-value cache, as with use_cache=False"]
    hints += [program.problem] if program.problem else []
    note = f" ({'; '.join(hints)})" if hints else ""
    if no_source:
        return f"no model.py: {no_source}; use model.pt2{note}, or esper.load(folder, host=…)"
    return f"model.pt2{note}" if hints else ""


def _difference(reference: nn.Module, other: nn.Module, example: Any, what: str) -> list[str]:
    """Empty when both give the same outputs; else the warning."""
    with untouched(reference):
        gap = output_gap(call(reference, example), call(other, example))
    if gap <= TOLERANCE:
        return []
    return [f"the outputs of {what} differ by {gap:.2g} on the example batch: do not rely on it"]


def _tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The model's state, each tensor once; and which further names share one."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    owners: dict[Any, str] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor) or is_record(name):
            continue  # state that a module keeps by code of its own: the architecture restores it
        same = (value.data_ptr(), value.shape, value.stride(), value.dtype) if value.numel() else name
        if (owner := owners.setdefault(same, name)) != name:
            tied[name] = owner
        else:
            tensors[name] = value.clone(memory_format=torch.contiguous_format)
    return tensors, tied


def _architecture(plain: nn.Module, example: Any, tied: dict[str, str]) -> dict[str, Any]:
    args, kwargs = arguments(example)
    grafts = [record for record, _ in grafts_of(plain)]
    grown = sum(record.parameters for record in grafts)
    inputs = {str(name): value for name, value in (*enumerate(args), *kwargs.items())}
    architecture: dict[str, Any] = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "torch": str(torch.__version__),
        "host": {"class": type(plain).__name__, "module": type(plain).__module__, "config": None},
        "grafts": [asdict(record) for record in grafts],
        "tied": tied,
        "parameters": {"total": count_parameters(plain), "host": count_parameters(plain) - grown, "grown": grown},
        "flops_per_example": countable_flops(plain, example),
        "example": {n: [str(v.dtype), *v.shape] for n, v in inputs.items() if isinstance(v, Tensor)},
    }
    architecture["host"]["config"] = _config(plain, architecture)
    return architecture


def _config(plain: nn.Module, architecture: dict[str, Any]) -> Any:
    """What rebuilds the host exactly; None when nothing is known to."""
    config = getattr(plain, "config", None)
    if find_host(type(plain).__name__) is not type(plain) or not isinstance(config, dict):
        return None
    try:
        as_saved = json.loads(json.dumps({**architecture, "host": {**architecture["host"], "config": config}}))
        again = assemble(as_saved, Path(ARCHITECTURE), Sizes.of(plain.state_dict()))
    except (TypeError, ValueError):
        return None
    shapes = [{name: v.shape for name, v in m.state_dict().items() if not is_record(name)} for m in (plain, again)]
    return config if shapes[0] == shapes[1] else None  # unequal when the host was changed after it was built


def _source(plain: nn.Module, architecture: dict[str, Any]) -> tuple[str, str]:
    """The text of model.py, or "" and why there is none."""
    name = type(plain).__name__
    if architecture["host"]["config"] is None and find_host(name) is type(plain):
        return "", f"this {name} is not what its config builds, or the config is not plain JSON data"
    if architecture["host"]["config"] is None:
        return "", f"Esper does not copy the source of {name}"
    try:
        return model_source(plain, grafts_of(plain), architecture["tied"]), ""
    except NotPortableError as error:
        return "", str(error)


def _json(data: Any) -> bytes:
    return json.dumps(data, indent=1).encode()


def _write(directory: Path, files: dict[str, bytes]) -> None:
    """Each file through a temporary one. A model file that is empty now was another model's: it goes."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / ARCHITECTURE).unlink(missing_ok=True)  # until the new one says that all is there
        for name, content in files.items():
            if not content:
                (directory / name).unlink(missing_ok=True)
                continue
            write_whole(directory / name, content)
    except OSError as error:
        raise ExportError(f"cannot write the model to {directory}: {error.strerror}") from error

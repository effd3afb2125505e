"""A grown model, out of Esper: as a plain `nn.Module`, and as files that load without Esper installed.

`save` writes `model.pt2` (a program, see `program.py`), `model.safetensors` with `architecture.json` (weights, and the
plain data that rebuilds the network), and for Esper's own hosts `model.py` (see `standalone.py`). `saved.py` reads it.
"""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save as serialize
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from esper.files import write_whole
from esper.growth.blueprints import get_blueprint
from esper.growth.graft import Grafted, graft
from esper.growth.model import GrowingModel
from esper.growth.probe import arguments, untouched, with_batch
from esper.growth.program import trace
from esper.growth.replay import Recorder
from esper.growth.saved import FORMAT, FORMAT_VERSION, LoadError, assemble, load
from esper.growth.slot import Slot
from esper.growth.standalone import Graft, NotPortableError, find_host, model_source
from esper.lifecycle import IN_FORWARD, Stage

__all__ = ["ExportError", "LoadError", "Saved", "flops_per_example", "grafts_of", "load", "plain_model", "save"]

TOLERANCE = 1e-5
"""Largest difference of outputs, relative to values above 1, that a saved model may have."""


class ExportError(ValueError):
    """A model that cannot be exported, with the reason."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What `save` wrote, and what a reader of it should know."""

    directory: Path
    files: tuple[str, ...]
    warnings: tuple[str, ...]
    """One line for each thing that is not as one would wish: a file that is missing, a batch size that is fixed."""


# -- out of the growing model -------------------------------------------------------------------------------------


def plain_model(growing: GrowingModel, *, unfinished: Literal["keep", "drop"] = "keep") -> nn.Module:
    """A copy of the host in which each seed that acts on its output is a permanent part, without hooks of Esper's.

    Seeds that still blend or are on hold stay as they act now (a constant alpha), so that the outputs are the growing
    model's; `unfinished="drop"` keeps fossilized seeds alone. Incubating seeds do not act and are never copied.
    The user's own hooks are copied as `copy.deepcopy` copies them. The growing model is not touched.
    """
    if unfinished not in ("keep", "drop"):
        raise ExportError(f"unfinished must be 'keep' or 'drop', not {unfinished!r}")
    host = _copy_host(growing)
    kept = [slot for slot in growing.joined if slot.life.stage in IN_FORWARD]
    if unfinished == "drop":
        kept = [slot for slot in kept if slot.life.stage is Stage.FOSSILIZED]
    places = []
    for slot in kept:
        assert slot.seed is not None
        alpha = 1.0 if slot.life.alpha == 1.0 else float(slot.alpha)  # the tensor: its rounding is what acts
        places.append((slot.path, _plain(copy.deepcopy(slot.seed.body)), alpha, asdict(_record(slot, alpha))))
    graft(host, places)
    return host


def _copy_host(growing: GrowingModel) -> nn.Module:
    """A deep copy without the hooks of slots and recorder; they are found by whom they belong to."""
    ours = (*growing.slots, growing._recorder)
    # Owners that count as copied already are shared: a slot's seed and its buffers must not be copied for a hook.
    host = _plain(copy.deepcopy(growing.host, {id(owner): owner for owner in ours}))
    for module in host.modules():
        for key, hook in list(module._forward_hooks.items()):
            if isinstance(getattr(hook, "__self__", None), Slot | Recorder):
                del module._forward_hooks[key]
                module._forward_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)
    return host


def _plain(copied: nn.Module) -> nn.Module:
    """What the engine has made faster is again what it stands for: classes of layers, and compiled functions."""
    for module in copied.modules():
        if (plain := getattr(type(module), "esper_plain_class", None)) is not None:
            module.__class__ = plain
        for name, value in list(vars(module).items()):
            if getattr(type(value), "esper_stands_in", False):
                del module.__dict__[name]
                if value.stands_for is not None:
                    module.__dict__[name] = value.stands_for
    return copied


def _record(slot: Slot, alpha: float) -> Graft:
    seed = slot.seed
    assert seed is not None
    entry = get_blueprint(seed.blueprint, seed.shape.layout)
    return Graft(
        path=slot.path,
        blueprint=seed.blueprint,
        layout=seed.shape.layout,
        class_name=entry.module.__name__,
        arguments=entry.arguments(seed.shape),
        blend=seed.blend,
        alpha=alpha,
        stage=slot.life.stage.name,
        parameters=_count(seed.body),
        visibility=seed.shape.visibility,
        channels_last=seed.shape.channels_last,
    )


def grafts_of(model: nn.Module) -> list[tuple[Graft, nn.Module]]:
    """What grew in a plain model, with its module, in the order of the model's modules."""
    return [(Graft(**m.grown), m.seed) for m in model.modules() if isinstance(m, Grafted) and m.grown]


def flops_per_example(model: nn.Module, example: Any) -> int:
    """Floating-point operations of one example's forward pass: matrix products, convolutions and attention."""
    args, kwargs = arguments(with_batch(example, 2))
    # Fused attention is no operator that the counter knows (it would count as nothing); its parts are.
    counter = FlopCounterMode(display=False)
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with untouched(model), torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
            model(*args, **kwargs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    return int(counter.get_total_flops()) // 2


# -- to files -----------------------------------------------------------------------------------------------------


def save(
    model: nn.Module,
    directory: str | Path,
    example: Any,
    *,
    unfinished: Literal["keep", "drop"] = "keep",
    history: Any = None,
) -> Saved:
    """Write a growing model, or a plain one made from it, to `directory`; `example` is a batch for its forward.

    `history` is plain data for `history.json`; `unfinished` is as in `plain_model`. All files are made before the first
    is written, and each appears complete or not at all, `architecture.json` last.
    """
    plain = plain_model(model, unfinished=unfinished) if isinstance(model, GrowingModel) else copy.deepcopy(model)
    plain.eval()
    warnings = _check_example(plain, example)
    if isinstance(model, GrowingModel) and unfinished == "keep":
        warnings += _difference(model, plain, example, "the plain model")
    plain.cpu()  # a model that was trained on a GPU must load where there is none
    example = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), example)

    program = trace(plain, example)
    if program.exported is not None:
        fitting = with_batch(example, 3) if program.batch == "any" else example
        warnings += _difference(plain, program.exported.module(), fitting, "model.pt2")
    tensors, tied = _tensors(plain)
    architecture = _architecture(plain, example, tied)
    source, no_source = _source(plain, architecture)
    warnings += [problem for problem in (program.problem, no_source) if problem]
    architecture["model.pt2"] = {"batch": program.batch, "why": program.problem}
    architecture["model.py"] = {"written": bool(source), "why": no_source}
    architecture["warnings"] = warnings

    files = {
        "model.safetensors": serialize(tensors),
        "model.pt2": program.content(),
        "model.py": source.encode(),
        **({} if history is None else {"history.json": _json(history)}),
        "architecture.json": _json(architecture),
    }
    _write(Path(directory), files)
    return Saved(Path(directory), tuple(name for name, content in files.items() if content), tuple(warnings))


def _check_example(plain: nn.Module, example: Any) -> list[str]:
    try:
        args, kwargs = arguments(example)
        with torch.no_grad():
            kind = type(plain(*args, **kwargs))
    except Exception as error:
        detail = str(error).strip().partition("\n")[0]
        raise ExportError(f"{type(plain).__name__} does not accept the example batch: {detail}") from error
    package = kind.__module__.partition(".")[0]
    if package in ("builtins", "torch", "collections"):
        return []
    return [f"the model returns a {kind.__name__}: whoever loads model.pt2 must import {package} first"]


def _difference(reference: nn.Module, other: nn.Module, example: Any, what: str) -> list[str]:
    """Empty when both give the same outputs; else the warning."""
    args, kwargs = arguments(example)
    with untouched(reference), torch.no_grad():
        pairs = zip(tree_leaves(reference(*args, **kwargs)), tree_leaves(other(*args, **kwargs)), strict=True)
        gaps = [_gap(a, b) for a, b in pairs if isinstance(a, Tensor)]
    if not gaps or max(gaps) <= TOLERANCE:
        return []
    return [f"the outputs of {what} differ by {max(gaps):.2g} on the example batch: do not rely on it"]


def _gap(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if torch.equal(a, b):
        return 0.0
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(same, 0.0, (a - b).abs() / a.abs().clamp(min=1.0)).max()
    return float(gap.nan_to_num(float("inf")))


def _tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The model's state, each tensor once; and which further names share one."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    owners: dict[Any, str] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            continue  # state that a module keeps by code of its own: the architecture's class knows how
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
        "parameters": {"total": _count(plain), "host": _count(plain) - grown, "grown": grown},
        "flops_per_example": flops_per_example(plain, example),
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
        again = assemble(as_saved, Path("architecture.json"))
    except (TypeError, ValueError):
        return None
    shapes = [{name: value.shape for name, value in m.state_dict().items()} for m in (plain, again)]
    return config if shapes[0] == shapes[1] else None  # unequal when the host was changed after it was built


def _source(plain: nn.Module, architecture: dict[str, Any]) -> tuple[str, str]:
    """The text of model.py, or "" and why there is none."""
    name = type(plain).__name__
    if architecture["host"]["config"] is None and find_host(name) is type(plain):
        return "", f"no model.py: this {name} is not what its config builds, or the config is not plain JSON data"
    if architecture["host"]["config"] is None:
        return "", f"no model.py: the source of {name} is yours, and Esper does not copy it; use model.pt2, or host="
    try:
        return model_source(plain, grafts_of(plain), architecture["tied"]), ""
    except NotPortableError as error:
        return "", f"no model.py: {error}"


def _json(data: Any) -> bytes:
    return json.dumps(data, indent=1).encode()


def _write(directory: Path, files: dict[str, bytes]) -> None:
    """Each file through a temporary one. A model file that is empty now was another model's: it goes."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "architecture.json").unlink(missing_ok=True)  # until the new one says that all is there
        for name, content in files.items():
            if not content:
                (directory / name).unlink(missing_ok=True)
                continue
            write_whole(directory / name, content)
    except OSError as error:
        raise ExportError(f"cannot write the model to {directory}: {error.strerror}") from error


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())

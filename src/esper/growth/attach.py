"""Turn any `nn.Module` into a `GrowingModel`: find its slots by module path, and what passes through them by a probe.

A slot is the output of one submodule. It must be called exactly once per forward pass and give a floating-point tensor,
or a tuple that starts with one, whose first axis is the batch. Whatever cannot work is refused here, with the reason.
`inspect` shows what was found, and what has grown since.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from esper.growth.blueprints import SlotShape, blueprint_names
from esper.growth.graft import SEEDS, first_tensor
from esper.growth.layout import find_layout
from esper.growth.model import GrowingModel, Survey, planted_modules
from esper.growth.probe import AttachError, Probe, probe
from esper.growth.replay import find_taps
from esper.growth.visibility import find_visibility
from esper.lifecycle import Rules

__all__ = ["AttachError", "attach", "check_model", "inspect", "survey"]


def attach(
    model: nn.Module,
    slots: Sequence[str],
    example: Any,
    *,
    layouts: Mapping[str, str] | None = None,
    visibility: str | Mapping[str, str] | None = None,
    rules: Rules | None = None,
    blueprints: Sequence[str] | None = None,
    budget: int | None = None,
    max_seeds: int | None = None,
    rng_seed: int = 0,
) -> GrowingModel:
    """Give `model` slots at the outputs of the named modules (paths such as "layer2", or patterns such as "h.*").

    `example` is a batch for the model's forward: a tensor, a tuple of arguments, or a dict of keyword arguments.
    `layouts` says what a slot's axes mean, by path or pattern: dense, conv1d, sequence, conv2d or channels_last.
    `visibility` says what a seed may read: "both" sides, "causal" (nothing later) or "position" (itself alone), for all
    slots or by path or pattern. What is not said is found by looking at the model.
    """
    for name in blueprints or ():
        if name not in blueprint_names():
            raise AttachError(f"unknown blueprint {name!r}: choose some of {', '.join(blueprint_names())}")
    return GrowingModel(
        model,
        survey(model, slots, example, layouts, visibility),
        rules=rules,
        blueprints=blueprints,
        budget=budget,
        max_seeds=max_seeds,
        rng_seed=rng_seed,
    )


def survey(
    model: nn.Module,
    slots: Sequence[str],
    example: Any,
    layouts: Mapping[str, str] | None = None,
    visibility: str | Mapping[str, str] | None = None,
) -> Survey:
    """Look at the model where the slots shall be. What is found holds for every model of the same architecture."""
    check_model(model)
    if isinstance(slots, str):
        raise AttachError(f"slots must be a list of module paths, such as [{slots!r}]")
    paths = _matching_paths(model, slots)
    _check_patterns("layouts", layouts or {}, paths)
    _check_patterns("visibility", visibility if isinstance(visibility, Mapping) else {}, paths)
    seen = probe(model, example)
    shapes = {path: _slot_shape(model, path, seen, layouts or {}) for path in paths}
    may_read = find_visibility(model, example, shapes, seen, visibility)
    finished = {module: i for i, module in enumerate(seen.passes[1])}
    ordered = sorted(paths, key=lambda path: finished[model.get_submodule(path)])
    names = {module: name for name, module in model.named_modules()}
    taps = find_taps(model, {model.get_submodule(path) for path in paths}, seen.counts)
    found = tuple((path, replace(shapes[path], visibility=may_read[path])) for path in ordered)
    return Survey(found, tuple(names[tap] for tap in taps))


def check_model(model: nn.Module) -> None:
    """Refuse what is known not to work before anything is tried."""
    kind = type(model).__name__
    if not any(True for _ in model.parameters()):
        raise AttachError("the model has no parameters: there is nothing to train")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise AttachError(f"{name!r} has no size yet: run the model once on some data before it grows")
    for path, module in model.named_modules():
        where = f"module {path!r} of {kind}" if path else f"the model ({kind})"
        if isinstance(module, torch.jit.ScriptModule):
            raise AttachError(f"{where} is scripted or traced: pass the Python module that it was made from")
        if getattr(module, "_orig_mod", None) is not None:
            raise AttachError(f"{where} is compiled: pass it uncompiled (its _orig_mod), and compile the grown model")
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise AttachError(f"{where} is a parallel wrapper: pass its .module")
    if occupied := planted_modules(model):
        raise AttachError(
            f"seeds of an earlier growth still sit in {kind} ({occupied[0] or 'its output'}): call detach() on the "
            "GrowingModel that holds it, or pass a plain copy (esper.growth.export.plain_model)"
        )


def _matching_paths(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    names = list(dict.fromkeys(name for name in _names(model) if name))
    if not patterns:
        raise AttachError(f"no slots were named; this model has modules such as {_some(names)}")
    paths: dict[str, None] = {}
    for pattern in patterns:
        # `*` stands for one path component: "h.*" is every block, not every layer inside of the blocks.
        depth = pattern.count(".")
        matched = [n for n in names if n.count(".") == depth and fnmatch.fnmatchcase(n, pattern)]
        if not matched:
            hint = _hint(pattern, names, "it has modules such as")
            raise AttachError(f"slot {pattern!r} matches no module of {type(model).__name__}; {hint}")
        paths.update(dict.fromkeys(matched))
    # A module with two names is one slot.
    return list({model.get_submodule(path): path for path in reversed(paths)}.values())[::-1]


def _names(module: nn.Module, path: str = "") -> Iterator[str]:
    """Paths of all modules of the host, second names too. What grew in it earlier is no place for a slot."""
    yield path
    for name, child in module._modules.items():
        if child is not None and name != SEEDS:
            yield from _names(child, f"{path}.{name}" if path else name)


def _check_patterns(option: str, named: Mapping[str, str], paths: Sequence[str]) -> None:
    """What names no slot would be ignored, and a misspelt name is no wish to be ignored."""
    for pattern in named:
        if not any(fnmatch.fnmatchcase(path, pattern) for path in paths):
            raise AttachError(f"{option} names {pattern!r}, which is no slot; {_hint(pattern, paths, 'the slots are')}")


def _hint(wrong: str, names: Sequence[str], otherwise: str) -> str:
    near = difflib.get_close_matches(wrong, names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"{otherwise} {_some(names)}"


def _some(names: Sequence[str]) -> str:
    shown = sorted(names, key=lambda name: (name.count("."), names.index(name)))[:8]
    return ", ".join(shown) + (", …" if len(names) > len(shown) else "")


def _slot_shape(model: nn.Module, path: str, seen: Probe, layouts: Mapping[str, str]) -> SlotShape:
    module = model.get_submodule(path)
    calls = seen.counts[module]
    if calls == 0:
        raise AttachError(f"slot {path!r} is never called in a forward pass: choose a module inside or around it")
    if calls > 1:
        raise AttachError(f"slot {path!r} is called {calls} times in a forward pass; a slot needs exactly one call")
    two, three = (_slot_tensor(path, calls_made[module].output) for calls_made in seen.passes)
    if (two.shape[:1], three.shape[:1]) != ((2,), (3,)):
        raise AttachError(
            f"slot {path!r} gives shape {list(three.shape)} for a batch of 3: its first axis must be the batch "
            "(for torch.nn.Transformer layers, build them with batch_first=True)"
        )
    layout, channels_last = find_layout(path, module, three, seen.passes[1], layouts)
    if channels_last:
        return SlotShape(layout, three.shape[-1], tuple(three.shape[1:-1]), channels_last=layout == "conv2d")
    return SlotShape(layout, three.shape[1], tuple(three.shape[2:]))


def _slot_tensor(path: str, output: Any) -> Tensor:
    first = first_tensor(output)
    if not isinstance(first, Tensor):
        raise AttachError(
            f"slot {path!r} gives a {type(output).__name__}: a slot needs a tensor, or a tuple that starts with one"
        )
    if first.is_nested:
        raise AttachError(
            f"slot {path!r} gives a nested tensor (for torch.nn.TransformerEncoder, pass enable_nested_tensor=False)"
        )
    if not first.is_floating_point():
        raise AttachError(f"slot {path!r} gives {first.dtype} values: a seed needs floating-point activations")
    return first


# -- a look at a growing model ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SlotRow:
    """One slot, for people."""

    path: str
    shape: str
    sees: str
    """What a seed here may read: both sides, nothing later (causal), or its own position alone."""
    stage: str
    seed: str
    alpha: float
    parameters: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """A growing model at a glance; `print` it."""

    host: str
    host_parameters: int
    parameters: int
    rows: tuple[SlotRow, ...]

    def __str__(self) -> str:
        header = ("slot", "shape", "sees", "stage", "seed", "alpha", "parameters")
        cells = [(*astuple(row)[:-2], f"{row.alpha:.2f}", f"{row.parameters:,}") for row in self.rows]
        widths = [max(len(row[i]) for row in (header, *cells)) for i in range(len(header))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *cells)
        ]
        title = f"{self.host}: {self.parameters:,} parameters, {self.host_parameters:,} of them the host's"
        return "\n".join([title, *(line.rstrip() for line in lines)])


def inspect(model: GrowingModel) -> Inspection:
    """Slots, stages and parameters of a growing model, as a table that prints."""
    if not isinstance(model, GrowingModel):
        raise TypeError(f"inspect shows a GrowingModel; make one of your {type(model).__name__} with esper.attach")
    return Inspection(
        host=type(model.host).__name__,
        host_parameters=model.host_parameters,
        parameters=model.parameter_count,
        rows=tuple(
            SlotRow(
                path=slot.path,
                shape=str(slot.shape),
                sees="–" if slot.shape.layout == "dense" else slot.shape.visibility,
                stage=slot.life.stage.name,
                seed="–" if slot.seed is None else f"{slot.seed.blueprint} ({slot.seed.blend})",
                alpha=slot.life.alpha,
                parameters=sum(parameter.numel() for parameter in model.seed_parameters(slot)),
            )
            for slot in model.slots
        ),
    )

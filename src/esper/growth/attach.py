"""Turn any `nn.Module` into a `GrowingModel`: find its slots by module path, and what passes through them by a probe.

A slot is the output of one submodule. It must be called exactly once per forward pass and give a floating-point tensor,
or a tuple that starts with one, whose first axis is the batch. Whatever cannot work is refused here, with the reason.
`inspect` shows what was found, and what has grown since.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from esper.growth.auto_slots import AUTO, auto_slots
from esper.growth.blueprints import blueprint_names
from esper.growth.candidates import HasPath, module_names, slot_shape
from esper.growth.costs import seed_flops
from esper.growth.model import GrowingModel, Survey, planted_modules
from esper.growth.probe import AttachError, probe
from esper.growth.replay import find_taps
from esper.growth.style import find_styles
from esper.growth.trial import check_state_stays, replays_agree, slots_without_gradient, trial_copy, uses_other_rngs
from esper.growth.visibility import check_words, find_visibility
from esper.lifecycle import Rules
from esper.tables import quantity

__all__ = ["AttachError", "SlotChoice", "attach", "check_model", "inspect", "survey"]

SlotChoice = str | HasPath | Sequence[str | HasPath]
"""Module paths, patterns, or slots that `esper.slots` lists; or "auto"."""


def attach(
    model: nn.Module,
    slots: SlotChoice,
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

    "auto" chooses them by a rule (`esper.growth.auto_slots`), and `esper.slots` lists what there is to choose from.

    `example` is a batch for the model's forward: a tensor, a tuple of arguments, or a dict of keyword arguments.
    `layouts` says what a slot's axes mean, by path or pattern: dense, conv1d, sequence, conv2d or channels_last.
    `visibility` says what a seed may read: "both" sides, "causal" (nothing later) or "position" (itself alone), for all
    slots or by path or pattern. What is not said is found by looking at the model, and so is the style of its seeds.
    """
    if isinstance(blueprints, str):
        raise AttachError(f"blueprints must be a list of names, such as [{blueprints!r}]")
    for name in blueprints or ():
        if name not in blueprint_names():
            raise AttachError(f"unknown blueprint {name!r}: choose some of {', '.join(blueprint_names())}")
    found = survey(model, slots, example, layouts, visibility)
    styles = find_styles(model, example, dict(found.slots))
    found = replace(found, slots=tuple((path, replace(shape, style=styles[path])) for path, shape in found.slots))
    tried = trial_copy(model)
    check_state_stays(tried, example)
    found = replace(found, uses_other_rngs=uses_other_rngs(tried, example))
    if cut_off := slots_without_gradient(GrowingModel(tried, found), example):
        found = replace(found, slots=tuple((path, shape) for path, shape in found.slots if path not in cut_off))
        if not (isinstance(slots, str) and found.slots):  # by name, or all that the rule found
            raise AttachError(
                f"no gradient reaches slot {cut_off[0]!r} from the outputs, so nothing that grows there could learn: "
                "it must not run under torch.no_grad() or be detached, and torch.utils.checkpoint needs "
                "use_reentrant=False"
            )
    if not replays_agree(GrowingModel(tried, found), example):
        found = replace(found, taps=())  # each pass is a whole one
    return GrowingModel(
        model, found, rules=rules, blueprints=blueprints, budget=budget, max_seeds=max_seeds, rng_seed=rng_seed
    )


def survey(
    model: nn.Module,
    slots: SlotChoice,
    example: Any,
    layouts: Mapping[str, str] | None = None,
    visibility: str | Mapping[str, str] | None = None,
) -> Survey:
    """Look at the model where the slots shall be. What is found holds for every model of the same architecture."""
    check_model(model)
    check_words(visibility)
    auto = isinstance(slots, str) and slots == AUTO
    paths = [] if auto else _matching_paths(model, _named(slots))
    seen = probe(model, example)
    if auto:
        shapes, may_read = auto_slots(model, example, seen, layouts or {}, visibility)
        paths = list(shapes)
    _check_patterns("layouts", layouts or {}, paths)
    _check_patterns("visibility", visibility if isinstance(visibility, Mapping) else {}, paths)
    if not auto:
        shapes = {path: slot_shape(model, path, seen, layouts or {}) for path in paths}
        may_read = find_visibility(model, example, shapes, seen, visibility)
    finished = {module: i for i, module in enumerate(seen.passes[1])}
    ordered = sorted(paths, key=lambda path: finished[model.get_submodule(path)])
    names = {module: name for name, module in model.named_modules()}
    taps = find_taps(model, {model.get_submodule(path) for path in paths}, seen.counts)
    # A pass that takes gradients of its own (forces, say) needs such a module itself, and not what it once gave.
    taps = [tap for tap in taps if not _has_gradients(seen.passes[1][tap].output)]
    found = tuple((path, replace(shapes[path], visibility=may_read[path])) for path in ordered)
    return Survey(found, tuple(names[tap] for tap in taps))


def _has_gradients(output: Any) -> bool:
    """Of a pass that is made without them."""
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(output))


def _named(slots: SlotChoice) -> list[str]:
    if isinstance(slots, str):
        raise AttachError(f"slots must be a list of module paths, such as [{slots!r}], or {AUTO!r}")
    several = list(slots) if isinstance(slots, Iterable) else [slots]  # one of those that `esper.slots` lists
    for slot in several:
        if not isinstance(slot, str) and not isinstance(getattr(slot, "path", None), str):
            kind = f"a {type(slot).__name__}" if isinstance(slot, nn.Module) else repr(slot)
            raise AttachError(f"slots must be module paths, such as ['1'], or slots that esper.slots lists, not {kind}")
    return [slot if isinstance(slot, str) else slot.path for slot in several]


def check_model(model: nn.Module) -> None:
    """Refuse what is known not to work before anything is tried."""
    kind = type(model).__name__
    if not any(True for _ in model.parameters()):
        raise AttachError("the model has no parameters: there is nothing to train")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise AttachError(f"{name!r} has no size yet: run the model once on some data before it grows")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout is not torch.strided:
            raise AttachError(
                f"{name!r} is a sparse tensor, which cannot be kept and compared like others: make it dense, or hold "
                "it in an attribute that is neither a parameter nor a buffer"
            )
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
    names = list(dict.fromkeys(name for name in module_names(model) if name))
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
    flops: int
    """Of one example's forward pass."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """A growing model at a glance; `print` it."""

    host: str
    host_parameters: int
    parameters: int
    rows: tuple[SlotRow, ...]

    def __str__(self) -> str:
        header = ("slot", "shape", "visibility", "stage", "seed", "alpha", "parameters", "FLOPs")
        cells = [
            (*astuple(row)[:-3], f"{row.alpha:.2f}", f"{row.parameters:,}", quantity(row.flops)) for row in self.rows
        ]
        widths = [max(len(row[i]) for row in (header, *cells)) for i in range(len(header))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *cells)
        ]
        title = f"{self.host}: {self.parameters:,} parameters, {self.host_parameters:,} of them the host's"
        return "\n".join([title, *(line.rstrip() for line in lines)])


def inspect(model: GrowingModel) -> Inspection:
    """Slots, stages, parameters and FLOPs of a growing model, as a table that prints."""
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
                parameters=slot.trained_size,
                flops=0 if slot.seed is None else seed_flops(slot.seed.blueprint, slot.seed.shape, slot.seed.blend),
            )
            for slot in model.slots
        ),
    )

"""What each position of a slot may read, so that a seed lets through only what its host does.

In a causal network a seed that looked at later positions would show it what it is to predict. Whether the network is
causal is found by trying (`flow.py`), for each axis of each input, from the outputs at the end:

    information flows forwards only                                          causal
    backwards only                                                           position: no seed looks that way
    both ways                                                                both
    not at all, position by position                                         causal, to be safe
    the outputs have no positions (a class, say)                             causal if forwards only inside, else both

A slot is concerned by the axes that reach it. Whether a causal seed there keeps the outputs causal is tried as well.
Where it does not, where the module does not get the masks or the cache that a seed must respect, and in feature maps of
causal networks, a seed reads single positions.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from esper.errors import first_line
from esper.growth.blueprints import VISIBILITIES, SlotShape, Visibility
from esper.growth.flow import END, Flow, Mixer, Passes
from esper.growth.graft import CACHES, MASKS, argument_names
from esper.growth.padding import hides, padding_inputs, pads_itself
from esper.growth.probe import AttachError, Probe, arguments, input_tensors, untouched, with_batch


def find_visibility(
    model: nn.Module,
    example: Any,
    shapes: Mapping[str, SlotShape],
    seen: Probe,
    given: str | Mapping[str, str] | None,
) -> dict[str, Visibility]:
    """By slot. `given` is what the user passed, for all slots or by path or pattern."""
    found: dict[str, Visibility] = {}
    for path, shape in shapes.items():
        word = _given(path, given)
        if word is not None:
            found[path] = _for_layout(word, shape)
    unknown = {path: shape for path, shape in shapes.items() if path not in found}
    for path, shape in unknown.items():
        if shape.layout == "dense" and (masked_layer := _masked_layer(model)):
            raise AttachError(
                f"slot {path!r} is a vector in a model with masked layers ({masked_layer}): what grows there would "
                "join what the masks keep apart, as in an autoregressive model; choose another slot, or pass "
                f"visibility={{{path!r}: 'both'}} if it may"
            )
    if unknown:
        series = [shape for shape in unknown.values() if shape.layout in ("sequence", "conv1d")]
        padding = padding_inputs(model, example) if series else {}
        masked = bool(padding) or _is_masked(model, seen, {shape.sizes[0] for shape in series})
        found |= _tried(model, _hiding_nothing(example, padding), unknown)
        if not masked and "both" in found.values() and pads_itself(model, example):  # a causal seed reads no end
            found |= {path: "position" for path, shape in unknown.items() if shape in series and found[path] == "both"}
        trusted = not masked or hides(model, example, "attention_mask")
        for path, shape in unknown.items():
            if shape in series and not _shows_all(model, path, shape, found[path], seen, masked, trusted):
                found[path] = "position"
    return found


def _masked_layer(model: nn.Module) -> str:
    """The first module with a constant of zeros and ones as large as its matrix of weights; not one that was pruned."""
    for path, module in model.named_modules():
        shapes = {p.shape for p in module.parameters(recurse=False) if p.requires_grad and p.dim() == 2}
        frozen = [(name, p) for name, p in module.named_parameters(recurse=False) if not p.requires_grad]
        for name, value in (*module.named_buffers(recurse=False), *frozen):
            pruned = f"{name.removesuffix('_mask')}_orig" in module._parameters
            if value.shape in shapes and not pruned and _is_mask(value):
                return path or type(module).__name__
    return ""


def _is_mask(value: Tensor) -> bool:
    """Both zeros and ones. Zeros alone are statistics that have not begun; to the identity, weights are added."""
    ones = value == 1
    if not bool((ones | (value == 0)).all()) or not bool(ones.any()) or bool(ones.all()):
        return False
    return not torch.equal(ones, torch.eye(*value.shape, dtype=torch.bool, device=value.device))


def _hiding_nothing(example: Any, padding: Mapping[Any, Tensor | None]) -> Any:
    """Padding in the example looks like a future that nothing reads."""
    args, kwargs = arguments(with_batch(example, 2))
    shown = {key: value for key, value in padding.items() if value is not None}
    return {**kwargs, **shown} if kwargs else tuple(shown.get(place, value) for place, value in enumerate(args))


def visible_slots(
    model: nn.Module,
    example: Any,
    shapes: Mapping[str, SlotShape],
    seen: Probe,
    given: str | Mapping[str, str] | None,
) -> tuple[dict[str, Visibility], dict[str, str]]:
    """The same for slots that were not asked for by name: those that cannot be are left out, with the reason."""
    try:
        return find_visibility(model, example, shapes, seen, given), {}
    except AttachError as error:
        if len(shapes) == 1:
            return {}, dict.fromkeys(shapes, str(error))
    found: dict[str, Visibility] = {}
    refused: dict[str, str] = {}
    for path, shape in shapes.items():
        one = visible_slots(model, example, {path: shape}, seen, given)
        found |= one[0]
        refused |= one[1]
    return found, refused


def _for_layout(word: Visibility, shape: SlotShape) -> Visibility:
    """A vector has no positions; a map has no causal seeds but those that read one position."""
    if shape.layout == "dense":
        return "both"
    return "position" if word == "causal" and shape.layout == "conv2d" else word


def check_words(given: str | Mapping[str, str] | None) -> None:
    """Refuse what means nothing, before any slot is looked at."""
    for word in [given] if isinstance(given, str) else (given or {}).values():
        if word not in VISIBILITIES:
            raise AttachError(f"unknown visibility {word!r}: choose one of {', '.join(VISIBILITIES)}")


def _given(path: str, given: str | Mapping[str, str] | None) -> Visibility | None:
    named = {"*": given} if isinstance(given, str) else given or {}
    for pattern, word in named.items():
        if fnmatch.fnmatchcase(path, pattern):
            return word  # type: ignore[return-value]  # it was checked
    return None


# -- masks and caches ---------------------------------------------------------------------------------------------


def _shows_all(
    model: nn.Module,
    path: str,
    shape: SlotShape,
    visibility: Visibility,
    seen: Probe,
    masked: bool,
    trusted: bool,
) -> bool:
    """Whether the slot's module is given what a seed must respect: the host's padding masks and key-value cache.

    A seed reads these off the inputs of its module, for an exported model has nothing else. Where the host has one and
    the module does not get it, only seeds that look at no other position are right.
    """
    module = model.get_submodule(path)
    given = {*argument_names(module), *seen.passes[1][module].kwargs}
    # What looks both ways cannot be generated step by step, so no cache stands for its past.
    caches = any(getattr(getattr(m, "config", None), "use_cache", None) is not None for m in model.modules())
    if caches and visibility == "causal" and given.isdisjoint(CACHES):
        return False
    inputs = seen.passes[1][module].inputs(module)
    own = any(name in MASKS and isinstance(value, Tensor) for name, value in inputs.items())
    if any(_differs_by_example(name, value, shape.sizes[0]) for name, value in inputs.items()):
        return False
    if not own and not masked:
        return True
    return trusted and shape.layout == "sequence" and _reads_its_mask(module, shape, seen)


def _is_masked(model: nn.Module, seen: Probe, lengths: Collection[int]) -> bool:
    """Whether any module gets information about padding: a mask by its name, a packed sequence, or truth values, one
    for each position of a slot. (Those that the model itself gets are tried: `padding.py`.)"""
    for module, call in seen.passes[1].items():
        for name, value in call.inputs(module).items():
            if isinstance(value, PackedSequence):
                return True
            if isinstance(value, Tensor) and "mask" in name and not _is_square(value):
                return True
            if isinstance(value, Tensor) and module is not model and _is_truth_by_position(value, lengths):
                return True
    return False


def _is_square(value: Tensor) -> bool:
    return value.dim() == 2 and value.shape[0] == value.shape[1] != 3  # 3 examples


def _differs_by_example(name: str, value: Any, length: int) -> bool:
    """A mask of pairs of positions with more than one pattern, as for documents in one row: no seed reads such."""
    if "mask" not in name or name in MASKS or not isinstance(value, Tensor) or value.dim() < 3:
        return False
    return value.shape[-2:] == (length, length) and value.numel() > length * length


def _is_truth_by_position(value: Tensor, lengths: Collection[int]) -> bool:
    """[batch, positions] of the pass with 3 examples, or the same to be broadcast over heads and queries."""
    if value.dtype != torch.bool or value.dim() < 2 or value.shape[0] != 3:
        return False
    return value.shape[-1] in lengths and value.numel() == 3 * value.shape[-1]


def _reads_its_mask(module: nn.Module, shape: SlotShape, seen: Probe) -> bool:
    """Whether the module gets one mask, with a row for each example and a column for each position of the slot."""
    names = {*argument_names(module), *seen.passes[1][module].kwargs} & set(MASKS)
    masks = [
        (value, batch)
        for calls, batch in zip(seen.passes, (2, 3), strict=True)
        for name, value in calls[module].inputs(module).items()
        if name in MASKS and isinstance(value, Tensor)
    ]
    one_each = len({id(value) for value, _ in masks}) <= len(seen.passes)
    fits = all(v.shape[0] in (1, batch) and v.dim() > 1 and v.shape[-1] == shape.sizes[0] for v, batch in masks)
    square = any(v.dim() == 2 and v.shape[0] != batch for v, batch in masks)
    return bool(names) and one_each and fits and not square


# -- trying it out ------------------------------------------------------------------------------------------------


def _tried(model: nn.Module, example: Any, shapes: Mapping[str, SlotShape]) -> dict[str, Visibility]:
    found: dict[str, Visibility] = dict.fromkeys(shapes, "both")
    problem, tried = "no input has several positions", 0
    with untouched(model):
        passes = Passes(model, with_batch(example, 2))
        for number, flow in enumerate(passes.flows()):
            if isinstance(flow, Exception):
                problem = first_line(flow)
                continue
            tried += 1
            if _is_causal(flow):
                concerned = {path: shape for path, shape in shapes.items() if flow.reaches(path)}
                for path, seen in _causal(passes, number, flow, concerned).items():
                    found[path] = min(found[path], seen, key=list(VISIBILITIES).index)
            elif any(across.other_way for across in flow.across(END)):
                with_axis = [path for path, shape in shapes.items() if shape.layout != "dense" and flow.reaches(path)]
                found |= dict.fromkeys(with_axis, "position")
    with_positions = [path for path, shape in shapes.items() if shape.layout != "dense"]
    single = any(1 in value.shape[1:] for value in input_tensors(example))
    short = [path for path in with_positions if single and shapes[path].sizes == (1,)]
    if (with_positions and not tried) or short:
        raise AttachError(
            f"it cannot be seen which positions of {', '.join(short or with_positions)} read which ({problem}): give "
            "an example with several positions, or pass visibility='causal' if no position may read a later one, else "
            "visibility='both'"
        )
    return found


def _is_causal(flow: Flow) -> bool:
    """Whether the network lets this axis flow forwards only; see the table above."""
    at_end = flow.across(END)
    if any(across.one_way for across in at_end):
        return True
    with_positions = [across for across in at_end if across.one_for_one]
    if with_positions:
        return all(across.nothing for across in with_positions)
    return any(across.one_way for name in flow.inside for across in flow.across(name))


def _causal(passes: Passes, number: int, flow: Flow, shapes: Mapping[str, SlotShape]) -> dict[str, Visibility]:
    """What a seed may read at these slots of a causal network: earlier positions, if the outputs stay causal then."""
    at_end = [across for across in flow.across(END) if across.one_way]
    autoregressive = bool(at_end)
    found: dict[str, Visibility] = {
        path: "position"  # a map has no causal form but seeds that read one position
        for path, shape in shapes.items()
        if shape.layout == "conv2d" and any(across.one_for_one for across in at_end)
    }
    mixers = {
        path: _mixer(shape)
        for path, shape in shapes.items()
        if shape.layout in ("sequence", "conv1d") or (shape.layout == "dense" and autoregressive)
    }
    if all(shape.layout != "dense" for shape in shapes.values()) and _stay_causal(passes, number, mixers):
        return found | dict.fromkeys(mixers, "causal")  # all at once, which is most often so
    for path, mixer in mixers.items():
        stays = _stay_causal(passes, number, {path: mixer})
        if shapes[path].layout != "dense":
            found[path] = "causal" if stays else "position"
        elif not stays:
            raise AttachError(
                f"slot {path!r} is a vector whose entries stand for positions of an autoregressive model: what grows "
                "there would mix them, and show the model what it is to predict; choose another slot"
            )
    return found


def _stay_causal(passes: Passes, number: int, mixers: Mapping[str, Mixer]) -> bool:
    (mixed,) = passes.flows(mixers, only=number)
    return isinstance(mixed, Flow) and _is_causal(mixed)


def _mixer(shape: SlotShape) -> Mixer:
    """A stand-in for a causal seed: each position gets the mean of those before it; a vector, of all its entries."""
    if shape.layout == "dense":
        return lambda h: h + h.mean(-1, keepdim=True)
    axis = 1 if shape.layout == "sequence" else 2

    def mix(h: Tensor) -> Tensor:
        count = torch.arange(1, h.shape[axis] + 1, device=h.device, dtype=h.dtype)
        return h + h.cumsum(axis) / (count[:, None] if axis == 1 else count)

    return mix

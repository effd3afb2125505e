"""Turn any `nn.Module` into a `GrowingModel`: find its slots by module path, and what passes through them by a probe.

A slot is the output of one submodule. It must be called exactly once per forward pass and give a floating-point tensor,
or a tuple that starts with one, whose first axis is the batch. Whatever cannot work is refused here, with the reason.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from esper.growth.blueprints import LAYOUTS, Layout, SlotShape, blueprint_names
from esper.growth.model import GrowingModel, Survey
from esper.growth.replay import find_taps
from esper.growth.slot import preserved_buffers, preserved_rng

if TYPE_CHECKING:
    from collections.abc import Iterator

    from esper.lifecycle import Rules

_AXES: dict[Layout, int] = {"dense": 2, "conv1d": 3, "sequence": 3, "conv2d": 4}


class AttachError(ValueError):
    """A slot that cannot work, with the reason."""


@dataclass(frozen=True, slots=True)
class _Probe:
    """What two forward passes, on two and on three examples, showed about the host's modules."""

    calls: Counter[nn.Module]
    """Calls per pass."""
    outputs: tuple[dict[nn.Module, Any], dict[nn.Module, Any]]
    """Each module's output in both passes, in the order in which they finished."""


def attach(
    model: nn.Module,
    slots: Sequence[str],
    example: Any,
    *,
    layouts: Mapping[str, Layout] | None = None,
    rules: Rules | None = None,
    blueprints: Sequence[str] | None = None,
    budget: int | None = None,
    max_seeds: int | None = None,
    rng_seed: int = 0,
) -> GrowingModel:
    """Give `model` slots at the outputs of the named modules (paths such as "layer2", or patterns such as "h.*").

    `example` is a batch for the model's forward: a tensor, a tuple of arguments, or a dict of keyword arguments.
    `layouts` overrides the guess of what a slot's axes mean (see `LAYOUTS`), by path or pattern.
    """
    for name in blueprints or ():
        if name not in blueprint_names():
            raise AttachError(f"unknown blueprint {name!r}: choose some of {', '.join(blueprint_names())}")
    return GrowingModel(
        model,
        survey(model, slots, example, layouts),
        rules=rules,
        blueprints=blueprints,
        budget=budget,
        max_seeds=max_seeds,
        rng_seed=rng_seed,
    )


def survey(model: nn.Module, slots: Sequence[str], example: Any, layouts: Mapping[str, Layout] | None = None) -> Survey:
    """Look at the model where the slots shall be. What is found holds for every model of the same architecture."""
    if isinstance(slots, str):
        raise AttachError(f"slots must be a list of module paths, such as [{slots!r}]")
    if not any(True for _ in model.parameters()):
        raise AttachError("the model has no parameters: there is nothing to train")
    paths = _matching_paths(model, slots)
    probe = _probe(model, example)
    shapes = {path: _slot_shape(model, path, probe, layouts or {}) for path in paths}
    finished = {module: i for i, module in enumerate(probe.outputs[1])}
    ordered = sorted(paths, key=lambda path: finished[model.get_submodule(path)])
    names = {module: name for name, module in model.named_modules()}
    taps = find_taps(model, {model.get_submodule(path) for path in paths}, probe.calls)
    return Survey(tuple((path, shapes[path]) for path in ordered), tuple(names[tap] for tap in taps))


def _matching_paths(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    names = [name for name, _ in model.named_modules() if name]
    if not patterns:
        raise AttachError(f"no slots were named; this model has modules such as {_some(names)}")
    paths: dict[str, None] = {}
    for pattern in patterns:
        # `*` stands for one path component: "h.*" is every block, not every layer inside of the blocks.
        depth = pattern.count(".")
        matched = [n for n in names if n.count(".") == depth and fnmatch.fnmatchcase(n, pattern)]
        if not matched:
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else f"it has modules such as {_some(names)}"
            raise AttachError(f"slot {pattern!r} matches no module of {type(model).__name__}; {hint}")
        paths.update(dict.fromkeys(matched))
    return list(paths)


def _some(names: Sequence[str]) -> str:
    shown = sorted(names, key=lambda name: (name.count("."), names.index(name)))[:8]
    return ", ".join(shown) + (", …" if len(names) > len(shown) else "")


def _probe(model: nn.Module, example: Any) -> _Probe:
    """Run the model on two and on three examples, in evaluation mode, leaving it as it was."""
    calls: Counter[nn.Module] = Counter()
    outputs: list[dict[nn.Module, Any]] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        calls[module] += 1
        outputs[-1].pop(module, None)  # a module called again finishes last
        outputs[-1][module] = output

    handles = [module.register_forward_hook(note) for module in model.modules()]
    try:
        with untouched(model), torch.no_grad():
            for size in (2, 3):
                calls.clear()
                outputs.append({})
                args, kwargs = arguments(with_batch(example, size))
                model(*args, **kwargs)
    except AttachError:
        raise
    except Exception as error:
        detail = str(error).strip().partition("\n")[0]
        raise AttachError(
            f"{type(model).__name__} does not accept the example batch ({_describe(example)}): {detail}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return _Probe(calls, (outputs[0], outputs[1]))


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards modes, buffers and random numbers are what they were."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with preserved_rng(next(model.parameters()).device), preserved_buffers(model):
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def _slot_shape(model: nn.Module, path: str, probe: _Probe, layouts: Mapping[str, Layout]) -> SlotShape:
    module = model.get_submodule(path)
    calls = probe.calls[module]
    if calls == 0:
        raise AttachError(f"slot {path!r} is never called in a forward pass: choose a module inside or around it")
    if calls > 1:
        raise AttachError(f"slot {path!r} is called {calls} times in a forward pass; a slot needs exactly one call")
    two, three = (_slot_tensor(path, outputs[module]) for outputs in probe.outputs)
    if (two.shape[:1], three.shape[:1]) != ((2,), (3,)):
        raise AttachError(
            f"slot {path!r} gives shape {list(three.shape)} for a batch of 3: its first axis must be the batch "
            "(for torch.nn.Transformer layers, build them with batch_first=True)"
        )
    layout = _layout(path, module, three, layouts)
    if layout == "sequence":
        return SlotShape(layout, three.shape[-1], tuple(three.shape[1:-1]))
    return SlotShape(layout, three.shape[1], tuple(three.shape[2:]))


def _slot_tensor(path: str, output: Any) -> Tensor:
    first = output[0] if type(output) in (tuple, list) and output else output
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


def _layout(path: str, module: nn.Module, output: Tensor, layouts: Mapping[str, Layout]) -> Layout:
    for pattern, layout in layouts.items():
        if fnmatch.fnmatchcase(path, pattern):
            if layout not in LAYOUTS:
                raise AttachError(f"unknown layout {layout!r} for slot {path!r}: choose one of {', '.join(LAYOUTS)}")
            if _AXES[layout] != output.dim():
                raise AttachError(f"slot {path!r} has {output.dim()} axes; {layout} is {LAYOUTS[layout]}")
            return layout
    if output.dim() not in _AXES.values():
        raise AttachError(f"slot {path!r} gives {output.dim()} axes; slots of 2, 3 or 4 axes can grow")
    if output.dim() == 3:
        convolves = any(isinstance(part, nn.Conv1d | nn.BatchNorm1d) for part in module.modules())
        return "conv1d" if convolves else "sequence"
    return "dense" if output.dim() == 2 else "conv2d"


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a batch is passed to a model: a mapping by keyword, a tuple or list one by one, anything else alone."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    return (inputs,), {}


def with_batch(example: Any, size: int) -> Any:
    """The example with `size` rows (repeated as needed) in every tensor that has its batch as first axis."""
    args, kwargs = arguments(example)
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim() > 0]
    if not tensors or tensors[0].shape[0] == 0:
        raise AttachError("the example batch must contain at least one tensor with at least one row")
    batch = tensors[0].shape[0]

    def resize(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == batch:
            return value[torch.arange(size, device=value.device) % batch]
        return value

    return {k: resize(v) for k, v in kwargs.items()} if kwargs else tuple(resize(value) for value in args)


def _describe(example: Any) -> str:
    args, kwargs = arguments(example)
    return ", ".join(
        f"{v.dtype} {list(v.shape)}" if isinstance(v, Tensor) else type(v).__name__ for v in (*args, *kwargs.values())
    )

"""A grown model as a plain `nn.Module`: a copy of the host in which the seeds are ordinary parts."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_leaves_with_path

from esper.errors import refused
from esper.growth.blueprints import get_blueprint
from esper.growth.graft import Grafted, graft
from esper.growth.model import GrowingModel, is_growth_hook
from esper.growth.probe import AttachError, call, untouched
from esper.growth.randomness import preserved_rng
from esper.growth.seed import Seed
from esper.growth.slot import Slot, SlotMode, preserved_buffers
from esper.growth.standalone import Graft
from esper.growth.tensors import count_parameters
from esper.lifecycle import IN_FORWARD


class ExportError(ValueError):
    """A model that cannot be exported, with the reason."""


def plain_model(growing: GrowingModel, *, share: bool = False) -> nn.Module:
    """A copy of the host in which each seed that acts on its output is a permanent part (see `graft.py`).

    Seeds that still blend or are on hold stay as they act now (a constant alpha), so that the outputs are the growing
    model's. Incubating seeds do not act and are never copied. The user's own hooks are copied as `copy.deepcopy` copies
    them. The growing model is not touched. With `share`, the copy is one of modules alone: its parameters and buffers
    are those of host and seeds, which costs no memory, and an optimizer that holds them goes on with them.
    """
    host = _copy_host(growing, share=share)
    places = []
    for slot in (slot for slot in growing.joined if slot.life.stage in IN_FORWARD):
        assert slot.seed is not None
        alpha = 1.0 if slot.life.alpha == 1.0 else float(slot.alpha)  # the tensor: its rounding is what acts
        body = slot.seed.body
        kept = {id(tensor): tensor for tensor in (*body.parameters(), *body.buffers())} if share else {}
        places.append((slot.path, as_written(copy.deepcopy(body, kept)), alpha, asdict(_record(slot, alpha))))
    graft(host, places)
    return host


def copied(model: nn.Module, kept: Sequence[Any] = ()) -> nn.Module:
    """A deep copy, which shares the objects in `kept` with the model."""
    memo: dict[int, Any] = {id(one): one for one in kept}
    for module in model.modules():
        for value in vars(module).values():
            # What a pass leaves behind (the older weight_norm does) torch refuses to copy; the next pass makes it anew.
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    cure = "remove the attribute that cannot, or give it a __deepcopy__"
    with refused(ExportError, f"this {type(model).__name__} cannot be copied by copy.deepcopy ({cure})", Exception):
        return copy.deepcopy(model, memo)


def _copy_host(growing: GrowingModel, *, share: bool) -> nn.Module:
    """A deep copy without the hooks of slots and recorder; they are found by whom they belong to."""
    # What counts as copied already is shared: a slot's seed and its buffers must not be copied for a hook.
    kept: list[Any] = [*growing.slots, growing._recorder]
    if share:
        kept += [*growing.host.parameters(), *growing.host.buffers()]
    host = as_written(copied(growing.host, kept))
    for module in host.modules():
        for key, hook in list(module._forward_hooks.items()):
            if is_growth_hook(hook):
                del module._forward_hooks[key]
                module._forward_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)
    return host


def as_written(network: nn.Module) -> nn.Module:
    """What an engine has made faster is again what it stands for: classes of layers, and compiled functions."""
    for module in network.modules():
        if (plain := getattr(type(module), "esper_plain_class", None)) is not None:
            module.__class__ = plain
        for name, value in list(vars(module).items()):
            if getattr(type(value), "esper_stands_in", False):
                del module.__dict__[name]
                if value.stands_for is not None:
                    module.__dict__[name] = value.stands_for
    return network


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
        parameters=count_parameters(seed.body),
        visibility=seed.shape.visibility,
        channels_last=seed.shape.channels_last,
    )


def check_exportable(growing: GrowingModel, example: Any) -> None:
    """Try before training whether what grows in each slot would act in the exported model as it acts here.

    It would not where the slot's module calls whatever is registered in it, as an nn.Sequential does.
    """
    with untouched(growing.host), preserved_rng(growing.device):
        for slot in growing.slots:
            candidates = sorted(growing.candidates(slot), key=lambda b: not getattr(b.module, "reads_mask", False))
            if not candidates:
                continue
            seed = Seed(candidates[0].name, slot.shape).to(growing.device)  # one that reads masks, if there is one
            for parameter in seed.parameters():
                parameter.normal_(std=0.3)
            slot.plant(seed.to(next(slot.module.parameters(), next(growing.host.parameters())).dtype), growing.host)
            try:
                exported = _copy_host(growing, share=True)
                graft(exported, [(slot.path, copy.deepcopy(seed.body), 1.0, {})])
                slot.mode = SlotMode.SHADOW
                with preserved_rng(growing.device), preserved_buffers(growing.host):  # observers count in every pass
                    expected = call(growing.host, example)
                try:
                    gap = output_gap(expected, call(exported, example))
                except Exception:  # a container that calls the list of its seeds
                    gap = math.inf
            finally:
                slot.mode = SlotMode.LIVE
                slot.uproot()
            if gap > allowed_gap(growing):
                raise AttachError(
                    f"slot {slot.path!r} cannot be exported: {type(slot.module).__name__} computes something else when "
                    "a seed is registered in it (it calls all of its children, say): choose a module in or around it"
                )


def allowed_gap(model: nn.Module) -> float:
    """Largest difference between two ways to compute the same in the model's own precision."""
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return math.sqrt(max(torch.finfo(kind).eps for kind in kinds))


def output_gap(expected: Any, found: Any) -> float:
    """The largest difference between two outputs, relative to values above 1."""
    left, right = _named_tensors(expected), _named_tensors(found)
    if left.keys() != right.keys():
        return math.inf
    return max((_gap(left[name], right[name]) for name in left), default=0.0)


def _named_tensors(output: Any) -> dict[str, Tensor]:
    """An output's tensors, but for the key-value cache: a grown model may do without (see `graft.readable`)."""
    named = {keystr(path): leaf for path, leaf in tree_leaves_with_path(output) if isinstance(leaf, Tensor)}
    return {name: leaf for name, leaf in named.items() if "past_key_values" not in name}


def grafts_of(model: nn.Module) -> list[tuple[Graft, nn.Module]]:
    """What grew in a plain model, with its module, in the order of `grafted`."""
    return [(Graft(**{**m.grown, "path": path, "alpha": m.alpha}), m.seed) for path, m in grafted(model) if m.grown]


def grafted(model: nn.Module) -> list[tuple[str, Grafted]]:
    """The seeds of a plain model, each with the path of the module at whose output it acts.

    In the order in which they are registered: grafted in this order, they have the same keys in another host. (An
    nn.Sequential and its last layer, say, have one list of seeds, and the layer's may be the first.)
    """
    acting = {
        hook.__self__: path
        for path, module in model.named_modules()
        for hook in module._forward_hooks.values()
        if isinstance(getattr(hook, "__self__", None), Grafted)
    }
    registered = [one for one in model.modules() if isinstance(one, Grafted) and one in acting]
    return [(acting[one], one) for one in dict.fromkeys([*registered, *acting])]


def graft_from(grown: nn.Module, host: nn.Module) -> None:
    """Put into `host` what a plain model of it has more; both then share these seeds."""
    there = Counter(path for path, _ in grafted(host))
    for path, one in grafted(grown):
        if there[path] > 0:  # of an earlier growth, before the new ones
            there[path] -= 1
        else:
            graft(host, [(path, one.seed, one.alpha, one.grown)])
            one.seed.train(host.get_submodule(path).training)


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

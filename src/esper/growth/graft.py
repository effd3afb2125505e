"""A seed as a permanent part of its host: what a grown network is made of once growth is over.

The host's modules stay the objects they were: same classes, same attributes, same names in `state_dict()`. A seed acts
through a forward hook of the module at whose output it grew, and is registered under `esper_seeds` of that module.

This file needs torch alone and names nothing else of Esper's, because its source travels with an exported model.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

import torch
from torch import nn

SEEDS = "esper_seeds"
"""The one name that growth adds to a host: every key of a seed in `state_dict()` has it as a part, and no other key."""


class Grafted(nn.Module):
    """What grew at the output of one of the host's modules.

    `grown` is plain data that says where the seed came from; `holder` is the path of the module that it is registered
    in. Both travel in `state_dict()`, so that a checkpoint says by itself which seeds it has.
    """

    reads_input = False  # of objects that were pickled before seeds could stand beside a layer

    def __init__(self, seed: nn.Module, alpha: float, grown: dict[str, Any], inputs: tuple[str, ...]) -> None:
        super().__init__()
        self.seed = seed
        self.alpha = alpha  # below 1 only for a seed that was exported before it was blended in fully
        self.grown = grown
        self.inputs = inputs if getattr(seed, "reads_mask", False) else ()
        self.reads_input = bool(getattr(seed, "reads_input", False))
        self.holder = ""
        self.handle: Any = None

    def forward(self, h: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        changed: torch.Tensor = self.seed(h) if other is None else self.seed(h, other)
        return changed if self.alpha == 1.0 else h + self.alpha * (changed - h)

    def act(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None) -> Any:
        """The hook."""
        if output is None:  # torch's eager quantisation moves hooks to another module, and leaves the seed behind
            raise RuntimeError(
                f"the layer at which a seed grew was replaced by a {type(module).__name__}, and the seed is no part of "
                "that: leave layers with seeds out when you quantise, or quantise the exported program"
            )
        if getattr(module, "_is_replica", False):  # its seeds would be those of the first GPU
            raise RuntimeError("nn.DataParallel cannot copy a grown model: use DistributedDataParallel")
        h = first_tensor(output)
        other = first_input(args, kwargs) if self.reads_input else None
        if isinstance(h, torch.fx.Proxy):
            return with_first(output, self.traced(h, other))
        return with_first(output, self(h, readable(self.inputs, args, kwargs, h) if self.inputs else other))

    def traced(self, h: torch.fx.Proxy, other: torch.fx.Proxy | None) -> Any:
        """One node of torch.fx, which cannot look into most seeds."""
        if self.inputs:
            raise RuntimeError("torch.fx cannot trace a seed that reads masks: use torch.export.export")
        given = (h,) if other is None else (h, other)
        return h.tracer.create_proxy("call_module", h.tracer.path_of_module(self), given, {})  # type: ignore[attr-defined]

    def join(self, module: nn.Module, holder: nn.Module, path: str) -> None:
        """Act at the output of `module`, as a part of `holder`, which has this path in the host."""
        # The handle is kept for pickle: torch then gives no later hook of another process the same number.
        self.handle = module.register_forward_hook(self.act, with_kwargs=True)
        self.holder = path
        self.training = holder.training
        if SEEDS not in holder._modules:
            holder.add_module(SEEDS, nn.ModuleList())
        holder.get_submodule(SEEDS).append(self)  # type: ignore[operator]

    def get_extra_state(self) -> torch.Tensor:
        """As bytes in a tensor: files of tensors alone (safetensors) can keep it."""
        record = {"holder": self.holder, "grown": {**self.grown, "alpha": self.alpha} if self.grown else {}}
        return torch.frombuffer(bytearray(json.dumps(record, default=repr).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Weights of another seed are refused, even where their shapes fit."""
        found, own = read_record(state)["grown"], json.loads(json.dumps(self.grown, default=repr))
        for key in ("blueprint", "layout", "arguments", "blend", "visibility", "channels_last"):
            if own and found and found.get(key) != own.get(key):
                mine, theirs = _different(own.get(key), found.get(key))
                raise ValueError(
                    f"the seed at {own.get('path')!r} has {key} {mine!r}, and the checkpoint's has "
                    f"{str(theirs)[:60]!r}: build the model with esper.load_seeds(host, checkpoint)"
                )
        alpha = found.get("alpha", self.alpha)
        if not (isinstance(alpha, int | float) and 0.0 <= alpha <= 1.0):
            raise ValueError(f"the checkpoint's alpha of a seed must lie between 0 and 1, not be {str(alpha)[:60]!r}")
        self.alpha = float(alpha)


def _different(mine: Any, theirs: Any) -> tuple[Any, Any]:
    """Of two dicts what differs; anything else as it is."""
    if not (isinstance(mine, dict) and isinstance(theirs, dict)):
        return mine, theirs
    names = [name for name in (*mine, *theirs) if mine.get(name) != theirs.get(name)]
    return {name: mine.get(name) for name in names}, {name: theirs.get(name) for name in names}


def read_record(state: torch.Tensor) -> dict[str, Any]:
    """What `Grafted.get_extra_state` has written."""
    try:
        record = json.loads(bytes(state.to("cpu", torch.uint8).flatten().tolist()))
        if isinstance(record["holder"], str) and isinstance(record["grown"], dict):
            return {"holder": record["holder"], "grown": record["grown"]}
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError("the checkpoint's record of a seed is damaged") from error
    raise ValueError("the checkpoint's record of a seed is damaged")


def first_tensor(output: Any) -> Any:
    """What a seed acts on: the output of its module, or the first part of a tuple or list."""
    return output[0] if type(output) in (tuple, list) and output else output


def first_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a layer with one input was called with."""
    return args[0] if args else next(iter(kwargs.values()))


def with_first(output: Any, first: torch.Tensor) -> Any:
    """`output` with its (first) tensor exchanged; lists and tuples keep the rest."""
    return type(output)((first, *output[1:])) if type(output) in (tuple, list) else first


def graft(model: nn.Module, places: list[tuple[str, nn.Module, float, dict[str, Any]]]) -> None:
    """Let each (path, seed, alpha, grown) act at the output of the module at its path; of one path, in this order."""
    without_nested_tensors(model)
    for path, seed, alpha, grown in places:
        module = model.get_submodule(path)
        grafted = Grafted(seed, alpha, grown, argument_names(module))
        grafted.join(module, *holder_of(model, path))
        if grafted.inputs:  # a seed that reads other positions: generation must show it all of them, see `readable`
            for part in model.modules():
                for config in (getattr(part, "config", None), getattr(part, "generation_config", None)):
                    if config is not None and getattr(config, "use_cache", None):
                        config.use_cache = False


def without_nested_tensors(model: nn.Module) -> None:
    """torch's encoder makes nested tensors of padded batches, in evaluation only, and no seed can act on them: let it
    pass them as in training."""
    for part in model.modules():
        if isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False


def holder_of(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Where the seed of a slot is registered, with its path: the slot's module.

    An nn.Sequential would call it as one more layer, so it is the last layer inside; for an empty one, the first module
    of the model that is no nn.Sequential.
    """
    module = model.get_submodule(path)
    while isinstance(module, nn.Sequential):
        inner = [(name, child) for name, child in module._modules.items() if child is not None]
        if not inner:
            return next((m, name) for name, m in model.named_modules() if not isinstance(m, nn.Sequential))
        path, module = f"{path}.{inner[-1][0]}", inner[-1][1]
    return module, path


MASKS = ("attention_mask", "key_padding_mask", "src_key_padding_mask")
"""What modules call a mask that says which positions are padding, in transformers (1 is shown) and torch (1 is not)."""


CACHES = ("past_key_values", "past_key_value", "layer_past")
"""What modules call the key-value cache of generation."""


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """The names of a module's inputs, in their order."""
    return tuple(inspect.signature(module.forward).parameters)


def readable(
    names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any], h: torch.Tensor
) -> torch.Tensor | None:
    """Which positions may be read, from a module's own inputs: True where, [batch, 1, 1 or time, time]; None is all.

    A key-value cache that stands for positions that `h` does not show is refused: the seed has no such cache.
    """
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    for name, value in given.items():
        length = getattr(value, "get_seq_length", None)
        past = name in CACHES and isinstance(value, tuple | list) and len(value) > 0
        if past or (length is not None and length() > h.shape[1]):
            raise RuntimeError(
                f"an attention seed grew here and must see all positions, but with the key-value cache it is shown "
                f"{h.shape[1]}: generate with use_cache=False"
            )
    for name in MASKS:
        mask = given.get(name)
        if isinstance(mask, torch.Tensor) and mask.dim() > 1:
            if mask.is_floating_point():  # added to scores, so very negative is hidden; or 1 for what is shown
                shown = mask > -1e4
                if mask.dim() == 2 and name == "attention_mask":
                    shown = torch.where((mask > 0).any(), mask > 0, shown)
            else:
                shown = (mask != 0) ^ (mask.dim() == 2 and "padding" in name)
            return shown.reshape(shown.shape[0], *[1] * (4 - shown.dim()), *shown.shape[1:])[:, :1]
    return None


def is_record(key: str) -> bool:
    """Whether a key of `state_dict()` is what a seed says about itself."""
    return f".{SEEDS}." in f".{key}" and key.endswith("._extra_state")


def fill(model: nn.Module, saved: dict[str, torch.Tensor], tied: dict[str, str]) -> None:
    """Give parameters and buffers their saved values and types. A name in `tied` shares the tensor of another name."""
    saved = {**saved, **{name: saved[other] for name, other in tied.items() if other in saved}}
    saved = {name: tensor for name, tensor in saved.items() if not is_record(name)}
    state = model.state_dict(keep_vars=True).items()
    own = {name: value for name, value in state if isinstance(value, torch.Tensor) and not is_record(name)}
    if wrong := sorted(own.keys() ^ saved.keys()):
        where = "the file does not have" if wrong[0] in own else "the model does not have"
        raise ValueError(f"the weights do not fit the architecture: {where} {wrong[0]} ({len(wrong)} such names)")
    for name, tensor in own.items():
        if tensor.shape != saved[name].shape:
            shapes = f"{list(saved[name].shape)} instead of {list(tensor.shape)}"
            raise ValueError(f"the weights do not fit the architecture: {name} has shape {shapes}")
        # Not copy_: the saved type counts, whatever the constructor's was; tied names stay one tensor.
        tensor.data = saved[name].to(tensor.device)

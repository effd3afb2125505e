"""A seed as a permanent part of its host: what a grown network is made of once growth is over.

This file needs torch alone and names nothing else of Esper's, because its source travels with an exported model.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn


class Grafted(nn.Module):
    """A module of the host, and what grew at its output. Looks like the host's module to whoever reads its attributes.

    `grown` is plain data that says where the seed came from; a model keeps it so that it can be saved again.
    """

    def __init__(
        self, host: nn.Module, seed: nn.Module, alpha: float = 1.0, grown: dict[str, Any] | None = None
    ) -> None:
        super().__init__()
        self.host = host
        self.seed = seed
        self.alpha = alpha  # below 1 only for a seed that was exported before it was blended in fully
        self.grown = grown or {}
        self.inputs = argument_names(host) if getattr(seed, "reads_mask", False) else ()
        self.training = host.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.host(*args, **kwargs)
        h = first_tensor(output)
        changed = self.seed(h, readable(self.inputs, args, kwargs, h)) if self.inputs else self.seed(h)
        mixed = changed if self.alpha == 1.0 else h + self.alpha * (changed - h)
        return with_first(output, mixed)

    def __getattr__(self, name: str) -> Any:
        # Parents read attributes of their children: nn.TransformerEncoder of its first layer, for one.
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):  # copying and pickling read these: they must mean this object
                raise
            return getattr(super().__getattr__("host"), name)


def first_tensor(output: Any) -> Any:
    """What a seed acts on: the output of its module, or the first part of a tuple or list."""
    return output[0] if type(output) in (tuple, list) and output else output


def with_first(output: Any, first: torch.Tensor) -> Any:
    """`output` with its (first) tensor exchanged; lists and tuples keep the rest."""
    return type(output)((first, *output[1:])) if type(output) in (tuple, list) else first


def graft(model: nn.Module, places: list[tuple[str, nn.Module, float, dict[str, Any]]]) -> None:
    """Put each (path, seed, alpha, grown) behind the module at its path, wherever that module is registered."""
    # All paths first: a graft around "layer1" would move "layer1.0".
    for module, (_, seed, alpha, grown) in [(model.get_submodule(place[0]), place) for place in places]:
        holders = [(m, name) for m in model.modules() for name, child in m._modules.items() if child is module]
        grafted = Grafted(module, seed, alpha, grown)
        for holder, name in holders:
            holder._modules[name] = grafted
        if grafted.inputs:  # a seed that reads other positions: generation must show it all of them, see `readable`
            for part in model.modules():
                for config in (getattr(part, "config", None), getattr(part, "generation_config", None)):
                    if config is not None and getattr(config, "use_cache", None):
                        config.use_cache = False


MASKS = ("attention_mask", "key_padding_mask", "src_key_padding_mask")
"""What modules call a mask that says which positions are padding, in transformers (1 is shown) and torch (1 is not)."""


CACHES = ("past_key_values", "past_key_value", "layer_past")
"""What modules call the key-value cache of generation."""


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """The names of a module's inputs, in their order; of something grafted, of the host's module inside."""
    while isinstance(module, Grafted):
        module = module.host
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


def fill(model: nn.Module, saved: dict[str, torch.Tensor], tied: dict[str, str]) -> None:
    """Give parameters and buffers their saved values and types. A name in `tied` shares the tensor of another name."""
    saved = {**saved, **{name: saved[other] for name, other in tied.items() if other in saved}}
    own = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}
    if wrong := sorted(own.keys() ^ saved.keys()):
        where = "the file does not have" if wrong[0] in own else "the model does not have"
        raise ValueError(f"the weights do not fit the architecture: {where} {wrong[0]} ({len(wrong)} such names)")
    for name, tensor in own.items():
        if tensor.shape != saved[name].shape:
            shapes = f"{list(saved[name].shape)} instead of {list(tensor.shape)}"
            raise ValueError(f"the weights do not fit the architecture: {name} has shape {shapes}")
        # Not copy_: the saved type counts, whatever the constructor's was; tied names stay one tensor.
        tensor.data = saved[name].to(tensor.device)

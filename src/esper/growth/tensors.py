"""The tensors of modules: counted, found in one pass, laid side by side, moved together.

One by one, each of these takes Python longer than anything else that is done with a small network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

ALIGNED = 64
"""Numbers. Kernels read several at a time, from addresses that are multiples of it."""


def count_parameters(module: nn.Module) -> int:
    """Numbers in its parameters; one under two names counts once."""
    return sum(parameter.numel() for parameter in module.parameters())


def own_tensors(whole: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """`parameters()` and `buffers()` of a module, found in one pass: torch's own two take three times as long."""
    parameters: dict[int, Tensor] = {}
    buffers: dict[int, Tensor] = {}
    seen: set[int] = set()
    waiting: list[nn.Module | None] = [whole]
    while waiting:
        module = waiting.pop()
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        if own := module._parameters:
            parameters |= {id(tensor): tensor for tensor in own.values() if tensor is not None}
        if kept := module._buffers:
            buffers |= {id(tensor): tensor for tensor in kept.values() if tensor is not None}
        if children := module._modules:
            waiting += reversed(children.values())
    return list(parameters.values()), list(buffers.values())


class Arrangement:
    """Places for tensors with the layouts of others: those of one type lie in one piece of memory."""

    def __init__(self, like: Sequence[Tensor], *, by_pixel: bool = False) -> None:
        """`by_pixel`: weights of convolutions get the order of channels-last images."""
        kinds: dict[tuple[torch.dtype, torch.device], int] = {}
        sizes: list[int] = []
        self._places: list[tuple[int, torch.Size, tuple[int, ...], int]] = []
        """Of each tensor: its piece, shape and strides, and where it starts."""
        self._members: list[list[int]] = []
        """Of each piece: which tensors lie there."""
        for i, tensor in enumerate(like):
            piece = kinds.setdefault((tensor.dtype, tensor.device), len(sizes))
            if piece == len(sizes):
                sizes.append(0)
                self._members.append([])
            self._members[piece].append(i)
            self._places.append((piece, tensor.shape, _strides(tensor, by_pixel), sizes[piece]))
            sizes[piece] += -(-tensor.numel() // ALIGNED) * ALIGNED
        self._kinds = [(size, dtype, device) for size, (dtype, device) in zip(sizes, kinds, strict=True)]

    def pieces(self, make: Callable[..., Tensor] = torch.empty) -> list[Tensor]:
        """The memory, each piece made by one call."""
        return [make(size, dtype=dtype, device=device) for size, dtype, device in self._kinds]

    def within(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """The tensors."""
        return [pieces[i].as_strided(shape, strides, start) for i, shape, strides, start in self._places]

    def copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Numbers from tensors of this arrangement into others of it, with one call for each piece."""
        with torch.no_grad():
            for rows in self._members:
                torch._foreach_copy_([targets[i] for i in rows], [sources[i] for i in rows])


def side_by_side(like: Sequence[Tensor], make: Callable[..., Tensor] = torch.empty) -> list[Tensor]:
    """A new tensor with the layout of each."""
    arrangement = Arrangement(like)
    return arrangement.within(arrangement.pieces(make))


def _strides(tensor: Tensor, by_pixel: bool) -> tuple[int, ...]:
    """Those of a new tensor of this layout, which has no gaps."""
    if by_pixel and tensor.dim() == 4:
        _, channels, height, width = tensor.shape
        return (height * width * channels, 1, width * channels, channels)
    if tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor.stride()  # to make a tensor, even without memory, takes ten times as long
    return torch.empty_like(tensor, device="meta").stride()


def move_together(whole: nn.Module, device: torch.device, dtype: torch.dtype | None = None, *, by_pixel: bool) -> None:
    """`whole.to(device, dtype)`, and to channels-last order if `by_pixel`, with one transfer for each type of number.

    One by one, every tensor waits for its own.
    """
    tensors = [tensor for kind in own_tensors(whole) for tensor in kind]
    if not by_pixel and all(t.device == device and _is_of(dtype, t) for t in tensors):
        return
    if not _can_move_together(whole, tensors, dtype):
        order = {"memory_format": torch.channels_last} if by_pixel else {}
        whole.to(device=device, dtype=dtype, **order)  # type: ignore[call-overload]
        return
    arrangement = Arrangement(tensors, by_pixel=by_pixel)
    # Pinned, so that nothing waits for the transfer.
    pieces = arrangement.pieces(partial(torch.empty, pin_memory=device.type == "cuda"))
    arrangement.copy(tensors, arrangement.within(pieces))
    arrived = arrangement.within([piece.to(device, non_blocking=True) for piece in pieces])
    for tensor, place in zip(tensors, arrived, strict=True):
        tensor.data = place


def _is_of(dtype: torch.dtype | None, tensor: Tensor) -> bool:
    """Counts and the like have types of their own, whatever that of the weights is."""
    return dtype is None or tensor.dtype == dtype or not (tensor.is_floating_point() or tensor.is_complex())


def _can_move_together(whole: nn.Module, tensors: Sequence[Tensor], dtype: torch.dtype | None) -> bool:
    """Plain tensors on the CPU that need no rounding, in modules that move in the usual way (an LSTM does not)."""
    plain = all(type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided and t.grad is None for t in tensors)
    near = all(t.device.type == "cpu" and _is_of(dtype, t) for t in tensors)
    return plain and near and all(type(module)._apply is nn.Module._apply for module in whole.modules())

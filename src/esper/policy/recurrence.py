"""What a recurrent policy remembers, and how rows of several episodes go through its LSTM in a few calls."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """What the core remembers: hidden and cell, each [layers, N, hidden]. A memoryless policy has 0 layers."""

    hidden: Tensor
    cell: Tensor

    def keep(self, mask: Tensor) -> RecurrentState:
        """Zero the state of environments where `mask` [N] is False: their next step starts an episode."""
        kept = mask[None, :, None]
        return RecurrentState(self.hidden * kept, self.cell * kept)


@dataclass(frozen=True, slots=True)
class Packing:
    """Where each step of [N, T] rows goes when every episode inside them becomes a sequence of its own.

    With it, rows that contain several episodes need a few fused LSTM calls instead of a Python loop over steps. Rows
    that are exactly one episode need none (None instead of a Packing). Sequences are grouped by length, a factor of two
    at most within a group, so that less than half of the work is padding.
    """

    groups: tuple[tuple[Tensor, Tensor], ...]
    """Per group: the flat step n·T + t at each place, [M, L] (padding repeats step 0 and is never read back), and the
    row whose initial state each sequence continues, or N for a fresh one, [M]."""
    place: Tensor
    """[N, T] int64: where each step is in the groups' places laid end to end."""

    @staticmethod
    def of(starts: Tensor) -> Packing:
        """From [N, T] bool: True where a step starts an episode. Column 0 starts a sequence either way."""
        rows, steps = starts.shape
        opens = starts.clone()
        opens[:, 0] = True
        row, column = opens.nonzero(as_tuple=True)  # [M] one sequence each
        begin = row * steps + column
        length = torch.diff(begin, append=begin.new_tensor([rows * steps]))
        fresh = (column > 0) | starts[row, column]
        continues = torch.where(fresh, torch.full_like(row, rows), row)
        size_class = torch.ceil(torch.log2(length.double())).long()
        groups, offset = [], 0
        place = torch.empty(rows * steps, dtype=torch.int64, device=starts.device)
        for which in sorted(set(size_class.tolist())):
            members = (size_class == which).nonzero().squeeze(1)
            longest = int(length[members].max())
            within = torch.arange(longest, device=starts.device)
            real = within < length[members, None]  # [M, L]
            source = torch.where(real, begin[members, None] + within, torch.zeros_like(within))
            place[source[real]] = offset + real.flatten().nonzero().squeeze(1)
            groups.append((source, continues[members]))
            offset += source.numel()
        return Packing(tuple(groups), place.view(rows, steps))

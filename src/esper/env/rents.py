"""The rent of an episode: one for all, or another one for every training draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from esper.env.rent import RENT_RATE, check_rent
from esper.tasks.counted import Purpose, draw_keys, uniforms

Rent = float | Literal["varied"]
HIGHEST = 20.0
FREE, USUAL = 0.2, 0.2
"""Shares of the draws whose rent is 0 ("accuracy at any size") and `RENT_RATE` (what comparisons use)."""


def check_rents(rent: Rent) -> Rent:
    """Refuse what is neither a price nor "varied"."""
    return rent if rent == "varied" else check_rent(rent)


def judged_rent(rent: Rent) -> float:
    """What held-out draws are played at: judging needs one price."""
    return RENT_RATE if rent == "varied" else rent


def rents_of(rent: Rent, draws: Sequence[int], *, held_out: bool) -> float | Tensor:
    """The rent of these episodes: a number, or [N] where it varies.

    A varied one is a function of the draw id alone, so siblings share it. The rest lies between 0 and `HIGHEST`, evenly
    in log(1 + rent).
    """
    if rent != "varied" or held_out:
        return judged_rent(rent)
    which, where = uniforms(draw_keys(torch.tensor(draws), stream=0, streams=1), Purpose.RENT, 2).double().unbind(1)
    between = torch.expm1(where * math.log1p(HIGHEST))
    return torch.where(which < FREE, 0.0, torch.where(which < FREE + USUAL, RENT_RATE, between))

"""Draw ids: which problems of a family a run learns from, chooses by, and is compared on.

A family has two sequences of problems, training draws and held-out draws, each counted from 0 (`Family.draw`). They
share neither data nor seeds, so that the same id means two problems.
"""

from __future__ import annotations

# -- training draws ----------------------------------------------------------------------------------------------------

TRAINING_DRAWS_PER_SEED = 1_000_000
"""`esper train` and `esper record` with seed s use the draws from s · 1,000,000 on: other seeds, other problems."""

# -- held-out draws ----------------------------------------------------------------------------------------------------

COMPARISON_DRAWS_PER_SEED = 10_000
"""Comparisons with seed s use the held-out draws from s · 10,000 on. `esper tune-heuristic` uses the training draws of
the same ids."""
FIRST_EVALUATED = 9_000_000
"""A training run chooses its best policy by the held-out draws from here on; no comparison with a seed below 900 uses
them."""


def comparison_draws(count: int, seed: int = 0) -> range:
    """The ids of the held-out draws that a comparison with this seed uses."""
    if not 1 <= count <= COMPARISON_DRAWS_PER_SEED:
        raise ValueError(f"episodes must be from 1 to {COMPARISON_DRAWS_PER_SEED:,}, not {count:,}")
    if seed < 0:
        raise ValueError(f"the seed must be at least 0, not {seed}")
    return range(seed * COMPARISON_DRAWS_PER_SEED, seed * COMPARISON_DRAWS_PER_SEED + count)

"""Many problems of one form, side by side: what the stacked engine trains on.

Problems whose hosts have the same form (`Form`) can be one network with tensors [N, …]; all that differs between them
is a column. Inputs are channels last, [N, examples, *sizes, features], padded with zeros at the end of each axis to the
most examples, the largest sizes and the most features of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from torch import Tensor

from esper.growth.blueprints import Layout


@dataclass(frozen=True, slots=True)
class Form:
    """What hosts must have in common to be stacked."""

    layout: Layout
    stages: int
    pooling: str
    """Of feature maps: "average" or "max"; sequences are averaged."""
    norm: bool
    """Of feature maps: a batch norm follows each convolution, which then has no bias."""
    classes: int
    batch_size: int


@dataclass(frozen=True, slots=True, eq=False)
class Problems:
    """N problems of one form. Columns are [N], on the device of the data."""

    form: Form
    draw: Tensor
    """int64: draw ids."""
    features: Tensor
    """int64: true input features (channels) of each problem."""
    widths: Tensor
    """[N, stages] int64: true output channels of each stage."""
    sizes: Tensor
    """[N, axes] int64: true sizes of an example, less features: () for vectors, (time), (length), (height, width)."""
    kernels: Tensor
    """[N, stages] int64: of convolutions, odd; always 1 for vectors and sequences."""
    pools: Tensor
    """[N, stages] int64: factor by which the output of a stage is pooled; 1 is not at all. A remainder is dropped."""
    bends: Tensor
    """[N, stages] bool: a ReLU follows the (normalised) linear map."""
    attends: Tensor
    """[N, stages] bool: of sequences: causal attention of one head is added at the end of the stage."""
    learning_rate: Tensor
    """float64"""
    weight_decay: Tensor
    """float64"""
    updates: Tensor
    """int64: per epoch."""
    horizon: Tensor
    """int64: epochs."""
    budget: Tensor
    """float64: most parameters in all; infinity is no limit."""
    max_seeds: Tensor
    """float64: most seeds at a time; infinity is no limit."""
    examples: Tensor
    """int64: true number of training examples."""
    train_x: Tensor
    """[N, examples, *sizes, features] float32"""
    train_y: Tensor
    """[N, examples] int64"""
    val_x: Tensor
    val_y: Tensor
    test_x: Tensor
    test_y: Tensor
    minibatches: Callable[[Tensor, int], Tensor]
    """(rows [n], epoch) → [updates, n, batch] int64: examples of each minibatch, for the most updates of a row."""
    host_uniforms: Callable[[Tensor, int], Tensor]
    """(rows [n], count) → [n, count] float32 in [0, 1): what the hosts' first weights are made of, in the order in
    which torch draws them for the plain host."""
    seed_uniforms: Callable[[Tensor, Tensor, int], Tensor]
    """(rows [n], number of the network's seed from 1 on [n], count) → [n, count]: the same for a seed."""
    facts: tuple[dict[str, str | int | float], ...] = ()
    """What is known about each problem: for analysis only, never shown to a controller."""

    def __len__(self) -> int:
        return self.draw.shape[0]

    @property
    def bytes(self) -> int:
        """Memory of the data."""
        tensors = (getattr(self, field.name) for field in fields(self))
        return sum(t.nbytes for t in tensors if isinstance(t, Tensor))

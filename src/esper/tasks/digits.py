"""`digits`: scikit-learn's 1,797 handwritten digits of 8 × 8 pixels, for a small MLP. The smoke test."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from esper.tasks.data import Split, Splits, stratified_parts
from esper.tasks.hosts import MLPHost
from esper.tasks.registry import Task, task


@task("digits")
def digits(seed: int, *, widths: Sequence[int] = (8, 8)) -> Task:
    """8 × 8 handwritten digits, dense host."""
    from sklearn.datasets import load_digits  # noqa: PLC0415  (takes a second to import; only this task needs it)

    bunch = load_digits()
    pixels = torch.tensor(bunch.data, dtype=torch.float32) / 8.0 - 1.0  # [1797, 64], 0…16 → −1…1
    labels = np.asarray(bunch.target, dtype=np.int64)
    parts = stratified_parts(labels, (0.6, 0.2, 0.2), np.random.default_rng(seed))
    train, val, test = (Split(pixels[part], torch.from_numpy(labels[part])) for part in parts)
    host = partial(MLPHost, in_features=64, widths=list(widths), classes=10)
    return Task(
        name="digits",
        description="handwritten digits of 8 × 8 pixels from scikit-learn",
        splits=Splits(train, val, test),
        make_host=host,
        slots=tuple(f"stages.{i}" for i in range(len(widths))),
        labels=tuple("0123456789"),
        batch_size=64,
        updates_per_epoch=17,  # about one pass over the training data
        learning_rate=5e-3,
    )

"""`cifar10`: the standard binary files (a label byte, then 3 × 32 × 32 pixel bytes per image), never anything else.

Absent or damaged files are an error that names the folder; nothing is downloaded and nothing is made up.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from esper.tasks.data import Split, Splits, stratified_parts
from esper.tasks.hosts import Conv2dHost
from esper.tasks.registry import Task, task

DATA_DIR_VARIABLE = "ESPER_DATA_DIR"
FOLDER = "cifar-10-batches-bin"
SOURCE = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
RECORD = 1 + 3 * 32 * 32  # bytes
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
VAL_FRACTION = 0.1  # of the training images


def find_folder(data_dir: str | Path | None) -> Path:
    """The folder with the binary files: `data_dir`, else $ESPER_DATA_DIR, else ./data; or its standard subfolder."""
    root = Path(data_dir or os.environ.get(DATA_DIR_VARIABLE) or "data").expanduser().resolve()
    for folder in (root, root / FOLDER):
        if (folder / "test_batch.bin").is_file() and any(folder.glob("data_batch_*.bin")):
            return folder
    raise FileNotFoundError(
        f"no CIFAR-10 binary files (data_batch_1.bin …, test_batch.bin) in {root} nor in {root / FOLDER}: unpack "
        f"{SOURCE} there, or name another folder with --data-dir or the variable {DATA_DIR_VARIABLE}"
    )


def read_images(files: Sequence[Path]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """All images [count, 3, 32, 32] and labels [count] of some binary files."""
    records = []
    for file in files:
        content = np.fromfile(file, dtype=np.uint8)
        if len(content) == 0 or len(content) % RECORD:
            raise ValueError(
                f"{file} has {len(content)} bytes, not a positive multiple of {RECORD}: it is damaged or not a "
                f"CIFAR-10 binary file; unpack {SOURCE} again"
            )
        records.append(content.reshape(-1, RECORD))
        if records[-1][:, 0].max() > 9:
            raise ValueError(f"{file} has labels above 9: it is not a CIFAR-10 binary file; unpack {SOURCE} again")
    table = np.concatenate(records)
    return table[:, 1:].reshape(-1, 3, 32, 32), table[:, 0].astype(np.int64)


def _normalised(images: NDArray[np.uint8], labels: NDArray[np.int64]) -> Split:
    pixels = torch.from_numpy(images).float().div_(255.0)
    pixels.sub_(torch.tensor(MEAN).view(3, 1, 1)).div_(torch.tensor(STD).view(3, 1, 1))
    return Split(pixels, torch.from_numpy(labels))


@task("cifar10")
def cifar10(
    seed: int,
    *,
    data_dir: str | Path | None = None,
    widths: Sequence[int] = (8, 16, 32),
    kernels: Sequence[int] = (3, 3, 3),
    augment: bool = True,
) -> Task:
    """Photographs of ten kinds of thing, 2-D convolutional host."""
    folder = find_folder(data_dir)
    images, labels = read_images(sorted(folder.glob("data_batch_*.bin")))
    parts = stratified_parts(labels, (1.0 - VAL_FRACTION, VAL_FRACTION), np.random.default_rng(seed))
    train, val = (_normalised(images[part], labels[part]) for part in parts)
    test = _normalised(*read_images([folder / "test_batch.bin"]))
    host = partial(Conv2dHost, in_channels=3, widths=list(widths), kernels=list(kernels), classes=10)
    return Task(
        name="cifar10",
        description="photographs of 32 × 32 pixels of ten kinds of thing",
        splits=Splits(train, val, test),
        make_host=host,
        slots=tuple(f"stages.{i}" for i in range(len(widths))),
        labels=CLASSES,
        batch_size=128,
        updates_per_epoch=50,
        learning_rate=1e-2,
        augment=augment,
    )

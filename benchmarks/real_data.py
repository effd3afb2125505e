"""The problems of `real_problems.py`: data that nobody made for Esper, and the hosts that are trained on them.

The test examples of a problem are the same in all runs. The rest is divided into training and validation examples by
the seed of a run. Inputs are scaled by the training examples. Nothing is downloaded.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sklearn.datasets
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.growth.tensors import count_parameters
from esper.tasks.cifar10 import find_folder, read_images
from resnet import resnet_20

Pair = tuple[Tensor, Tensor]
LENGTH, ALPHABET = 32, 128
"""Characters of a window of text; symbols that it may have."""


class Data(NamedTuple):
    train: Pair
    val: Pair
    test: Pair


class Sources(NamedTuple):
    """Files of the person who runs this."""

    data_dir: str = ""
    text_file: str = ""


class AbsentError(Exception):
    """Data that are not there, with what to do."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Data and a host."""

    title: str
    read: Callable[[int, Sources], Data]
    """By the seed of the run."""
    build: Callable[[int], nn.Module]
    """By width."""
    width: int
    step: int = 1
    """Widths are multiples of this."""
    epochs: int = 40
    batch_size: int = 32
    updates_per_epoch: int | None = None
    """None: one pass over the training examples."""
    symbols: bool = False
    """Whether each position of an example has a target of its own."""
    by_default: bool = True

    def host(self, seed: int, ratio: float = 1.0) -> nn.Module:
        """With first weights by the seed, and all hidden widths scaled to about `ratio` times the parameters."""
        width = self.width if ratio == 1.0 else self.wider(ratio)
        torch.manual_seed(seed)
        return self.build(width)

    def wider(self, ratio: float) -> int:
        wanted = ratio * count_parameters(self.build(self.width))
        widths = range(self.width, 6 * self.width, self.step)
        return min(widths, key=lambda width: abs(count_parameters(self.build(width)) - wanted))

    def updates(self, data: Data) -> int:
        """Of one epoch."""
        return self.updates_per_epoch or max(1, round(len(data.train[0]) / self.batch_size))


# -- tables: scikit-learn's own ----------------------------------------------------------------------------------------


def sklearn_table(name: str) -> Callable[[int, Sources], Data]:
    """3 of 10 examples are test examples, 2 validate, 5 train."""

    def read(seed: int, sources: Sources) -> Data:
        x, y = getattr(sklearn.datasets, f"load_{name}")(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(x))
        test, rest = np.split(order, [round(0.3 * len(x))])
        val, train = np.split(np.random.default_rng([seed, 1]).permutation(rest), [round(0.2 * len(x))])
        inputs = torch.from_numpy(x).float()
        mean, spread = inputs[train].mean(0), inputs[train].std(0)
        inputs = (inputs - mean) / torch.where(spread > 1e-6, spread, 1.0)
        targets = torch.from_numpy(y)
        if targets.is_floating_point():
            targets = ((targets - targets[train].mean()) / targets[train].std()).float()[:, None]
        return Data(*((inputs[rows], targets[rows]) for rows in (train, val, test)))

    return read


def layers(inputs: int, outputs: int) -> Callable[[int], nn.Module]:
    """Two hidden layers."""

    def build(width: int) -> nn.Module:
        hidden = [nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        return nn.Sequential(*hidden, nn.Linear(width, outputs))

    return build


# -- images ------------------------------------------------------------------------------------------------------------


def cifar_images(train: int, val: int, test: int, shrink: int = 1) -> Callable[[int, Sources], Data]:
    """`shrink` is the side of the squares of pixels that become one pixel, their mean."""

    def read(seed: int, sources: Sources) -> Data:
        try:
            folder = find_folder(sources.data_dir or None)
        except FileNotFoundError as error:
            raise AbsentError(str(error)) from error
        x, y = read_images(sorted(folder.glob("data_batch_*.bin")))
        test_x, test_y = read_images([folder / "test_batch.bin"])
        if len(x) < train + val or len(test_x) < test:
            raise AbsentError(
                f"{folder} has {len(x)} training and {len(test_x)} test images; {train + val} and {test} are needed"
            )
        order = np.random.default_rng([seed, 1]).permutation(train + val)
        parts = [*((x[rows], y[rows]) for rows in (order[:train], order[train:])), (test_x[:test], test_y[:test])]
        images = [F.avg_pool2d(torch.from_numpy(x).float() / 255.0, shrink) for x, _ in parts]
        mean, spread = images[0].mean((0, 2, 3), keepdim=True), images[0].std((0, 2, 3), keepdim=True)
        pairs = zip(images, parts, strict=True)
        return Data(*(((x - mean) / spread, torch.from_numpy(y)) for x, (_, y) in pairs))

    return read


def small_conv(width: int) -> nn.Module:
    stages = [(3, width), (width, 2 * width)]
    body = [m for a, b in stages for m in (nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU())]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10))


# -- text --------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def text_parts(path: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Symbols for training (8 of 10), validation (1) and test (1), in the order of the text."""
    if not Path(path).is_file():
        raise AbsentError(f"no text at {path!r}: name a file, such as tinyshakespeare.txt, with --text-file")
    symbols = np.minimum(np.frombuffer(Path(path).read_bytes(), np.uint8), ALPHABET - 1).astype(np.int64)
    eight, nine = len(symbols) * 8 // 10, len(symbols) * 9 // 10
    return symbols[:eight], symbols[eight:nine], symbols[nine:]


def windows(text: np.ndarray, count: int, length: int, rng: np.random.Generator) -> np.ndarray:
    starts = rng.integers(len(text) - length, size=count)
    return text[starts[:, None] + np.arange(length)]  # [count, length]


def next_symbols(train: int, val: int, test: int) -> Callable[[int, Sources], Data]:
    def read(seed: int, sources: Sources) -> Data:
        rngs = (np.random.default_rng([seed, 1]), np.random.default_rng([seed, 2]), np.random.default_rng(0))
        counts = (train, val, test)
        parts = zip(text_parts(sources.text_file), counts, rngs, strict=True)
        found = [torch.from_numpy(windows(text, count, LENGTH + 1, rng)) for text, count, rng in parts]
        return Data(*((part[:, :-1].clone(), part[:, 1:].clone()) for part in found))

    return read


def symbols_before(train: int, val: int, test: int) -> Callable[[int, Sources], Data]:
    """Which kind of character stands before a window: a vowel, another letter, a blank, or anything else."""
    kinds = torch.full((ALPHABET,), 3)
    kinds[[ord(letter) for letter in string.ascii_letters]] = 1
    kinds[[ord(letter) for letter in "aeiouAEIOU"]] = 0
    kinds[[ord(blank) for blank in string.whitespace]] = 2

    def read(seed: int, sources: Sources) -> Data:
        found = next_symbols(train, val, test)(seed, sources)
        return Data(*((after, kinds[x[:, 0]]) for x, after in found))

    return read


class GPTBlock(nn.Module):
    """Causal attention with two heads, and a hidden layer; both are added to what comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.hidden = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, h: Tensor) -> Tensor:
        parts = self.mix(self.norms[0](h)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)  # [3, N, 2, T, width / 2]
        seen = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        h = h + self.out(seen.transpose(1, 2).flatten(2))
        return h + self.hidden(self.norms[1](h))


class SmallGPT(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(ALPHABET, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList([GPTBlock(width) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, ALPHABET)
        for table in (self.embed, self.places):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, symbols: Tensor) -> Tensor:
        h = self.embed(symbols) + self.places.weight[: symbols.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))  # [N, T, ALPHABET]


class TextClassifier(nn.Module):
    """DistilBERT of transformers with random first weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        from transformers import DistilBertConfig, DistilBertForSequenceClassification  # noqa: PLC0415 - takes seconds

        sizes: dict[str, Any] = {"dim": width, "hidden_dim": 2 * width, "n_layers": 2, "n_heads": 2, "num_labels": 4}
        config = DistilBertConfig(vocab_size=ALPHABET, max_position_embeddings=LENGTH, **sizes)
        self.bert = DistilBertForSequenceClassification(config)

    def forward(self, symbols: Tensor) -> Tensor:
        return self.bert(symbols).logits  # [N, 4]


PROBLEMS: dict[str, Problem] = {
    "digits": Problem("handwritten digits, 64 → 8 → 8 → 10", sklearn_table("digits"), layers(64, 10), 8, batch_size=64),
    "breast cancer": Problem("breast cancer, 30 → 8 → 8 → 2", sklearn_table("breast_cancer"), layers(30, 2), 8),
    "wine": Problem("wine, 13 → 8 → 8 → 3", sklearn_table("wine"), layers(13, 3), 8),
    "diabetes": Problem("diabetes (regression), 10 → 8 → 8 → 1", sklearn_table("diabetes"), layers(10, 1), 8),
    "cifar10": Problem(
        "CIFAR-10: 1,000 training images of 16×16 pixels, two convolutions of 8 and 16 channels",
        cifar_images(1000, 300, 2000, shrink=2),
        small_conv,
        width=8,
        updates_per_epoch=12,
    ),
    "gpt": Problem(
        "tinyshakespeare, next character: a GPT of 2 blocks of width 24",
        next_symbols(8000, 96, 1000),
        SmallGPT,
        width=24,
        step=2,
        batch_size=16,
        updates_per_epoch=6,
        symbols=True,
    ),
    "distilbert": Problem(
        "tinyshakespeare, kind of the character before: DistilBERT of transformers, 2 blocks of width 24",
        symbols_before(8000, 256, 2000),
        TextClassifier,
        width=24,
        step=2,
        batch_size=16,
        updates_per_epoch=6,
    ),
    "cifar10-resnet20": Problem(
        "CIFAR-10, 45,000 training images, ResNet-20",
        cifar_images(45_000, 5_000, 10_000),
        resnet_20,
        width=16,
        epochs=100,
        batch_size=128,
        by_default=False,  # hours of a GPU
    ),
}

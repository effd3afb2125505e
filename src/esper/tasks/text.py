"""`text`: predict the next character of any UTF-8 file.

The text is cut into windows that do not overlap; the seed decides which window lies in which split, and a window that
occurs twice is kept once, so that no split contains a window of another.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from esper.config import special_kind
from esper.tasks.data import Split, Splits
from esper.tasks.hosts import GPTHost
from esper.tasks.registry import Task, task

CONTEXT = 64  # characters that the host sees
MOST_SYMBOLS = 256
UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # stands for every character beyond the commonest
VAL_FRACTION, TEST_FRACTION = 0.1, 0.1
MOST_HELD_OUT = 512  # windows; 32,768 characters estimate an accuracy to about a quarter of a point


def read_text(text_file: str | Path) -> str:
    path = Path(text_file).expanduser().resolve()
    if (kind := special_kind(path)) is not None:
        raise ValueError(f"the text file {path} cannot be read: it is {kind}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start} is invalid): convert it first") from None
    except OSError as error:
        raise FileNotFoundError(f"the text file {path} cannot be read ({error.strerror}): check its path") from None


def encode_text(text: str) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """The text as indices into its symbols, which are in order of their code points."""
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    known, counts = np.unique(codes, return_counts=True)
    if len(known) > MOST_SYMBOLS:
        commonest = np.argsort(-counts.astype(np.int64), kind="stable")[: MOST_SYMBOLS - 1]
        known = np.unique(np.append(known[commonest], np.uint32(ord(UNKNOWN))))
        codes = np.where(np.isin(codes, known), codes, np.uint32(ord(UNKNOWN)))
    symbols = tuple(chr(code) for code in known)
    return np.searchsorted(known, codes).astype(np.int64), symbols


def window_splits(indices: NDArray[np.int64], context: int, seed: int, source: str) -> Splits:
    """Windows of context + 1 symbols: all but the last are the input, all but the first the targets."""
    count = len(indices) // (context + 1)
    windows = np.unique(indices[: count * (context + 1)].reshape(count, context + 1), axis=0)
    if len(windows) < 10:
        raise ValueError(
            f"{source} has {len(indices)} characters, which give {len(windows)} different windows of {context + 1}: "
            f"at least 10 are needed, so use a longer text"
        )
    windows = windows[np.random.default_rng(seed).permutation(len(windows))]
    val = min(MOST_HELD_OUT, max(1, round(VAL_FRACTION * len(windows))))
    test = min(MOST_HELD_OUT, max(1, round(TEST_FRACTION * len(windows))))
    parts = np.split(windows, (val, val + test))
    chosen = [torch.from_numpy(part) for part in (parts[2], parts[0], parts[1])]
    return Splits(*(Split(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in chosen))


def language_task(name: str, description: str, text: str, seed: int, source: str, host: dict[str, int]) -> Task:
    """A task of predicting the next character of `text` for a GPT host of the given sizes."""
    indices, symbols = encode_text(text)
    return Task(
        name=name,
        description=description,
        splits=window_splits(indices, host["context"], seed, source),
        make_host=partial(GPTHost, vocabulary=len(symbols), dropout=0.0, **host),
        slots=tuple(f"blocks.{i}" for i in range(host["layers"])),
        labels=symbols,
        batch_size=32,
        updates_per_epoch=25,
        learning_rate=5e-3,
        weight_decay=1e-2,
        visibility="causal",
    )


@task("text")
def text(
    seed: int,
    *,
    text_file: str | Path | None = None,
    context: int = CONTEXT,
    width: int = 32,
    heads: int = 2,
    layers: int = 3,
) -> Task:
    """The next character of any UTF-8 file, transformer host."""
    if text_file is None:
        raise ValueError("task 'text' needs a file to learn from: name one with --text-file (any UTF-8 text)")
    sizes = {"context": context, "width": width, "heads": heads, "layers": layers}
    path = Path(text_file)
    return language_task("text", f"the next character of {path.name}", read_text(path), seed, str(path), sizes)

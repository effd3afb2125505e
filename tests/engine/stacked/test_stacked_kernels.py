"""The Triton kernels against the same in plain torch: values and gradients, for networks of different sizes at once.

On a GPU they are compiled. `TRITON_INTERPRET=1 python -m pytest tests/engine/stacked/test_stacked_kernels.py` has them
interpreted on a CPU, where triton is installed: slow, but enough to find a wrong index.

Covers: R143
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from esper.engine.stacked import adamw, functions
from esper.engine.stacked.blueprints import Place
from esper.growth.blueprints import Layout

ON_GPU = torch.cuda.is_available()
if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton, which comes with torch for CUDA", allow_module_level=True)
if not ON_GPU and os.environ.get("TRITON_INTERPRET") != "1":  # read when triton is imported: too late here
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from esper.engine.stacked import kernels  # noqa: E402

DEVICE = "cuda" if ON_GPU else "cpu"
WIDTHS, BATCH, CHANNELS = (6, 3, 5), 5, 6
EXTENTS: dict[Layout, list[list[int]]] = {
    "dense": [[], [], []],
    "sequence": [[7], [4], [6]],
    "conv1d": [[9], [5], [7]],
    "conv2d": [[4, 5], [3, 3], [2, 5]],
}
LAYOUTS: tuple[Layout, ...] = ("dense", "sequence", "conv1d", "conv2d")
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
"""float32 sums in another order; a norm over few channels of one position divides by small deviations."""


def place_of(layout: Layout) -> Place:
    extents = torch.tensor(EXTENTS[layout], dtype=torch.int64, device=DEVICE).view(len(WIDTHS), -1)
    sizes = tuple(extents.max(0).values.tolist())
    return Place(layout, torch.tensor(WIDTHS, device=DEVICE), CHANNELS, extents, sizes, torch.float32)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def true_channels() -> Tensor:
    """[V, channels]"""
    return (torch.arange(CHANNELS) < torch.tensor(WIDTHS)[:, None]).to(DEVICE, torch.float32)


def activations(place: Place, *, beyond: bool = False) -> Tensor:
    """[V, *sizes, batch, channels], zero beyond true channels, and, unless `beyond`, beyond true positions."""
    x = drawn(len(WIDTHS), *place.sizes, BATCH, CHANNELS)
    x = x * functions.spread(true_channels(), x)
    valid = place.valid()
    return x if valid is None or beyond else x * valid


def affine() -> tuple[Tensor, Tensor]:
    true = true_channels()
    return drawn(len(WIDTHS), CHANNELS, seed=1) * true, drawn(len(WIDTHS), CHANNELS, seed=2) * true


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Asserts that a function of some tensors has the same values and gradients with the kernels and without."""

    def results(function: Callable[..., Tensor | tuple[Tensor, ...]], given: tuple[Tensor, ...]) -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in given]
        found = function(*leaves)
        outputs = found if isinstance(found, tuple) else (found,)
        (outputs[0] * drawn(*outputs[0].shape, seed=3)).sum().backward()  # type: ignore[no-untyped-call]
        gradients = [leaf.grad for leaf in leaves]
        # Weights of padded channels are never trained, so what their gradients are does not matter.
        true = true_channels()
        kept = [g * true if g is not None and g.shape == true.shape else g for g in gradients]
        return [*(one.detach() for one in outputs), *(g for g in kept if g is not None)]

    def check(function: Callable[..., Tensor | tuple[Tensor, ...]], *given: Tensor) -> None:
        monkeypatch.setattr(functions, "kernels_for", lambda x: None)
        expected = results(function, given)
        monkeypatch.setattr(functions, "kernels_for", lambda x: kernels)
        for fast, plain in zip(results(function, given), expected, strict=True):
            assert_close(fast, plain, **CLOSE)

    return check


@pytest.mark.parametrize("layout", LAYOUTS)
def test_norms_of_positions(compare: Callable[..., None], layout: Layout) -> None:
    place = place_of(layout)
    extent, x = place.of_positions(), activations(place)
    compare(lambda x, w, b: functions.Norm.apply(x, w, b, extent, False, False), x, *affine())
    compare(lambda x: functions.Norm.apply(x, None, None, extent, False, False), x)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("layout", ["conv1d", "conv2d"])
def test_norms_of_examples_and_batches(compare: Callable[..., None], layout: Layout, relu: bool) -> None:
    place = place_of(layout)
    examples, batches = place.of_examples(place.channels, CHANNELS), place.of_batches()
    x = activations(place, beyond=True)  # filters reach beyond true positions
    compare(lambda x, w, b: functions.Norm.apply(x, w, b, examples, True, relu), x, *affine())
    compare(lambda x, w, b: functions.BatchNorm.apply(x, w, b, batches, relu), activations(place), *affine())


@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("layout", ["conv1d", "conv2d"])
def test_patches_and_filters(compare: Callable[..., None], layout: Layout, kernel: int) -> None:
    place = place_of(layout)
    taps = drawn(len(WIDTHS), CHANNELS, kernel ** len(place.sizes), seed=1)
    compare(lambda x: functions.Patches.apply(x, kernel), activations(place))
    compare(lambda x, w: functions.DepthwiseConv.apply(x, w, kernel), activations(place), taps)


def test_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three updates of two networks; the second makes two, and has padding."""
    course = adamw.Course(
        rate=torch.tensor([1e-2, 2e-2], dtype=torch.float64, device=DEVICE),
        weight_decay=torch.tensor([1e-3, 1e-3], dtype=torch.float64, device=DEVICE),
        updates=torch.tensor([3, 2], device=DEVICE),
        total=torch.tensor([30, 20], device=DEVICE),
        made=torch.tensor([0, 4], device=DEVICE),
    )
    real = torch.ones(2, 1500, dtype=torch.bool, device=DEVICE)
    real[1, 1400:] = False

    def trained(found: ModuleType | None) -> list[Tensor]:
        monkeypatch.setattr(adamw, "kernels_for", lambda x: found)
        moments = adamw.Moments.of(drawn(2, 1500) * real)
        young = torch.ones(2, dtype=torch.bool, device=DEVICE)
        table = adamw.rate_table(course, moments.steps, young, 3, torch.float32)
        updates = adamw.EpochUpdates(moments, table, course.updates, real, same=False)
        for number in range(3):
            updates.step(drawn(2, 1500, seed=number), torch.tensor([number], device=DEVICE))
        return [updates.finish().values, updates.gradient]

    for fast, plain in zip(trained(kernels), trained(None), strict=True):
        assert_close(fast, plain, rtol=1e-5, atol=1e-6)

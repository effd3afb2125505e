"""Packages that some sinks need and most people do not: named, with the way to get them, when they are missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class PackageMissingError(ImportError):
    """An optional package is not installed."""


def optional(module: str, name: str, extra: str) -> Any:
    """The module, for `name` as people call it; `extra` is the optional dependency of Esper that brings it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise PackageMissingError(f"{name} is not installed: pip install 'esper[{extra}]'") from error


def tensorboard() -> Any:
    return optional("torch.utils.tensorboard", "TensorBoard", "tensorboard")


def wandb() -> Any:
    return optional("wandb", "Weights & Biases", "wandb")

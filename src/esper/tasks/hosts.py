"""The built-in hosts: plain networks without code for growth.

This file imports torch alone, because its source travels with an exported model. Each host keeps its constructor's
keyword arguments (plain JSON data) in `config`, and is a chain of stages, each called exactly once per forward pass;
a slot is the output of a stage. Pooling lies between the stages, so a slot sees its stage at full resolution.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class MLPHost(nn.Module):
    """Stages of linear → ReLU, then a linear head. Input [batch, …] is flattened."""

    layout = "dense"

    def __init__(self, in_features: int, widths: list[int], classes: int) -> None:
        super().__init__()
        self.config: dict[str, object] = {"in_features": in_features, "widths": list(widths), "classes": classes}
        if not widths:
            raise ValueError("MLPHost needs at least one width, because its stages carry the slots; got none")
        inputs = [in_features, *widths]
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Linear(inputs[i], width), nn.ReLU()) for i, width in enumerate(widths)
        )
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)  # [batch, in_features]
        for stage in self.stages:
            x = stage(x)  # [batch, width]
        logits: torch.Tensor = self.head(x)
        return logits  # [batch, classes]


class ConvHost(nn.Module):
    """Stages of convolution → batch norm → ReLU with pooling between them, then a global mean and a linear head.

    `pools[i]` is the factor by which the output of stage i is pooled (1: not at all); by default 2 after every stage
    but the last. `norm=False` and `activation=False` build hosts with a fault that growth can repair.
    """

    layout: str
    convolution: type[nn.Conv1d] | type[nn.Conv2d]
    normalisation: type[nn.BatchNorm1d] | type[nn.BatchNorm2d]

    def __init__(
        self,
        in_channels: int,
        widths: list[int],
        kernels: list[int],
        classes: int,
        pools: list[int] | None = None,
        pooling: str = "max",
        norm: bool = True,
        activation: bool = True,
    ) -> None:
        super().__init__()
        pools = [2] * (len(widths) - 1) + [1] if pools is None else list(pools)
        name = type(self).__name__
        if not widths or not len(widths) == len(kernels) == len(pools):
            raise ValueError(
                f"{name} needs one kernel and one pool per width and at least one of each; "
                f"got widths {list(widths)}, kernels {list(kernels)}, pools {pools}"
            )
        if any(kernel % 2 == 0 for kernel in kernels):
            raise ValueError(f"{name} needs odd kernels, so that a stage keeps the resolution; got {list(kernels)}")
        if pooling not in ("max", "average"):
            raise ValueError(f"{name} pools by 'max' or 'average'; got {pooling!r}")
        self.config: dict[str, object] = {
            "in_channels": in_channels,
            "widths": list(widths),
            "kernels": list(kernels),
            "classes": classes,
            "pools": pools,
            "pooling": pooling,
            "norm": norm,
            "activation": activation,
        }
        self.pools = pools
        self.pooling = pooling
        inputs = [in_channels, *widths]
        self.stages = nn.ModuleList(
            self._stage(inputs[i], width, kernel, norm, activation)
            for i, (width, kernel) in enumerate(zip(widths, kernels, strict=True))
        )
        self.head = nn.Linear(widths[-1], classes)

    def _stage(self, inputs: int, width: int, kernel: int, norm: bool, activation: bool) -> nn.Sequential:
        # A bias before batch norm would be subtracted again.
        stage = nn.Sequential(self.convolution(inputs, width, kernel, padding=kernel // 2, bias=not norm))
        if norm:
            stage.append(self.normalisation(width))
        if activation:
            stage.append(nn.ReLU())
        return stage

    def pool(self, x: torch.Tensor, factor: int) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage, factor in zip(self.stages, self.pools, strict=True):
            x = stage(x)  # [batch, width, …]
            if factor > 1:
                x = self.pool(x, factor)
        logits: torch.Tensor = self.head(x.flatten(2).mean(2))
        return logits  # [batch, classes]


class Conv1dHost(ConvHost):
    """The convolutional host for series [batch, channels, length]."""

    layout = "conv1d"
    convolution = nn.Conv1d
    normalisation = nn.BatchNorm1d

    def pool(self, x: torch.Tensor, factor: int) -> torch.Tensor:
        return F.max_pool1d(x, factor) if self.pooling == "max" else F.avg_pool1d(x, factor)


class Conv2dHost(ConvHost):
    """The convolutional host for images [batch, channels, height, width]."""

    layout = "conv2d"
    convolution = nn.Conv2d
    normalisation = nn.BatchNorm2d

    def pool(self, x: torch.Tensor, factor: int) -> torch.Tensor:
        return F.max_pool2d(x, factor) if self.pooling == "max" else F.avg_pool2d(x, factor)


class GPTBlock(nn.Module):
    """Pre-norm causal attention, then a pre-norm MLP, each added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.residual_dropout = nn.Dropout(dropout)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, time, width / heads]
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        projected: torch.Tensor = self.projection(mixed.transpose(1, 2).reshape(batch, time, width))
        return projected

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.residual_dropout(self.attend(self.attention_norm(x)))
        output: torch.Tensor = x + self.residual_dropout(self.mlp(self.mlp_norm(x)))
        return output  # [batch, time, width]


class GPTHost(nn.Module):
    """A small GPT for symbols [batch, time ≤ context]; the embedding is also the output matrix."""

    layout = "sequence"

    def __init__(
        self, vocabulary: int, context: int, width: int, heads: int, layers: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if width % heads or layers < 1:
            raise ValueError(
                f"GPTHost needs a width that is a multiple of its heads, and at least one layer; "
                f"got width {width}, heads {heads}, layers {layers}"
            )
        self.config: dict[str, object] = {
            "vocabulary": vocabulary,
            "context": context,
            "width": width,
            "heads": heads,
            "layers": layers,
            "dropout": dropout,
        }
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.empty(context, width))
        self.input_dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(GPTBlock(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self._initialise(layers)

    def _initialise(self, layers: int) -> None:
        """GPT-2's initialisation: small weights, and residual branches that keep the variance independent of depth."""
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.02)
        for name, parameter in self.blocks.named_parameters():
            if name.endswith("weight") and parameter.dim() == 2:
                residual = name.endswith(("projection.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.input_dropout(self.embedding(x) + self.positions[: x.shape[1]])
        for block in self.blocks:
            hidden = block(hidden)  # [batch, time, width]
        # A functional product, so that the tied matrix is one parameter with one name.
        return F.linear(self.norm(hidden), self.embedding.weight)  # [batch, time, vocabulary]

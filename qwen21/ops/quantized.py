"""Layers whose weights stay quantized. Each use dequantizes the weight, unless the format multiplies its codes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .formats import PackedWeight


class _Quantized(nn.Module):
    """A layer with a quantized weight, whose tensors are the layer's own: `weight` and what the format has beside it.

    What is stored in files is in the state dict; a rotation, which follows from the format, is not.
    """

    def __init__(self, packed: PackedWeight) -> None:
        super().__init__()
        self._empty = packed.replaced({"weight": None})
        self._names = tuple(packed.tensors)
        for name, tensor in packed.tensors.items():
            if name == "weight":
                self.weight = nn.Parameter(tensor, requires_grad=False)
            else:
                self.register_buffer(name, tensor, persistent=name != "rotation")

    @property
    def packed(self) -> PackedWeight:
        """The weight in the tensors that this layer has now."""
        return self._empty.replaced({name: getattr(self, name) for name in self._names})

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The whole dequantized weight, computed at each call."""
        return self.packed.dequantized(dtype)


class QuantLinear(_Quantized):
    """A linear layer with a quantized weight [rows, columns]."""

    def __init__(self, packed: PackedWeight, bias: Tensor | None = None) -> None:
        super().__init__(packed)
        self.out_features, self.in_features = packed.shape
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output [..., rows] for x [..., columns], in the dtype of x."""
        return self.packed.matmul(x, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.weight.dtype}"


class QuantEmbedding(_Quantized):
    """An embedding with a quantized table. Only the rows that are looked up are dequantized."""

    def forward(self, ids: Tensor) -> Tensor:
        """Embeddings [..., width], fp32, of `ids` [...]."""
        return self.packed.rows_at(ids)


@dataclass(frozen=True)
class QuantLayers:
    """The classes of quantized layers; a host may pass its own subclasses."""

    linear: type[QuantLinear] = QuantLinear
    embedding: type[QuantEmbedding] = QuantEmbedding

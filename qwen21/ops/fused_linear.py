"""Fused linear layers: layers that read the same input (q, k and v; gate and value of the MLP) become one product.

The weights become one tensor, and the layers' own weights become views of it: nothing is held twice, and each layer
still has its weight. Where the GPU multiplies in FP8, the kernel before a product quantizes its input, once for all
layers that read it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .formats import Fp8Weight
from .formats.fp8 import E4M3, Fp8Rows, column_scales, fp8_product, has_fp8_matmul, quantize_rows
from .linear import linear
from .quantized import QuantLinear


class FusedLinear:
    """The product [..., out] of x [..., in] and a transposed weight [out, in]."""

    fp8 = False  # whether the input must be `Fp8Rows`

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class QuantizedLinear(FusedLinear):
    """The product of x [..., in] and a transposed quantized weight [out, in]."""

    def __init__(self, packed: Fp8Weight) -> None:
        self.packed = packed

    def __call__(self, x: Tensor) -> Tensor:
        return self.packed.matmul(x)


class Fp8Linear(FusedLinear):
    """The product of quantized rows [..., in] and a transposed E4M3 weight [out, in]."""

    fp8 = True

    def __init__(self, packed: Fp8Weight) -> None:
        self.packed = packed
        self.scales = column_scales(packed.data, packed.scale)

    def __call__(self, x: Fp8Rows) -> Tensor:
        product = fp8_product(x, self.packed.data, self.scales)
        return linear(x.values(), self.packed.scaled(x.dtype)) if product is None else product


@torch.no_grad()
def fused(layers: Sequence[nn.Module], dtype: torch.dtype, fp8: bool | None = None) -> FusedLinear | None:
    """One product for all of `layers`, whose result is their concatenated outputs [..., sum of out], for inputs of
    `dtype`; None where the layers cannot be fused."""
    if any(layer._forward_hooks or layer.bias is not None for layer in layers):
        return None
    if all(isinstance(layer, nn.Linear) and not isinstance(layer, QuantLinear) for layer in layers):
        return FusedLinear(_concatenated(layers, "weight"))
    if all(isinstance(layer, QuantLinear) and layer.weight.dtype == E4M3 for layer in layers):
        for layer in layers:
            if layer.weight_scale is None:
                layer.weight_scale = torch.ones(1, 1, device=layer.weight.device)
            layer.weight_scale = layer.weight_scale.expand(len(layer.weight), 1)
        packed = Fp8Weight(_concatenated(layers, "weight"), _concatenated(layers, "weight_scale"))
        return (
            Fp8Linear(packed) if (_multiplies(packed.data, dtype) if fp8 is None else fp8) else QuantizedLinear(packed)
        )
    return None


def _multiplies(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether the device multiplies `weight` in FP8, found by trying."""
    x = torch.zeros(16, weight.shape[1], dtype=dtype, device=weight.device)
    if not has_fp8_matmul(x, weight):
        return False
    rows = Fp8Rows(*quantize_rows(x), x.shape, dtype)
    return fp8_product(rows, weight, column_scales(weight, None)) is not None


def _concatenated(layers: Sequence[nn.Module], name: str) -> Tensor:
    """The layers' tensors `name` concatenated; the layers' own tensors become views of the result."""
    parts = [getattr(layer, name) for layer in layers]
    if len(parts) == 1:
        return parts[0].detach()
    whole = torch.cat([part.detach() for part in parts])
    for layer, part, view in zip(layers, parts, whole.split([len(part) for part in parts]), strict=True):
        setattr(layer, name, nn.Parameter(view, requires_grad=False) if isinstance(part, nn.Parameter) else view)
    return whole

"""Linear layers that read the same input as one product: q, k and v; gate and value of the MLP.

Their weights become one tensor, and the layers' own weights views of it: nothing is held twice, and whoever looks at a
layer finds it as it was. Where the GPU multiplies in FP8, the blocks' products take their input quantized by the kernel
before them, once for all layers that read it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .linear import linear
from .quantized import (
    E4M3,
    Fp8Rows,
    QuantizedWeight,
    QuantLinear,
    column_scales,
    fp8_product,
    has_fp8_matmul,
    quantize_rows,
    quantized_linear,
    scaled,
)


class FusedLinear:
    """x [..., in] times a transposed weight [out, in] -> [..., out]."""

    fp8 = False  # whether it takes its input as `Fp8Rows`

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class QuantizedLinear(FusedLinear):
    """Of a quantized weight."""

    def __init__(self, packed: QuantizedWeight) -> None:
        self.packed = packed

    def __call__(self, x: Tensor) -> Tensor:
        return quantized_linear(x, self.packed)


class Fp8Linear(FusedLinear):
    """Of an E4M3 weight with rows that are quantized already."""

    fp8 = True

    def __init__(self, packed: QuantizedWeight) -> None:
        self.packed = packed
        self.scales = column_scales(packed.data, packed.scale)

    def __call__(self, x: Fp8Rows) -> Tensor:
        linear_product = fp8_product(x, self.packed.data, self.scales)
        return linear(x.values(), scaled(self.packed, x.dtype)) if linear_product is None else linear_product


@torch.no_grad()
def fused(layers: Sequence[nn.Module], dtype: torch.dtype, fp8: bool | None = None) -> FusedLinear | None:
    """The layers' outputs beside each other [..., sum of out], for inputs of `dtype`; None where there is no such
    product."""
    if any(layer._forward_hooks or layer.bias is not None for layer in layers):
        return None
    if all(isinstance(layer, nn.Linear) and not isinstance(layer, QuantLinear) for layer in layers):
        return FusedLinear(_concatenated(layers, "weight"))
    if all(isinstance(layer, QuantLinear) and layer.weight.dtype == E4M3 for layer in layers):
        for layer in layers:
            if layer.weight_scale is None:
                layer.weight_scale = torch.ones(1, 1, device=layer.weight.device)
            layer.weight_scale = layer.weight_scale.expand(len(layer.weight), 1)
        packed = QuantizedWeight(_concatenated(layers, "weight"), _concatenated(layers, "weight_scale"))
        return (
            Fp8Linear(packed) if (_multiplies(packed.data, dtype) if fp8 is None else fp8) else QuantizedLinear(packed)
        )
    return None


def _multiplies(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether the device multiplies this weight in FP8, by trying."""
    x = torch.zeros(16, weight.shape[1], dtype=dtype, device=weight.device)
    if not has_fp8_matmul(x, weight):
        return False
    rows = Fp8Rows(*quantize_rows(x), x.shape, dtype)
    return fp8_product(rows, weight, column_scales(weight, None)) is not None


def _concatenated(layers: Sequence[nn.Module], name: str) -> Tensor:
    """The layers' tensors of that name as one, of which theirs become views."""
    parts = [getattr(layer, name) for layer in layers]
    if len(parts) == 1:
        return parts[0].detach()
    whole = torch.cat([part.detach() for part in parts])
    for layer, part, view in zip(layers, parts, whole.split([len(part) for part in parts]), strict=True):
        setattr(layer, name, nn.Parameter(view, requires_grad=False) if isinstance(part, nn.Parameter) else view)
    return whole

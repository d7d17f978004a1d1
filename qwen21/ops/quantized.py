"""Layers whose weights stay quantized: int8 with or without rotation, and fp8. A weight is rebuilt at each use.

Rotated weights are W R for a block-diagonal orthonormal R that is its own inverse, so x Wt = (x R) (W R)t. The layer
rotates the activation: exact as rotating the weight back, and cheaper, for it costs one group per token and channel
instead of one per weight, and a layer has more rows than a prompt has tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .linear import linear

E4M3 = torch.float8_e4m3fn
GROUPS = (4, 16, 64, 256, 1024, 4096)  # sizes of a rotated group: powers of four
E4M3_MAX = 448.0
COPY_BYTES = 2**26  # of fp32, while activations are quantized


@dataclass(frozen=True)
class QuantizedWeight:
    """A quantized weight: data [rows, columns], scale fp32 [rows, 1] or [1, 1] or None, group size of its rotation."""

    data: Tensor
    scale: Tensor | None = None
    group: int = 0


# --- numbers -------------------------------------------------------------------------------------------------------


def hadamard(group: int) -> Tensor:
    """The rotation of one group [group, group], fp32: a Kronecker power, symmetric and its own inverse.

    Source: ConvRot, as comfy-kitchen packs it. Its entries are powers of two, exact in bf16.
    """
    if group not in GROUPS:
        raise ValueError(f"group is {group}, expected a power of 4")
    base = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]) / 2
    result = base
    while len(result) < group:
        result = torch.kron(result, base)
    return result


def hadamard_rotate(x: Tensor, matrix: Tensor) -> Tensor:
    """x [..., n * group] with each group of its last axis rotated, in the dtype of x."""
    return (x.unflatten(-1, (-1, len(matrix))) @ matrix.to(x)).flatten(-2)


def scaled(packed: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """The weight [rows, columns] in its rotated basis: scaled in fp32, rounded once."""
    values = packed.data.to(dtype)  # exact: int8 and fp8 values are values of bf16, too
    if packed.scale is None:
        return values
    return values.mul_(packed.scale.reshape(-1, *(1,) * (values.ndim - 1)))


def dequantized(packed: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight [rows, columns] as it was before quantization, but for what that lost."""
    weight = scaled(packed, torch.float32)
    if packed.group:
        weight = hadamard_rotate(weight, hadamard(packed.group).to(weight.device))
    return weight.to(dtype)


def fp8_scales(x: Tensor) -> Tensor:
    """fp32 scales [rows, 1] that bring the largest value of each row of x [rows, columns] to E4M3's largest.

    NaN and infinities end in the scale. Rows of zeros get the smallest scale instead of 0, and stay zeros.
    """
    largest = torch.maximum(x.amax(1, keepdim=True), -x.amin(1, keepdim=True))  # no copy of x, as its abs would be
    return (largest.float() / E4M3_MAX).clamp_min(torch.finfo(torch.float32).tiny)


def to_e4m3_range_(x: Tensor, scale: Tensor) -> Tensor:
    """fp32 x over its scale, in place, ready to be cast."""
    return x.div_(scale).clamp_(-E4M3_MAX, E4M3_MAX)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 [rows, columns] of x [rows, columns], and a scale per row."""
    scale = fp8_scales(x)
    return to_e4m3_range_(x.to(torch.float32, copy=True), scale).to(E4M3), scale


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_rows`, some rows after others: an fp32 copy of all would be the largest tensor of a step."""
    rows = max(1, COPY_BYTES // (torch.float32.itemsize * x.shape[1]))
    if len(x) <= rows:
        return quantize_rows(x)
    codes, scales = x.new_empty(x.shape, dtype=E4M3), x.new_empty(len(x), 1, dtype=torch.float32)
    for part in zip(x.split(rows), codes.split(rows), scales.split(rows), strict=True):
        for kept, made in zip(part[1:], quantize_rows(part[0]), strict=True):
            kept.copy_(made)
    return codes, scales


class Fp8Rows(NamedTuple):
    """An activation [..., columns] quantized by token: E4M3 codes [rows, columns] and fp32 scales [rows, 1]."""

    codes: Tensor
    scales: Tensor
    shape: torch.Size  # of what was quantized
    dtype: torch.dtype

    def values(self) -> Tensor:
        """What the codes stand for [..., columns]."""
        return scaled(QuantizedWeight(self.codes, self.scales), self.dtype).view(self.shape)


def has_fp8_matmul(x: Tensor, weight: Tensor) -> bool:
    """Whether the GPU's tensor cores multiply these in FP8: bf16 activations, E4M3 weights, NVIDIA from 8.9 on."""
    return (
        x.device.type == "cuda"
        and torch.version.cuda is not None
        and x.dtype == torch.bfloat16
        and weight.dtype == E4M3
        and x.numel() > 0
        and all(size % 16 == 0 for size in weight.shape)
        and not (torch.is_grad_enabled() and x.requires_grad)
        and torch.cuda.get_device_capability(x.device) >= (8, 9)
    )


def fp8_matmul(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor | None:
    """x [..., columns] times the transposed E4M3 weight [rows, columns], x quantized by token.

    None where this PyTorch has no product with a scale per row for this GPU.
    """
    rows = Fp8Rows(*quantize_activations(x.reshape(-1, x.shape[-1])), x.shape, x.dtype)
    return fp8_product(rows, weight, column_scales(weight, scale))


def column_scales(weight: Tensor, scale: Tensor | None) -> Tensor:
    """A weight's scale, or none, as the product takes it: [1, rows], for by rows on one side means so on both."""
    scale = torch.ones(1, 1, device=weight.device) if scale is None else scale
    return scale.reshape(1, -1).expand(1, len(weight)).contiguous()


def fp8_product(x: Fp8Rows, weight: Tensor, scales: Tensor) -> Tensor | None:
    """`fp8_matmul` of what is quantized already, and scales as `column_scales` gives them."""
    try:
        product = torch._scaled_mm(x.codes, weight.t(), scale_a=x.scales, scale_b=scales, out_dtype=x.dtype)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return None
    return product.unflatten(0, x.shape[:-1])


def quantized_linear(
    x: Tensor, packed: QuantizedWeight, bias: Tensor | None = None, rotation: Tensor | None = None
) -> Tensor:
    """x [..., columns] times the transposed weight -> [..., rows], in the dtype of x, all on its device.

    `rotation` is the matrix of a rotated weight's group, None for others.
    """
    bias = None if bias is None else bias.to(x.dtype)
    if rotation is not None:
        x = hadamard_rotate(x, rotation)
    elif has_fp8_matmul(x, packed.data):
        product = fp8_matmul(x, packed.data, packed.scale)
        if product is not None:
            return product if bias is None else product + bias
    return linear(x, scaled(packed, x.dtype), bias)


def quantized_rows_of(ids: Tensor, packed: QuantizedWeight, rotation: Tensor | None = None) -> Tensor:
    """The rows of a table [entries, width] that ids [...] name -> [..., width], fp32."""
    rows = F.embedding(ids, packed.data).float()
    if packed.scale is not None:
        rows *= F.embedding(ids, packed.scale) if len(packed.scale) > 1 else packed.scale
    return rows if rotation is None else hadamard_rotate(rows, rotation)


# --- layers --------------------------------------------------------------------------------------------------------


class _Quantized(nn.Module):
    """Holds a packed weight; its `weight` and `weight_scale` are as in the file."""

    def __init__(self, packed: QuantizedWeight, rotation: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(packed.data, requires_grad=False)
        self.register_buffer("weight_scale", packed.scale)
        if packed.group and rotation is None:
            rotation = hadamard(packed.group).to(packed.data.device, torch.bfloat16)
        self.register_buffer("rotation", rotation if packed.group else None, persistent=False)

    @property
    def packed(self) -> QuantizedWeight:
        return QuantizedWeight(self.weight, self.weight_scale, 0 if self.rotation is None else len(self.rotation))

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The whole weight, for those who must see it. Not kept."""
        return dequantized(self.packed, dtype)


class QuantLinear(_Quantized):
    """A linear layer over a quantized weight [rows, columns]. Layers may share a `rotation`, bf16 [group, group]."""

    def __init__(self, packed: QuantizedWeight, bias: Tensor | None = None, rotation: Tensor | None = None) -> None:
        super().__init__(packed, rotation)
        self.out_features, self.in_features = packed.data.shape
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., columns] -> [..., rows], in the dtype of x."""
        return quantized_linear(x, self.packed, self.bias, self.rotation)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.weight.dtype}"


class QuantEmbedding(_Quantized):
    """An embedding over a quantized table. Rows that are looked up are dequantized, the table never is."""

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] -> [..., width], fp32."""
        return quantized_rows_of(ids, self.packed, self.rotation)


@dataclass(frozen=True)
class QuantLayers:
    """The classes of quantized layers: a host may want some of its own, derived from these."""

    linear: type[QuantLinear] = QuantLinear
    embedding: type[QuantEmbedding] = QuantEmbedding

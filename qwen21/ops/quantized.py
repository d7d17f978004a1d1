"""Layers whose weights stay quantized: int8 with or without Hadamard rotation, and fp8. Each use rebuilds the weight.

Rotated weights are W R for a block-diagonal orthonormal R that is its own inverse, so x Wt = (x R) (W R)t. The layer
rotates the activation instead of the weight: that is as exact, and cheaper, because it costs one group per token and
channel instead of one per weight, and a layer has more rows than a prompt has tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .linear import linear

E4M3 = torch.float8_e4m3fn
GROUPS = (4, 16, 64, 256, 1024, 4096)  # sizes of a group of rotated channels: powers of four
E4M3_MAX = 448.0
COPY_BYTES = 2**26  # limit of the fp32 copy while activations are quantized


@dataclass(frozen=True)
class QuantizedWeight:
    """A quantized weight: data [rows, columns], scale fp32 [rows, 1] or [1, 1] or None, and the group size of its
    Hadamard rotation, 0 without one."""

    data: Tensor
    scale: Tensor | None = None
    group: int = 0


# --- numbers -------------------------------------------------------------------------------------------------------


def hadamard(group: int) -> Tensor:
    """The Hadamard rotation of one group [group, group], fp32: a Kronecker power, symmetric and its own inverse.

    Source: ConvRot, as comfy-kitchen packs it. The entries are powers of two, exact in bf16.
    """
    if group not in GROUPS:
        raise ValueError(f"group is {group}, expected a power of 4")
    base = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]) / 2
    result = base
    while len(result) < group:
        result = torch.kron(result, base)
    return result


def hadamard_rotate(x: Tensor, matrix: Tensor) -> Tensor:
    """x [..., n * group] with each group of its last axis rotated by `matrix` [group, group], in the dtype of x."""
    return (x.unflatten(-1, (-1, len(matrix))) @ matrix.to(x)).flatten(-2)


def scaled(packed: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """The weight [rows, columns] in `dtype`, still rotated: scaled in fp32, rounded once."""
    values = packed.data.to(dtype)  # exact, because bf16 holds all int8 and fp8 values
    if packed.scale is None:
        return values
    return values.mul_(packed.scale.reshape(-1, *(1,) * (values.ndim - 1)))


def dequantized(packed: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight [rows, columns] in `dtype`, scaled and rotated back."""
    weight = scaled(packed, torch.float32)
    if packed.group:
        weight = hadamard_rotate(weight, hadamard(packed.group).to(weight.device))
    return weight.to(dtype)


def fp8_scales(x: Tensor) -> Tensor:
    """fp32 scales [rows, 1] that map the largest magnitude in each row of x [rows, columns] to E4M3's largest value.

    NaN and infinity pass into the scale. Rows of zeros get the smallest scale instead of 0, and stay zeros.
    """
    largest = torch.maximum(x.amax(1, keepdim=True), -x.amin(1, keepdim=True))  # without the copy that `abs` makes
    return (largest.float() / E4M3_MAX).clamp_min(torch.finfo(torch.float32).tiny)


def to_e4m3_range_(x: Tensor, scale: Tensor) -> Tensor:
    """fp32 x divided by its scale and clamped to E4M3's range, in place."""
    return x.div_(scale).clamp_(-E4M3_MAX, E4M3_MAX)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 codes [rows, columns] of x [rows, columns], and fp32 scales [rows, 1]."""
    scale = fp8_scales(x)
    return to_e4m3_range_(x.to(torch.float32, copy=True), scale).to(E4M3), scale


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_rows(x)` in parts, because an fp32 copy of all rows would be the largest tensor of a step."""
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
    shape: torch.Size  # of the activation
    dtype: torch.dtype  # of the activation

    def values(self) -> Tensor:
        """The dequantized activation [..., columns]."""
        return scaled(QuantizedWeight(self.codes, self.scales), self.dtype).view(self.shape)


def has_fp8_matmul(x: Tensor, weight: Tensor) -> bool:
    """Whether the GPU multiplies x and weight in FP8: bf16 activations, E4M3 weights, NVIDIA from compute capability
    8.9 on."""
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
    """The product [..., rows] of x [..., columns], quantized by token, and the transposed E4M3 weight [rows, columns].

    None where this PyTorch has no product with a scale per row for this GPU.
    """
    rows = Fp8Rows(*quantize_activations(x.reshape(-1, x.shape[-1])), x.shape, x.dtype)
    return fp8_product(rows, weight, column_scales(weight, scale))


def column_scales(weight: Tensor, scale: Tensor | None) -> Tensor:
    """A weight's scale, 1 if None, as [1, rows]: `fp8_product` needs a scale per row of both operands."""
    scale = torch.ones(1, 1, device=weight.device) if scale is None else scale
    return scale.reshape(1, -1).expand(1, len(weight)).contiguous()


def fp8_product(x: Fp8Rows, weight: Tensor, scales: Tensor) -> Tensor | None:
    """`fp8_matmul` of already quantized rows, with the weight's scales from `column_scales`."""
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
    """The product [..., rows] of x [..., columns] and the transposed weight, in the dtype of x, all on one device.

    `rotation` is the Hadamard matrix of a rotated weight, None for others.
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
    """The rows [..., width], fp32, of a quantized table [entries, width] at `ids` [...]."""
    rows = F.embedding(ids, packed.data).float()
    if packed.scale is not None:
        rows *= F.embedding(ids, packed.scale) if len(packed.scale) > 1 else packed.scale
    return rows if rotation is None else hadamard_rotate(rows, rotation)


# --- layers --------------------------------------------------------------------------------------------------------


class _Quantized(nn.Module):
    """A layer with a quantized weight; `weight` and `weight_scale` are stored as in the file."""

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
        """The whole dequantized weight, computed at each call."""
        return dequantized(self.packed, dtype)


class QuantLinear(_Quantized):
    """A linear layer with a quantized weight [rows, columns]. Layers may share a `rotation`, bf16 [group, group]."""

    def __init__(self, packed: QuantizedWeight, bias: Tensor | None = None, rotation: Tensor | None = None) -> None:
        super().__init__(packed, rotation)
        self.out_features, self.in_features = packed.data.shape
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output [..., rows] for x [..., columns], in the dtype of x."""
        return quantized_linear(x, self.packed, self.bias, self.rotation)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.weight.dtype}"


class QuantEmbedding(_Quantized):
    """An embedding with a quantized table. Only the rows that are looked up are dequantized."""

    def forward(self, ids: Tensor) -> Tensor:
        """Embeddings [..., width], fp32, of `ids` [...]."""
        return quantized_rows_of(ids, self.packed, self.rotation)


@dataclass(frozen=True)
class QuantLayers:
    """The classes of quantized layers; a host may pass its own subclasses."""

    linear: type[QuantLinear] = QuantLinear
    embedding: type[QuantEmbedding] = QuantEmbedding

"""fp8 weights, with a scale or plain, and their products in FP8 on GPUs that have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from .base import Marker, StoredTensors
from .scaled import ScaledFormat, ScaledWeight

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
COPY_BYTES = 2**26  # limit of the fp32 copy while activations are quantized


@dataclass(frozen=True)
class Fp8Weight(ScaledWeight):
    """fp8 codes. A product multiplies in FP8 where the GPU does so, and else dequantizes them."""

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        product = fp8_matmul(x, self.data, self.scale) if has_fp8_matmul(x, self.data) else None
        if product is None:
            return super().matmul(x, bias)
        return product if bias is None else product + bias.to(x.dtype)


@dataclass(frozen=True)
class Fp8Format(ScaledFormat):
    MARKERS: ClassVar[Mapping[str, str]] = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
    KIND: ClassVar[str] = "fp8"
    CODES: ClassVar[tuple[str, ...]] = ("F8_E4M3", "F8_E5M2")
    PACKED: ClassVar[type[ScaledWeight]] = Fp8Weight

    @classmethod
    def of(cls, key: str, tensors: StoredTensors, marker: Marker) -> Fp8Format:
        return cls(key, tensors[key].shape, *cls._scale_of(key, tensors))

    @property
    def title(self) -> str:
        return "fp8 scaled" if self.scale else "fp8"


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
        return Fp8Weight(self.codes, self.scales).scaled(self.dtype).view(self.shape)


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

"""Weights whose codes are multiplied by scales: what int8 and fp8 have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ...config.validate import short
from ...errors import UserError
from .base import PackedWeight, StoredTensors, WeightFormat, WeightReader, product_by_rows
from .hadamard import hadamard_rotate

SCALES = (".weight_scale", ".scale_weight")
SCALE_DTYPES = ("BF16", "F16", "F32", "F64")


@dataclass(frozen=True)
class ScaledWeight(PackedWeight):
    """Codes `data` [rows, columns], scale fp32 [rows, 1] or [1, 1] or None, and for a rotated weight the Hadamard
    matrix [group, group] of its rotation.

    Rotated weights are W R for a block-diagonal orthonormal R that is its own inverse, so x Wt = (x R) (W R)t. The
    activation is rotated instead of the weight: that is as exact, and cheaper, because it costs one group per token
    and channel instead of one per weight, and a layer has more rows than a prompt has tokens.
    """

    data: Tensor
    scale: Tensor | None = None
    rotation: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        return {"weight": self.data, "weight_scale": self.scale, "rotation": self.rotation}

    def replaced(self, tensors: Mapping[str, Tensor | None]) -> ScaledWeight:
        return type(self)(tensors["weight"], tensors.get("weight_scale"), tensors.get("rotation"))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def group(self) -> int:
        """Size of a group of rotated channels; 0 without rotation."""
        return 0 if self.rotation is None else len(self.rotation)

    def scaled(self, dtype: torch.dtype) -> Tensor:
        """The weight [rows, columns] in `dtype`, still rotated: scaled in fp32, rounded once."""
        values = self.data.to(dtype)  # exact, because bf16 holds all int8 and fp8 values
        if self.scale is None:
            return values
        return values.mul_(self.scale.reshape(-1, *(1,) * (values.ndim - 1)))

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        weight = self.scaled(torch.float32)
        if self.rotation is not None:
            weight = hadamard_rotate(weight, self.rotation)
        return weight.to(dtype)

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.rotation is not None:
            x = hadamard_rotate(x, self.rotation)
        by_row = self.scale is not None and len(self.scale) > 1

        def rows(part: slice) -> Tensor:
            return replace(self, data=self.data[part], scale=self.scale[part] if by_row else self.scale).scaled(x.dtype)

        return product_by_rows(x, self.shape, rows, bias)

    def rows_at(self, ids: Tensor) -> Tensor:
        rows = F.embedding(ids, self.data).float()
        if self.scale is not None:
            rows *= F.embedding(ids, self.scale) if len(self.scale) > 1 else self.scale
        return rows if self.rotation is None else hadamard_rotate(rows, self.rotation)


@dataclass(frozen=True)
class ScaledFormat(WeightFormat):
    """Codes with one scale, or one for each row, under the key `scale`; without a key the scale is 1."""

    KIND: ClassVar[str] = ""  # int8 or fp8
    CODES: ClassVar[tuple[str, ...]] = ()  # dtypes of the codes, which take a byte each
    PACKED: ClassVar[type[ScaledWeight]] = ScaledWeight
    COMPANIONS: ClassVar[tuple[str, ...]] = SCALES

    scale: str | None = None
    per_row: bool = False
    group: int = 0

    @classmethod
    def matches(cls, key: str, tensors: StoredTensors) -> bool:
        return tensors[key].dtype in cls.CODES

    @classmethod
    def _scale_of(cls, key: str, tensors: StoredTensors) -> tuple[str | None, bool]:
        """Key of a weight's scale, None without one, and whether it has one for each row."""
        info, layer = tensors[key], key.removesuffix(".weight")
        scale = next((layer + end for end in SCALES if layer + end in tensors and layer != key), None)
        if scale is None:
            return None, False
        rows, shape = info.shape[0] if info.shape else 1, tensors[scale].shape
        count = math.prod(shape)
        if tensors[scale].dtype not in SCALE_DTYPES or count not in (1, rows) or max(shape, default=1) != count:
            raise UserError(
                f"tensor {short(scale)} is {tensors[scale].dtype} {list(shape)}, expected one scale, or one for each "
                f"of {rows} rows; take another release of this file"
            )
        return scale, count > 1

    def nbytes(self, rows: int) -> int:
        scales = rows if self.per_row else self.scale is not None
        return rows * self.row_values + scales * torch.float32.itemsize

    def load(self, reader: WeightReader, rows: tuple[int, int] | None = None) -> ScaledWeight:
        data = reader.read(self.weight, rows).to(device=reader.device, copy=True)
        return self.PACKED(data, self._read_scale(reader, rows), reader.rotation(self.group) if self.group else None)

    def _read_scale(self, reader: WeightReader, rows: tuple[int, int] | None) -> Tensor | None:
        """The scale in fp32, [rows, 1] or [1, 1]; None without one."""
        if self.scale is None:
            return None
        scale = reader.read(self.scale).to(reader.device, torch.float32, copy=True).reshape(-1, 1)
        require_finite(scale, self.scale)
        return scale[rows[0] : rows[1]].clone() if self.per_row and rows else scale

    def __str__(self) -> str:
        scale = "no scale" if not self.scale else "a scale per row" if self.per_row else "one scale per tensor"
        rotation = f", rotated in groups of {self.group}" if self.group else ""
        return f"{self.KIND}, {scale}{rotation}"


def require_finite(scale: Tensor, key: str) -> None:
    """Refuse scales that would make every picture noise."""
    if not bool(torch.isfinite(scale).all()):
        raise UserError(f"{short(key)} holds NaN or infinity; download the file again")

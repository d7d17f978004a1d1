"""convrot_w4a4 weights: signed four bits a value in a rotated basis, and a scale for each row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from .base import Marker
from .kitchen import KitchenFormat, Part, Tensors, kitchen, rotation_of


@dataclass(frozen=True)
class ConvRotW4A4Format(KitchenFormat):
    MARKERS: ClassVar[Mapping[str, str]] = MappingProxyType({"convrot_w4a4": "I8"})
    PARTS: ClassVar[tuple[Part, ...]] = (Part(".weight_scale", ("F32", "BF16", "F16")),)
    COMPANIONS: ClassVar[tuple[str, ...]] = (".weight_scale",)
    PER_CODE: ClassVar[int] = 2

    @classmethod
    def rotation(cls, marker: Marker, layer: str, shape: tuple[int, int]) -> int:
        return rotation_of(marker, layer, shape)

    def unpack(self, parts: Tensors) -> Tensor:
        scales = parts["weight_scale"].flatten()
        unpack = kitchen(self.title).dequantize_convrot_w4a4_weight
        return unpack(parts["weight"], scales, convrot_groupsize=self.group, output_dtype=torch.float32)

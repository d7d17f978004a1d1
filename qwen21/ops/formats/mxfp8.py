"""mxfp8 weights: fp8 codes with a power of two as scale for every 32 values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from .kitchen import KitchenFormat, KitchenWeight, Part, Tensors, kitchen, tiled_rows

BLOCK = 32  # values that share a scale


@dataclass(frozen=True)
class MXFP8Format(KitchenFormat):
    MARKERS: ClassVar[Mapping[str, str]] = MappingProxyType({"mxfp8": "F8_E4M3"})
    PARTS: ClassVar[tuple[Part, ...]] = (Part(".weight_scale", ("F8_E8M0", "U8"), seen_as=torch.float8_e8m0fnu),)
    COMPANIONS: ClassVar[tuple[str, ...]] = (".weight_scale",)

    def rows_of(self, weight: KitchenWeight, rows: Tensor) -> Tensors:
        count, columns = weight.shape
        codes = weight.parts["weight"].view(torch.uint8).index_select(0, rows).view(torch.float8_e4m3fn)
        scales = tiled_rows(weight.parts["weight_scale"], count, columns // BLOCK, rows)
        return {"weight": codes, "weight_scale": scales}

    def unpack(self, parts: Tensors) -> Tensor:
        return kitchen(self.title).dequantize_mxfp8(parts["weight"], parts["weight_scale"], torch.float32)

"""nvfp4 weights: four-bit floats, two in a byte, with an fp8 scale for every 16 values and one scale for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from .kitchen import KitchenFormat, KitchenWeight, Part, Tensors, kitchen, tiled_rows

BLOCK = 16  # values that share a scale


@dataclass(frozen=True)
class NVFP4Format(KitchenFormat):
    MARKERS: ClassVar[Mapping[str, str]] = MappingProxyType({"nvfp4": "U8"})
    PARTS: ClassVar[tuple[Part, ...]] = (
        Part(".weight_scale", ("F8_E4M3", "U8"), seen_as=torch.float8_e4m3fn),
        Part(".weight_scale_2", ("F32",), axis=None),
    )
    COMPANIONS: ClassVar[tuple[str, ...]] = (".weight_scale", ".weight_scale_2")
    PER_CODE: ClassVar[int] = 2

    def rows_of(self, weight: KitchenWeight, rows: Tensor) -> Tensors:
        count, columns = weight.shape
        scales = tiled_rows(weight.parts["weight_scale"], count, columns // BLOCK, rows)
        return {**weight.parts, "weight": weight.parts["weight"].index_select(0, rows), "weight_scale": scales}

    def unpack(self, parts: Tensors) -> Tensor:
        scale, blocks = parts["weight_scale_2"].float(), parts["weight_scale"]
        return kitchen(self.title).dequantize_nvfp4(parts["weight"], scale, blocks, torch.float32)

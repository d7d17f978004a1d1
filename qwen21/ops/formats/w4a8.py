"""w4a8 weights (asym_w4a8_int8): four bits a value by a codebook, a scale for every 16 values and one for each row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from ...config.validate import short
from ...errors import UserError
from .base import Marker, StoredTensors, setting
from .kitchen import KitchenFormat, Part, Tensors, kitchen, rotation_of

RELATIVE, CHANNEL = ".weight_s_rel", ".weight_s_channel"


@dataclass(frozen=True)
class W4A8Format(KitchenFormat):
    MARKERS: ClassVar[Mapping[str, str]] = MappingProxyType({"asym_w4a8_int8": "I8"})
    PARTS: ClassVar[tuple[Part, ...]] = (
        Part(RELATIVE, ("F8_E4M3", "U8", "F32"), seen_as=torch.float8_e4m3fn),
        Part(CHANNEL, ("F32",)),
        Part(".weight_codebook", ("F32",), axis=None, optional=True),
        Part(".weight_correction", ("F32",), axis=1, optional=True),
    )
    COMPANIONS: ClassVar[tuple[str, ...]] = tuple(part.end for part in PARTS)
    PER_CODE: ClassVar[int] = 2
    CAPABILITY: ClassVar[tuple[int, int] | None] = (8, 0)

    values: int = 16  # that share a scale

    @classmethod
    def name(cls) -> str:
        return "w4a8"

    @classmethod
    def rotation(cls, marker: Marker, layer: str, shape: tuple[int, int]) -> int:
        return rotation_of(marker, layer, shape)

    def with_settings(self, marker: Marker, tensors: StoredTensors) -> W4A8Format:
        values, layer = setting(marker, "group_size", 16), self.weight.removesuffix(".weight")
        fits = type(values) is int and values >= 4 and self.shape[1] % values == 0 and 16 in (values, max(values, 16))
        got = tensors[layer + RELATIVE].shape
        if not fits or got != (self.shape[0], self.shape[1] // values):
            raise UserError(
                f"{short(layer)} of shape {list(self.shape)} has scales {list(got)} for groups of {short(values)} "
                "values, which do not fit; download the file again"
            )
        return replace(self, values=values)

    def _settings(self, parts: Tensors) -> dict[str, object]:
        return {
            "qdata": parts["weight"],
            "s_rel": parts["weight_s_rel"],
            "s_channel": parts["weight_s_channel"].flatten(),
            "codebook": parts["weight_codebook"],
            "correction": parts["weight_correction"],
            "group_size": self.values,
            "convrot_groupsize": self.group,
        }

    def unpack(self, parts: Tensors) -> Tensor:
        return kitchen(self.title).dequantize_w4a8_int8_weight(**self._settings(parts), output_dtype=torch.float32)

    def multiply(self, x: Tensor, parts: Tensors, bias: Tensor | None) -> Tensor:
        return kitchen(self.title).w4a8_int8_linear(x, bias=bias, out_dtype=x.dtype, **self._settings(parts))

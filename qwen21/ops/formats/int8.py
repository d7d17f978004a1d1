"""int8 weights with a scale, with or without Hadamard rotation (int8_convrot)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...config.validate import short
from ...errors import UserError
from .base import Marker, StoredTensors, setting
from .hadamard import GROUPS
from .scaled import ScaledFormat, ScaledWeight


@dataclass(frozen=True)
class Int8Weight(ScaledWeight):
    """int8 codes. A product dequantizes them."""


@dataclass(frozen=True)
class Int8Format(ScaledFormat):
    MARKERS: ClassVar[Mapping[str, str]] = {"int8_tensorwise": "I8"}
    KIND: ClassVar[str] = "int8"
    CODES: ClassVar[tuple[str, ...]] = ("I8",)
    PACKED: ClassVar[type[ScaledWeight]] = Int8Weight

    @classmethod
    def of(cls, key: str, tensors: StoredTensors, marker: Marker) -> Int8Format:
        scale, per_row = cls._scale_of(key, tensors)
        if scale is None:
            raise UserError(f"tensor {short(key)} is int8 but has no weight_scale; download the file again")
        group = rotation_group(marker, key.removesuffix(".weight"), tensors[key].shape)
        return cls(key, tensors[key].shape, scale, per_row, group)

    @property
    def title(self) -> str:
        return "int8_convrot" if self.group else "int8"


def rotation_group(marker: Marker, layer: str, shape: tuple[int, ...]) -> int:
    """Group size of the rotation that a marker tells of a weight of `shape`; 0 for no rotation."""
    rotated, group = setting(marker, "convrot", False), setting(marker, "convrot_groupsize", 256)
    if rotated is False:
        return 0
    if rotated is not True or type(group) is not int or group not in GROUPS:
        raise UserError(f"the marker of {short(layer)} is {short(dict(marker))}, no rotation known; download it again")
    if len(shape) != 2 or shape[1] % group:
        raise UserError(
            f"{short(layer)} is rotated in groups of {group}, which do not divide its shape {list(shape)}; "
            "download the file again"
        )
    return group

"""Formats of quantized weights, one file each. A new one is a file here and a line in `FORMATS`."""

from __future__ import annotations

from .base import Marker, PackedWeight, StoredTensors, WeightFormat, WeightReader
from .convrot_w4a4 import ConvRotW4A4Format
from .fp8 import Fp8Format, Fp8Weight
from .gguf_blocks import BlockFormat
from .int8 import Int8Format, Int8Weight
from .mxfp8 import MXFP8Format
from .nvfp4 import NVFP4Format
from .w4a8 import W4A8Format

__all__ = [
    "FORMATS", "Fp8Weight", "Int8Weight", "Marker", "PackedWeight", "WeightFormat", "WeightReader", "format_named",
    "recognise",
]  # fmt: skip

# Those that recognise a weight by more tensors come first.
FORMATS: tuple[type[WeightFormat], ...] = (
    W4A8Format, ConvRotW4A4Format, NVFP4Format, MXFP8Format, Int8Format, Fp8Format, BlockFormat,
)  # fmt: skip


def recognise(key: str, tensors: StoredTensors, marker: Marker) -> WeightFormat | None:
    """The format of the weight `key`, by its marker or else by its tensors; None where it is not quantized.

    Raises `UserError` where marker and tensors contradict each other.
    """
    chosen = format_named(marker.get("format")) or next((f for f in FORMATS if f.matches(key, tensors)), None)
    return chosen and chosen.of(key, tensors, marker)


def format_named(name: object) -> type[WeightFormat] | None:
    """The format that a marker calls `name`; None if it is none of these."""
    return next((each for each in FORMATS if isinstance(name, str) and name in each.MARKERS), None)

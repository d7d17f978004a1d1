"""Weights in the blocks of GGUF files: packed codes of 32 or 256 neighbouring values of a row, with their scales.

A value is scale * (code - offset) - minimum. The types differ in the bits of a code, in how many values share a scale,
and in how the scales are packed themselves. Source: the block structures of ggml, and `gguf.quants.dequantize`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ...config.validate import short
from ...errors import UserError
from .base import Marker, PackedWeight, StoredTensors, WeightFormat, WeightReader, product_by_rows

CHUNK_VALUES = {"cpu": 2**20, "cuda": 2**22}  # dequantized at once: what fits a CPU's cache, or a GPU's free memory


class Blocks(NamedTuple):
    """The contents of n blocks: codes [n, values] in integers, scales and minima [n, groups] in fp32."""

    codes: Tensor
    scales: Tensor
    offset: int = 0
    minima: Tensor | None = None


class BlockType(NamedTuple):
    """A type of block: the number of its values and bytes, the function that unpacks bytes [n, size], and the places of
    the fp16 numbers among the bytes."""

    values: int
    size: int
    unpack: Callable[[Tensor], Blocks]
    halves: tuple[int, ...]

    def bytes_of(self, count: int) -> int:
        """Bytes of `count` values."""
        return count // self.values * self.size


def _bits(packed: Tensor, bits: int, lanes: int) -> Tensor:
    """Codes [n, count] of `bits` bits in bytes [n, size].

    `lanes` neighbouring bytes hold `lanes` codes in their lowest bits, the next `lanes` codes in the bits above, and so
    on; then come the next `lanes` bytes.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)[:, None]
    spread = packed.reshape(len(packed), -1, 1, lanes) >> shifts  # [n, size / lanes, 8 / bits, lanes]
    return (spread & (2**bits - 1)).flatten(1)


def _half(packed: Tensor) -> Tensor:
    """fp16 numbers in bytes [n, 2 * count], as fp32 [n, count]."""
    return packed.contiguous().view(torch.float16).float()


def _q4_0(x: Tensor) -> Blocks:
    scale, codes = x.split([2, 16], 1)
    return Blocks(_bits(codes, 4, 16), _half(scale), 8)


def _q4_1(x: Tensor) -> Blocks:
    scale, minimum, codes = x.split([2, 2, 16], 1)
    return Blocks(_bits(codes, 4, 16), _half(scale), minima=-_half(minimum))


def _q5_0(x: Tensor) -> Blocks:
    scale, high, low = x.split([2, 4, 16], 1)
    return Blocks(_bits(low, 4, 16) | _bits(high, 1, 1) << 4, _half(scale), 16)


def _q5_1(x: Tensor) -> Blocks:
    scale, minimum, high, low = x.split([2, 2, 4, 16], 1)
    return Blocks(_bits(low, 4, 16) | _bits(high, 1, 1) << 4, _half(scale), minima=-_half(minimum))


def _q8_0(x: Tensor) -> Blocks:
    scale, codes = x.split([2, 32], 1)
    return Blocks(codes.view(torch.int8), _half(scale))


def _q2_k(x: Tensor) -> Blocks:
    packed, codes, scale, minimum = x.split([16, 64, 2, 2], 1)
    scales, minima = _half(scale) * (packed & 15), _half(minimum) * (packed >> 4)
    return Blocks(_bits(codes, 2, 32), scales, minima=minima)


def _q3_k(x: Tensor) -> Blocks:
    high, low, packed, scale = x.split([32, 64, 12, 2], 1)
    scales = _bits(packed[:, :8], 4, 8) | _bits(packed[:, 8:], 2, 4) << 4
    codes = _bits(low, 2, 32) | _bits(high, 1, 32) << 2
    return Blocks(codes, _half(scale) * (scales.float() - 32), 4)


def _q4_k(x: Tensor) -> Blocks:
    halves, packed, codes = x.split([4, 12, 128], 1)
    return Blocks(_bits(codes, 4, 32), *_scales_and_minima(halves, packed))


def _q5_k(x: Tensor) -> Blocks:
    halves, packed, high, low = x.split([4, 12, 32, 128], 1)
    return Blocks(_bits(low, 4, 32) | _bits(high, 1, 32) << 4, *_scales_and_minima(halves, packed))


def _scales_and_minima(halves: Tensor, packed: Tensor) -> tuple[Tensor, int, Tensor]:
    """Scales [n, 8], the offset 0 and minima [n, 8] of the eight groups of Q4_K and Q5_K, six bits each.

    The first four groups have their bits together. Those of the last four are spread: four bits of both in the last
    four bytes, the two above them in the spare bits of the first eight.
    """
    scales, minima, both = packed.split(4, 1)
    scales = torch.cat([scales & 63, both & 15 | scales >> 2 & 48], 1)
    minima = torch.cat([minima & 63, both >> 4 | minima >> 2 & 48], 1)
    scale, minimum = _half(halves).split(1, 1)
    return scale * scales, 0, minimum * minima


def _q6_k(x: Tensor) -> Blocks:
    low, high, scales, scale = x.split([128, 64, 16, 2], 1)
    codes = _bits(low, 4, 64) | _bits(high, 2, 32) << 4
    return Blocks(codes, _half(scale) * scales.view(torch.int8), 32)


BLOCKS: Mapping[str, BlockType] = MappingProxyType(
    {
        "Q4_0": BlockType(32, 18, _q4_0, (0,)),
        "Q4_1": BlockType(32, 20, _q4_1, (0, 2)),
        "Q5_0": BlockType(32, 22, _q5_0, (0,)),
        "Q5_1": BlockType(32, 24, _q5_1, (0, 2)),
        "Q8_0": BlockType(32, 34, _q8_0, (0,)),
        "Q2_K": BlockType(256, 84, _q2_k, (80, 82)),
        "Q3_K": BlockType(256, 110, _q3_k, (108,)),
        "Q4_K": BlockType(256, 144, _q4_k, (0, 2)),
        "Q5_K": BlockType(256, 176, _q5_k, (0, 2)),
        "Q6_K": BlockType(256, 210, _q6_k, (208,)),
    }
)


def dequantize(packed: Tensor, kind: str) -> Tensor:
    """Dequantize n blocks of the GGUF type `kind`, uint8 [n, bytes of a block], to fp32 [n, values of a block].

    The operations and their order are those of `gguf.quants.dequantize`, so the values are bit-equal to its values.
    """
    blocks = BLOCKS[kind].unpack(packed)
    groups = (*blocks.scales.shape, -1)
    values = blocks.codes.float().view(groups)
    if blocks.offset:
        values -= blocks.offset
    values *= blocks.scales[..., None]
    if blocks.minima is not None:
        values -= blocks.minima[..., None]
    return values.flatten(1)


@dataclass(frozen=True)
class BlockWeight(PackedWeight):
    """A weight in blocks of the type `kind`: bytes `data` [rows, bytes of a row]."""

    data: Tensor
    kind: str

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        return {"weight": self.data}

    def replaced(self, tensors: Mapping[str, Tensor | None]) -> BlockWeight:
        return BlockWeight(tensors["weight"], self.kind)

    @property
    def shape(self) -> tuple[int, ...]:
        block = BLOCKS[self.kind]
        return len(self.data), self.data.shape[1] // block.size * block.values

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        blocks = self.data.view(-1, BLOCKS[self.kind].size)
        weight = torch.empty(self.shape, dtype=dtype, device=self.data.device)
        step = CHUNK_VALUES.get(self.data.device.type, CHUNK_VALUES["cuda"]) // BLOCKS[self.kind].values
        parts = zip(weight.view(-1, BLOCKS[self.kind].values).split(step), blocks.split(step), strict=True)
        for values, packed in parts:
            values.copy_(dequantize(packed, self.kind))
        return weight

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return product_by_rows(x, self.shape, lambda r: BlockWeight(self.data[r], self.kind).dequantized(x.dtype), bias)

    def rows_at(self, ids: Tensor) -> Tensor:
        rows = BlockWeight(self.data[ids.flatten()], self.kind).dequantized()
        return rows.view(*ids.shape, self.shape[1])


@dataclass(frozen=True)
class BlockFormat(WeightFormat):
    """A weight in quantized blocks of the GGUF type `kind`, such as Q4_K, spelled as the file spells it."""

    MARKERS: ClassVar[Mapping[str, str]] = MappingProxyType({})  # a GGUF file tells each tensor's type itself
    BLOCKS_ONLY: ClassVar[bool] = True

    kind: str

    @classmethod
    def matches(cls, key: str, tensors: StoredTensors) -> bool:
        return tensors[key].dtype in BLOCKS

    @classmethod
    def of(cls, key: str, tensors: StoredTensors, marker: Marker) -> BlockFormat:
        kind, shape = tensors[key].dtype, tensors[key].shape
        if math.prod(shape[1:]) % BLOCKS[kind].values or len(shape) < 2:
            raise UserError(
                f"tensor {short(key)} of shape {list(shape)} is {kind}, whose blocks of {BLOCKS[kind].values} values "
                "do not fill its rows; take another release of this file"
            )
        return cls(key, shape, kind)

    @property
    def title(self) -> str:
        return self.kind

    def nbytes(self, rows: int) -> int:
        return BLOCKS[self.kind].bytes_of(rows * self.row_values)

    def load(self, reader: WeightReader, rows: tuple[int, int] | None = None) -> BlockWeight:
        data = reader.read(self.weight, rows)
        data = data.reshape(-1, self.nbytes(1)).to(reader.device)
        packed = BlockWeight(data, self.kind)
        _require_finite_scales(packed, self.weight)
        return packed

    def __str__(self) -> str:
        return f"{self.kind}, blocks of {BLOCKS[self.kind].values} values"


def _require_finite_scales(weight: BlockWeight, key: str) -> None:
    """Refuse scales that would make every picture noise."""
    block = BLOCKS[weight.kind]
    blocks = weight.data.view(-1, block.size)
    if not all(bool(torch.isfinite(_half(blocks[:, at : at + 2])).all()) for at in block.halves):
        raise UserError(f"{short(key)} has scales that are NaN or infinity; download the file again")

"""What is common to formats that the package comfy-kitchen defines: it unpacks their weights, and for some of them it
multiplies on GPUs that its kernels support."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ...config.validate import short
from ...errors import UserError
from ..linear import linear
from .base import Marker, PackedWeight, StoredTensors, WeightFormat, WeightReader, setting
from .hadamard import GROUPS
from .scaled import require_finite

CHUNK_VALUES = 2**23  # dequantized at once, because comfy-kitchen holds several copies of them meanwhile
ROWS_OF_TILES = 128  # rows of a tile of block scales, as tensor cores read them

Tensors = Mapping[str, Tensor | None]


class Part(NamedTuple):
    """A tensor of a weight beside its codes: the end of its key, its dtypes in files, and its axis along the weight's
    rows, None without one. `seen_as` is its dtype where files store it as plain bytes."""

    end: str
    dtypes: tuple[str, ...]
    axis: int | None = 0
    optional: bool = False
    seen_as: torch.dtype | None = None

    @property
    def name(self) -> str:
        return self.end.removeprefix(".")


def kitchen(what: str) -> ModuleType:
    """The package comfy-kitchen. Raises `UserError` that says that `what` needs it."""
    try:
        import comfy_kitchen
    except ImportError as error:
        raise UserError(
            f"{what} weights need the package comfy-kitchen; install it (pip install comfy-kitchen), or take another "
            "file of this model"
        ) from error
    return comfy_kitchen


@dataclass(frozen=True)
class KitchenWeight(PackedWeight):
    """A weight [rows, columns] in the tensors `parts`, codes first, which `format` can unpack."""

    format: KitchenFormat
    parts: Tensors

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        return dict(self.parts)

    def replaced(self, tensors: Tensors) -> KitchenWeight:
        return replace(self, parts={name: tensors.get(name) for name in self.parts})

    @property
    def shape(self) -> tuple[int, ...]:
        rows, columns = self.parts["weight"].shape
        return rows, columns * self.format.PER_CODE

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        weight = torch.empty(self.shape, dtype=dtype, device=self.parts["weight"].device)
        step = max(1, CHUNK_VALUES // weight.shape[1] // ROWS_OF_TILES) * ROWS_OF_TILES
        for start in range(0, len(weight), step):
            rows = torch.arange(start, min(start + step, len(weight)), device=weight.device)
            whole = len(rows) == len(weight)
            weight[start : start + step] = self.format.unpack(self.parts if whole else self.format.rows_of(self, rows))
        return weight

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        bias = None if bias is None else bias.to(x.dtype)
        if self.format.multiplies(x):
            return self.format.multiply(x, self.parts, bias)
        return linear(x, self.dequantized(x.dtype), bias)

    def rows_at(self, ids: Tensor) -> Tensor:
        rows = self.format.unpack(self.format.rows_of(self, ids.flatten()))
        return rows.view(*ids.shape, -1)


@dataclass(frozen=True)
class KitchenFormat(WeightFormat):
    """A weight in codes of the dtype in `MARKERS`, each with `PER_CODE` values, and in tensors that `PARTS` lists."""

    PACKAGE: ClassVar[str] = "comfy_kitchen"
    PARTS: ClassVar[tuple[Part, ...]] = ()
    PER_CODE: ClassVar[int] = 1
    CAPABILITY: ClassVar[tuple[int, int] | None] = None  # least compute capability of comfy-kitchen's product

    parts: tuple[str, ...] = ()  # ends of the keys that the file has
    group: int = 0  # size of a group of rotated channels
    row_bytes: int = 0
    shared_bytes: int = 0

    @classmethod
    def matches(cls, key: str, tensors: StoredTensors) -> bool:
        """False: only a marker tells the groups, and in which order the scales of blocks lie."""
        return False

    @classmethod
    def of(cls, key: str, tensors: StoredTensors, marker: Marker) -> KitchenFormat:
        layer, stored = key.removesuffix(".weight"), tensors[key].shape
        if len(stored) != 2:
            raise UserError(f"{short(key)} is {cls.name()} of shape {list(stored)}, expected two axes")
        shape, found, row_bytes, shared = (stored[0], stored[1] * cls.PER_CODE), [], stored[1], 0
        for part in cls.PARTS:
            info = tensors.get(layer + part.end)
            if info is None:
                if not part.optional:
                    raise UserError(f"{short(key)} is {cls.name()} but has no {part.name}; download the file again")
                continue
            count = math.prod(info.shape)
            if info.dtype not in part.dtypes or (part.axis is not None and count % shape[0] and count > 1):
                raise UserError(
                    f"tensor {short(layer + part.end)} is {info.dtype} {list(info.shape)}, which does not belong to a "
                    f"weight of {cls.name()} with {shape[0]} rows; take another release of this file"
                )
            found.append(part.end)
            size = count * (4 if info.dtype == "F32" else 2 if info.dtype in ("BF16", "F16") else 1)
            if part.axis is None or count == 1:
                shared += size
            else:
                row_bytes += size // shape[0]
        group = cls.rotation(marker, layer, shape)
        made = cls(key, shape, tuple(found), group, row_bytes, shared)
        return made.with_settings(marker, tensors)

    @classmethod
    def name(cls) -> str:
        """The format's name for people."""
        return next(iter(cls.MARKERS))

    @classmethod
    def rotation(cls, marker: Marker, layer: str, shape: tuple[int, int]) -> int:
        """Size of a group of rotated channels; 0 where this format has no rotation."""
        return 0

    def with_settings(self, marker: Marker, tensors: StoredTensors) -> KitchenFormat:
        """This format with what else the marker says. Raises `UserError` where the tensors contradict it."""
        return self

    @property
    def title(self) -> str:
        return self.name()

    def nbytes(self, rows: int) -> int:
        return rows * self.row_bytes + self.shared_bytes

    def load(self, reader: WeightReader, rows: tuple[int, int] | None = None) -> KitchenWeight:
        kitchen(self.title)
        parts: dict[str, Tensor | None] = {"weight": reader.read(self.weight).to(reader.device, copy=True)}
        for part in self.PARTS:
            if part.end not in self.parts:
                parts[part.name] = None
                continue
            key = self.weight.removesuffix(".weight") + part.end
            tensor = reader.read(key).to(reader.device, copy=True)
            seen = part.seen_as if part.seen_as is not None and tensor.element_size() == 1 else tensor.dtype
            parts[part.name] = tensor.view(seen)
            require_finite(parts[part.name].float(), key)
        whole = KitchenWeight(self, parts)
        if rows is None:
            return whole
        return KitchenWeight(self, self.rows_of(whole, torch.arange(*rows, device=reader.device)))

    def rows_of(self, weight: KitchenWeight, rows: Tensor) -> Tensors:
        """The tensors of some rows of a weight, by their numbers."""
        return dict(self._rows_of_parts(weight, rows))

    def _rows_of_parts(self, weight: KitchenWeight, rows: Tensor) -> Iterator[tuple[str, Tensor | None]]:
        axes = {"weight": 0, **{part.name: part.axis for part in self.PARTS}}
        for name, tensor in weight.parts.items():
            shared = tensor is None or axes[name] is None or tensor.numel() == 1
            yield name, tensor if shared else _index(tensor, axes[name], rows)

    def multiplies(self, x: Tensor) -> bool:
        """Whether comfy-kitchen's product runs on the device of x: it quantizes x by token."""
        return (
            self.CAPABILITY is not None
            and x.device.type == "cuda"
            and torch.version.cuda is not None
            and x.dtype in (torch.bfloat16, torch.float16)
            and x.numel() > 0
            and not (torch.is_grad_enabled() and x.requires_grad)
            and torch.cuda.get_device_capability(x.device) >= self.CAPABILITY
        )

    @abstractmethod
    def unpack(self, parts: Tensors) -> Tensor:
        """The weight [rows, columns], fp32, of the tensors `parts`."""

    def multiply(self, x: Tensor, parts: Tensors, bias: Tensor | None) -> Tensor:
        """comfy-kitchen's product [..., rows] of x [..., columns] and the transposed weight, plus bias [rows]."""
        raise NotImplementedError


def _index(tensor: Tensor, axis: int, rows: Tensor) -> Tensor:
    """`tensor` at `rows` of an axis. Bytes are copied, because PyTorch indexes no one-byte floats on some devices."""
    bits = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    return bits.index_select(axis, rows).view(tensor.dtype)


def tiled_rows(scales: Tensor, count: int, columns: int, rows: Tensor) -> Tensor:
    """The block scales of some of `count` rows, in tiles as tensor cores read them; `columns` blocks make a row."""
    from comfy_kitchen.float_utils import from_blocked, to_blocked

    plain = from_blocked(scales.view(torch.uint8), num_rows=count, num_cols=columns)
    return to_blocked(plain.index_select(0, rows), flatten=False).view(scales.dtype)


def rotation_of(marker: Marker, layer: str, shape: tuple[int, int]) -> int:
    """The group size of a rotation that the marker names, or 256."""
    group = setting(marker, "convrot_groupsize", 256)
    if type(group) is not int or group not in GROUPS or shape[1] % group:
        raise UserError(
            f"{short(layer)} of shape {list(shape)} is rotated in groups of {short(group)}, which cannot be; download "
            "the file again"
        )
    return group

"""What every format of quantized weights offers: how a file stores a weight, and the weight as it is computed with."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..linear import linear


class StoredTensor(Protocol):
    """A tensor of a file, by its header: dtype as the file's container names it, and shape."""

    dtype: str
    shape: tuple[int, ...]


CPU_VALUES = 2**22  # of a weight that a CPU dequantizes and multiplies at once
StoredTensors = Mapping[str, StoredTensor]
Marker = Mapping[str, Any]  # the JSON object that describes one layer's weight, such as {"format": "int8_tensorwise"}


class WeightReader(Protocol):
    """Where a format reads the tensors of a weight from, and the device that they go to."""

    device: torch.device

    def read(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
        """The tensor `key`, or its rows from `rows[0]` up to `rows[1]`, on the CPU; it may map the file."""

    def rotation(self, group: int) -> Tensor:
        """The Hadamard matrix [group, group], bf16, on the device; one for all layers."""


class PackedWeight(ABC):
    """A quantized weight [rows, columns] in memory, in the tensors that its file has.

    A layer registers these tensors as its own, so that whatever moves a network moves them too.
    """

    @property
    @abstractmethod
    def tensors(self) -> dict[str, Tensor | None]:
        """The tensors by the names that a layer gives them. The first is `weight`."""

    @abstractmethod
    def replaced(self, tensors: Mapping[str, Tensor | None]) -> PackedWeight:
        """The same weight in other tensors, such as copies on another device. Those not given are None."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight that the tensors stand for."""

    @abstractmethod
    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [rows, columns] in `dtype`."""

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product [..., rows] of x [..., columns] and the transposed weight plus bias [rows], in the dtype of x."""
        return linear(x, self.dequantized(x.dtype), None if bias is None else bias.to(x.dtype))

    def rows_at(self, ids: Tensor) -> Tensor:
        """The rows [..., columns], fp32, at `ids` [...]."""
        return F.embedding(ids, self.dequantized())

    def to(self, device: torch.device | str) -> PackedWeight:
        """The same weight on `device`."""
        return self.replaced({name: None if t is None else t.to(device) for name, t in self.tensors.items()})

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values() if tensor is not None)


@dataclass(frozen=True)
class WeightFormat(ABC):
    """How a file stores one weight. `weight` is the key of its main tensor, `shape` the weight's own shape."""

    MARKERS: ClassVar[Mapping[str, str]]  # names in a marker -> dtype of the weight's tensor
    COMPANIONS: ClassVar[tuple[str, ...]] = ()  # endings of tensors beside the weight, in place of `.weight`
    BLOCKS_ONLY: ClassVar[bool] = False  # whether weights outside the blocks are dequantized while they are loaded
    PACKAGE: ClassVar[str] = ""  # an optional package that the format needs

    weight: str
    shape: tuple[int, ...]

    @classmethod
    @abstractmethod
    def matches(cls, key: str, tensors: StoredTensors) -> bool:
        """Whether an unmarked tensor `key` is a weight of this format."""

    @classmethod
    @abstractmethod
    def of(cls, key: str, tensors: StoredTensors, marker: Marker) -> WeightFormat:
        """The format of the weight `key`, whose marker is `marker`, empty without one.

        Raises `UserError` where its tensors and marker contradict each other.
        """

    @property
    @abstractmethod
    def title(self) -> str:
        """The format's name for people, such as int8_convrot."""

    @abstractmethod
    def nbytes(self, rows: int) -> int:
        """Bytes of `rows` rows of the weight once they are loaded."""

    @abstractmethod
    def load(self, reader: WeightReader, rows: tuple[int, int] | None = None) -> PackedWeight:
        """Read the weight, or its rows from `rows[0]` up to `rows[1]`, onto the reader's device.

        Raises `UserError` for scales that are not finite.
        """

    def __str__(self) -> str:
        return self.title

    @property
    def row_values(self) -> int:
        """Number of values in a row."""
        return math.prod(self.shape[1:])


def product_by_rows(
    x: Tensor, shape: tuple[int, ...], rows: Callable[[slice], Tensor], bias: Tensor | None = None
) -> Tensor:
    """The product [..., R] of x [..., columns] and the transposed weight of `shape` [R, columns], plus bias [R].

    `rows` dequantizes some rows of the weight. On a CPU they are dequantized and multiplied a few at a time, while they
    are in its cache: that is a quarter faster, and there is never a whole weight in memory.
    """
    bias = None if bias is None else bias.to(x.dtype)
    step = max(1, CPU_VALUES // shape[1]) if x.device.type == "cpu" else shape[0]
    if step >= shape[0]:
        return linear(x, rows(slice(None)), bias)
    product = x.new_empty(*x.shape[:-1], shape[0])
    for start in range(0, shape[0], step):
        part = slice(start, start + step)
        product[..., part] = linear(x, rows(part), None if bias is None else bias[part])
    return product


def setting(marker: Marker, name: str, default: Any) -> Any:
    """A setting of a marker, which older files keep in an object `params`."""
    inner = marker.get("params")
    return marker.get(name, inner.get(name, default) if isinstance(inner, Mapping) else default)

"""K and V of one prefix: a chain of units, each packed by a codec, read layer by layer."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from ..sequence import PrefixLayout
from .codecs import Codec, Parts
from .transfer import HostBuffer, LayerReader, same_device

Device = torch.device | str


class Unit:
    """Rotated keys and values of one unit of a prefix, packed, for every layer.

    Prefixes that begin alike share units. Once filled, a unit never changes but for where it lies; `seconds` is what
    its prefill took, and so what reusing it saves.
    """

    def __init__(self, tokens: int, codec: Codec) -> None:
        self.tokens = tokens
        self.codec = codec
        self.layers: list[tuple[Parts, Parts]] = []
        self.seconds = 0.0
        self._buffer: HostBuffer | None = None
        self._moving = threading.Lock()

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for layer in self.layers for parts in layer for part in parts)

    @property
    def device(self) -> torch.device:
        """Where the unit lies; on the way from one device to another, where its first layer is."""
        return self.layers[0][0][0].device

    def append(self, k: Tensor, v: Tensor, storage: torch.device, layers: int) -> None:
        """Pack the next of `layers` layers: k, v [1, H, n, D], which the unit may keep as they are."""
        packed = self.codec.encode(k, v)
        if not same_device(storage, k.device):
            if self._buffer is None and storage.type == "cpu":
                self._buffer = HostBuffer(_aligned(packed) * layers, k.device)
            packed = _moved(packed, storage, self._buffer)
        self.layers.append(packed)

    def settle(self) -> None:
        """Wait until every layer has arrived where it is kept."""
        if self._buffer is not None:
            self._buffer.settle()

    def move(self, device: Device) -> None:
        """Carry every layer to another device. Who reads the unit at that moment keeps what was read."""
        device = torch.device(device)
        with self._moving:
            if not self.layers or same_device(self.device, device):
                return
            buffer = None
            if device.type == "cpu":
                buffer = HostBuffer(sum(_aligned(layer) for layer in self.layers), self.device)
            for i, layer in enumerate(self.layers):
                self.layers[i] = _moved(layer, device, buffer)
            self._buffer = buffer
            self.settle()

    def decode(self, layer: tuple[Parts, Parts], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """k, v [1, H, n, D] of a layer's packed parts."""
        return self.codec.decode_keys(layer[0], dtype), self.codec.decode_values(layer[1], dtype)


class Prefix:
    """The units of one prefix, in order. It serves a whole batch."""

    def __init__(self, layout: PrefixLayout, units: Sequence[Unit] = ()) -> None:
        self.layout = layout
        self.units = list(units)

    @property
    def length(self) -> int:
        return self.layout.length

    @property
    def nbytes(self) -> int:
        return sum(unit.nbytes for unit in self.units)

    def reader(self, device: torch.device, dtype: torch.dtype) -> LayerReader:
        """Calls give one layer after another: k, v [1, H, n, D] of each unit, on `device`."""
        return LayerReader(self.units, device, dtype)


def _aligned(layer: tuple[Parts, Parts]) -> int:
    return sum(HostBuffer.aligned(part.nbytes) for parts in layer for part in parts)


def _moved(layer: tuple[Parts, Parts], device: torch.device, buffer: HostBuffer | None) -> tuple[Parts, Parts]:
    carry = (lambda part: part.to(device)) if buffer is None else buffer.take
    keys, values = (tuple(carry(part) for part in parts) for parts in layer)
    return keys, values

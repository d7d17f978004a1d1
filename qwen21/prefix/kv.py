"""K and V of one prefix: a sequence of KV blocks, each packed by a codec and read layer by layer."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from ..sequence import PrefixLayout
from .codecs import Codec, Parts
from .host_memory import HostBuffer, same_device

Device = torch.device | str


class KVBlock:
    """Packed keys (with RoPE applied) and values of `tokens` tokens of a prefix, for every layer.

    Prefixes with an equal beginning share KV blocks. Once filled, a KV block never changes except for its device.
    `seconds` is the time that its prefill took, which reusing it saves.
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
        """The device of the KV block; during a move, the device of its first layer."""
        return self.layers[0][0][0].device

    def append(self, k: Tensor, v: Tensor, storage: torch.device, layers: int) -> None:
        """Pack k and v [1, H, n, D] of the next of `layers` layers. The KV block may keep these very tensors."""
        packed = self.codec.encode(k, v)
        if not same_device(storage, k.device):
            if self._buffer is None and storage.type == "cpu":
                self._buffer = HostBuffer(_aligned_bytes(packed) * layers, k.device)
            packed = _moved(packed, storage, self._buffer)
        self.layers.append(packed)

    def synchronize(self) -> None:
        """Wait until the copies of all layers are done."""
        if self._buffer is not None:
            self._buffer.synchronize()

    def move(self, device: Device) -> None:
        """Move every layer to `device`. A reader at that moment keeps the tensors that it already has."""
        device = torch.device(device)
        with self._moving:
            if not self.layers or same_device(self.device, device):
                return
            buffer = None
            if device.type == "cpu":
                buffer = HostBuffer(sum(_aligned_bytes(layer) for layer in self.layers), self.device)
            for i, layer in enumerate(self.layers):
                self.layers[i] = _moved(layer, device, buffer)
            self._buffer = buffer
            self.synchronize()

    def decode(self, layer: tuple[Parts, Parts], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """k and v [1, H, n, D] in `dtype` of a layer's packed parts."""
        return self.codec.decode_keys(layer[0], dtype), self.codec.decode_values(layer[1], dtype)


class Prefix:
    """The KV blocks, in order, of a prefix: the text and references before the target. A whole batch attends to it."""

    def __init__(self, layout: PrefixLayout, kv_blocks: Sequence[KVBlock] = ()) -> None:
        self.layout = layout
        self.kv_blocks = list(kv_blocks)

    @property
    def length(self) -> int:
        return self.layout.length

    @property
    def nbytes(self) -> int:
        return sum(kv_block.nbytes for kv_block in self.kv_blocks)


def _aligned_bytes(layer: tuple[Parts, Parts]) -> int:
    return sum(HostBuffer.aligned(part.nbytes) for parts in layer for part in parts)


def _moved(layer: tuple[Parts, Parts], device: torch.device, buffer: HostBuffer | None) -> tuple[Parts, Parts]:
    carry = (lambda part: part.to(device)) if buffer is None else buffer.take
    keys, values = (tuple(carry(part) for part in parts) for parts in layer)
    return keys, values

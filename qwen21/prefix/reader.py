"""Reading stored K and V layer by layer, one layer ahead of the computation where they lie in RAM."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .codecs import Parts
from .host_memory import same_device
from .kv import KVBlock


class LayerReader:
    """The layers of some KV blocks, in order, on the device that computes.

    While one layer is worked on, the next one's packed bytes are already on their way where KV blocks lie in RAM beside
    a CUDA device. So layers must be asked for one after another, from the first.
    """

    def __init__(self, kv_blocks: Sequence[KVBlock], device: torch.device, dtype: torch.dtype) -> None:
        self._kv_blocks = kv_blocks
        self._device, self._dtype = device, dtype
        offloaded = not all(same_device(kv_block.device, device) for kv_block in kv_blocks)
        self._stream = torch.cuda.Stream(device) if offloaded and device.type == "cuda" else None
        self._ahead: list[tuple[Parts, Parts]] = []
        self._layers = min((len(kv_block.layers) for kv_block in kv_blocks), default=0)
        self._fetch(0)

    def __call__(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """k, v [1, H, n, D] of each KV block's layer, decoded."""
        packed = self._ahead
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            for parts in (parts for kv_block in packed for parts in kv_block):
                for part in parts:
                    part.record_stream(current)
        self._fetch(layer + 1)
        return [kv_block.decode(parts, self._dtype) for kv_block, parts in zip(self._kv_blocks, packed, strict=True)]

    def _fetch(self, layer: int) -> None:
        """Start to bring a layer's packed parts."""
        if layer >= self._layers:
            self._ahead = []
        elif self._stream is None:
            self._ahead = [self._brought(kv_block.layers[layer]) for kv_block in self._kv_blocks]
        else:
            with torch.cuda.stream(self._stream):
                self._ahead = [self._brought(kv_block.layers[layer]) for kv_block in self._kv_blocks]

    def _brought(self, layer: tuple[Parts, Parts]) -> tuple[Parts, Parts]:
        keys, values = (tuple(part.to(self._device, non_blocking=True) for part in parts) for parts in layer)
        return keys, values

"""A reader of stored K and V, layer by layer; offloaded layers are fetched one layer ahead of the computation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .codecs import Parts
from .host_memory import same_device
from .kv import KVBlock


class LayerReader:
    """Loads the layers of `kv_blocks`, in order, from where they are stored onto the device that computes.

    Where KV blocks are offloaded from a CUDA device, the next layer's packed bytes are copied while the current layer
    is computed. So layers must be read one after another, from the first.
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
        """Decoded k and v [1, H, n, D] of layer `layer` of each KV block."""
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
        """Start to copy the packed parts of layer `layer` to the device."""
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

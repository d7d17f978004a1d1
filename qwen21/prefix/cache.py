"""K and V of one prefix, for every layer of the transformer."""

from __future__ import annotations

import torch
from torch import Tensor

from ..sequence import PrefixLayout


class Prefix:
    """Rotated keys and values of all prefix tokens, [1, H, P, D] per layer.

    Each layer owns two buffers of the prefix's final length. Segments are copied in as they are computed, so the cache
    pins nothing else: no view keeps a larger activation alive. One prefix serves a whole batch by expansion. `device`
    is where it is kept; layers are copied from there to the tensors that attend to them.
    """

    def __init__(
        self,
        layout: PrefixLayout,
        *,
        layers: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.layout = layout
        shape = (1, heads, layout.length, head_dim)
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(layers)]

    @property
    def length(self) -> int:
        return self.layout.length

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def extend(self, layer: int, offset: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v [1, H, n, D] of the tokens from `offset`; returns views [1, H, offset + n, D] up to their end."""
        stop = offset + k.shape[2]
        self.keys[layer][:, :, offset:stop] = k
        self.values[layer][:, :, offset:stop] = v
        return self.keys[layer][:, :, :stop].to(k.device), self.values[layer][:, :, :stop].to(k.device)

    def joined(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """[prefix, target] keys and values [B, H, P + N, D] for a target's k, v [B, H, N, D]."""
        if not self.length:
            return k, v
        kept = self.keys[layer].to(k.device), self.values[layer].to(v.device)
        keys, values = (part.expand(k.shape[0], -1, -1, -1) for part in kept)
        return torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2)


def prefix_bytes(tokens: int, layers: int, heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of the K and V of `tokens` prefix tokens: 0.5 MiB each for the released model in bf16."""
    return 2 * tokens * layers * heads * head_dim * dtype.itemsize


def placement(where: str, device: torch.device, needed: int, free: int | None) -> torch.device:
    """Where a prefix of `needed` bytes is kept that `device` computes with: `where` is auto, gpu or cpu.

    auto is the GPU while half of its free bytes hold the prefix, else RAM. The other half is for the steps.
    """
    if device.type == "cpu" or where == "cpu":
        return torch.device("cpu")
    return device if where == "gpu" or free is None or needed <= free // 2 else torch.device("cpu")

"""A prefix laid out once for all steps of a run: decoded, one tensor per layer, with room for the target's K and V."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config.networks import DiTConfig
from .kv import Prefix
from .reader import LayerReader


class ContiguousKV:
    """Keys and values [1, H, prefix + tokens, D] of every layer. A step writes its own K and V behind the prefix and
    attends to the whole tensor, so no step decodes or copies the prefix again."""

    def __init__(self, prefix: Prefix, tokens: int, layers: int, device: torch.device, dtype: torch.dtype) -> None:
        read = LayerReader(prefix.kv_blocks, device, dtype)
        self._layers: list[tuple[Tensor, Tensor]] = []
        for layer in range(layers):
            keys_and_values = zip(*read(layer), strict=True)
            self._layers.append(tuple(_with_room(parts, tokens) for parts in keys_and_values))

    def __getitem__(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._layers[layer]

    @staticmethod
    def fits(nbytes: int, working: int, spare: int) -> bool:
        """Whether `nbytes` and `working` bytes of activations fit into half of the `spare` bytes: the other half is for
        the other guidance branch and for decoding."""
        return nbytes + working <= spare // 2

    @staticmethod
    def nbytes(config: DiTConfig, prefix: int, tokens: int, dtype: torch.dtype) -> int:
        """Bytes for a prefix of `prefix` tokens and a target of `tokens`."""
        return 2 * config.layers * (prefix + tokens) * config.width * dtype.itemsize


def _with_room(parts: tuple[Tensor, ...], tokens: int) -> Tensor:
    """`parts` [1, H, n, D] concatenated in one tensor [1, H, sum of n + tokens, D], its end left uninitialized."""
    heads, head_dim = parts[0].shape[1], parts[0].shape[3]
    length = sum(part.shape[2] for part in parts)
    whole = parts[0].new_empty(1, heads, length + tokens, head_dim)
    at = 0
    for part in parts:
        whole[:, :, at : at + part.shape[2]] = part
        at += part.shape[2]
    return whole

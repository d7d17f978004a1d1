"""Positions in Qwen3-VL: of patches in the vision tower, and of tokens in the language model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..inputs.references import VISION_MERGE

VISION_ROPE_BASE = 10000.0


def patch_axes(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Row and column of every patch, each [patches], in the order of `vision_patches`."""
    blocks = (rows // VISION_MERGE, VISION_MERGE, columns // VISION_MERGE, VISION_MERGE)
    row = torch.arange(rows)[:, None].expand(rows, columns)
    column = torch.arange(columns).expand(rows, columns)
    return tuple(axis.reshape(blocks).transpose(1, 2).flatten() for axis in (row, column))


def two_taps(index: Tensor, length: int, side: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """The neighbours of each `index` of `length` on an axis of `side` (corners aligned), and their weights [n, 2]."""
    at = index.float() * (side - 1) / max(length - 1, 1)
    low = at.floor()
    weight = at - low
    low = low.long()
    return (low, (low + 1).clamp(max=side - 1)), torch.stack([1 - weight, weight], dim=1)


def _frequencies(base: float, dim: int, device: torch.device) -> Tensor:
    # Computed on the CPU, so that all devices use the same values.
    return (1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))).to(device)


def vision_rope(row: Tensor, column: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [patches, head_dim], fp32: the first half of the angles follows the row, the second the
    column."""
    frequencies = _frequencies(VISION_ROPE_BASE, head_dim // 2, row.device)
    angles = torch.cat([axis.float()[:, None] * frequencies for axis in (row, column)], dim=-1)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def text_rope(positions: Tensor, base: float, head_dim: int, sections: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Cosines and sines [1, S, head_dim], fp32, of M-RoPE positions [3, S].

    The axes are interleaved: frequency 3k belongs to time, 3k + 1 to the row and 3k + 2 to the column, up to the ends
    of `sections`; all further ones belong to time.
    """
    frequencies = _frequencies(base, head_dim, positions.device)
    axis = torch.zeros(len(frequencies), dtype=torch.int64, device=positions.device)
    for i in (1, 2):
        axis[i : 3 * sections[i] : 3] = i
    angles = positions.float()[axis].T * frequencies  # [S, head_dim / 2]
    angles = torch.cat([angles, angles], dim=-1)[None]
    return angles.cos(), angles.sin()

"""RoPE over three axes, computed from the positions without a table, so that any position is valid.

A segment is a stretch of the sequence: a piece of text, or all tokens of one image.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..sequence import ImageSegment, Segment


def _angles(positions: range, dim: int, base: float, device: torch.device | str | None) -> Tensor:
    """Angles [len(positions), dim / 2], fp32: position * base^(-2k/dim)."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    inverse = 1.0 / torch.pow(base, exponents)
    return torch.outer(torch.arange(positions.start, positions.stop, dtype=torch.float32, device=device), inverse)


def rotation(
    segment: Segment, axes: tuple[int, int, int], base: float, device: torch.device | str | None = None
) -> Tensor:
    """RoPE of a segment's tokens as unit complex numbers [S, head_dim / 2], complex64.

    `axes` are the head dimensions of (frame, height, width). Complex numbers, because their product is one kernel;
    with real pairs it is twenty times slower on a CPU.
    """
    parts = [_angles(run, dim, base, device) for run, dim in zip(segment.axes(), axes, strict=True)]
    if isinstance(segment, ImageSegment):
        frame, height, width = parts  # [1, a], [h, b], [w, c]
        grid = (segment.height, segment.width)
        parts = [
            frame[:, None].expand(*grid, -1),
            height[:, None].expand(*grid, -1),
            width[None].expand(*grid, -1),
        ]
    angles = torch.cat(parts, dim=-1).flatten(0, -2)  # [S, head_dim / 2]
    return torch.complex(angles.cos(), angles.sin())


def apply_rope(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate the interleaved pairs (2k, 2k+1) of x [B, S, H, D] by `rope` [S, D / 2] in fp32; returns x's dtype."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))  # [B, S, H, D/2]
    return torch.view_as_real(pairs * rope[:, None]).flatten(-2).to(x.dtype)

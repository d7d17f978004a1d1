"""The Hadamard rotation of weights and activations, in groups of channels."""

from __future__ import annotations

import torch
from torch import Tensor

GROUPS = (4, 16, 64, 256, 1024, 4096)  # sizes of a group of rotated channels: powers of four


def hadamard(group: int) -> Tensor:
    """The Hadamard rotation of one group [group, group], fp32: a Kronecker power, symmetric and its own inverse.

    Source: ConvRot, as comfy-kitchen packs it. The entries are powers of two, exact in bf16.
    """
    if group not in GROUPS:
        raise ValueError(f"group is {group}, expected a power of 4")
    base = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]) / 2
    result = base
    while len(result) < group:
        result = torch.kron(result, base)
    return result


def hadamard_rotate(x: Tensor, matrix: Tensor) -> Tensor:
    """x [..., n * group] with each group of its last axis rotated by `matrix` [group, group], in the dtype of x."""
    return (x.unflatten(-1, (-1, len(matrix))) @ matrix.to(x)).flatten(-2)

"""The whole sequence in one pass under a dense mask: slow, and the reference for prefill and denoise."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qwen21.mini.training.joint_pass import velocity
from qwen21.models.dit import DiT


def full_sequence_pass(
    dit: DiT, text: Tensor, references: Sequence[Tensor], slots: Sequence[int], target: Tensor, sigma: float
) -> Tensor:
    """Velocity [B, C, h, w] of a target [B, C, h, w] behind text [T, width] and references [C, h, w].

    This is the pass that training takes gradients of. It shares the layers with prefill and denoise, and neither their
    loops nor their order: it has one mask, and modulates each token by itself.
    """
    batch = len(target)
    texts, pictures = text.expand(batch, -1, -1), [each.expand(batch, -1, -1, -1) for each in references]
    return velocity(dit, texts, pictures, slots, target, torch.full((batch,), sigma))

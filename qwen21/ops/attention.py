"""Attention over segments: exact, without a mask over the whole sequence.

An attention function takes q [B, H, n, D], k and v [B, H, m, D] and `mask` (boolean [n, m], True where seen) or
`causal=True` (only with n == m), and returns [B, H, n, D]. Pass another function to use another kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

CAUSAL_CHUNK = 1024  # query rows per masked call: no mask is larger than 1024 x m booleans


class AttentionFunction(Protocol):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """The attention result [B, H, n, D] of q [B, H, n, D], k and v [B, H, m, D]."""


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """PyTorch's own attention, softmax scale 1 / sqrt(D)."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)


def segment_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, attend: AttentionFunction = sdpa) -> Tensor:
    """Attention [B, H, n, D] of a segment's queries over all keys up to the segment's end.

    q [B, H, n, D] are the last n of the m positions of k and v [B, H, m, D]. An image segment sees every key; a text
    segment (`causal`) sees itself causally, aligned bottom-right. It runs in chunks whose size depends on lengths only,
    so that the same prefix always rounds the same way.
    """
    n, m = q.shape[2], k.shape[2]
    if not causal or n == 1:
        return attend(q, k, v)
    if n == m:
        return attend(q, k, v, causal=True)  # the prefix's first segment, which needs no mask tensor
    chunks = []
    for start in range(0, n, CAUSAL_CHUNK):
        stop = min(start + CAUSAL_CHUNK, n)
        seen = m - n + stop  # keys up to this chunk's end
        mask = torch.ones(stop - start, seen, dtype=torch.bool, device=q.device).tril(diagonal=m - n + start)
        chunks.append(attend(q[:, :, start:stop], k[:, :, :seen], v[:, :, :seen], mask=mask))
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=2)


def prefixed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix: Sequence[tuple[Tensor, Tensor]] = (),
    contiguous: tuple[Tensor, Tensor] | None = None,
    attend: AttentionFunction = sdpa,
) -> Tensor:
    """Attention [B, H, n, D] of a batch of targets over [prefix, target], unmasked.

    q, k, v [B, H, n, D] are the targets'. `prefix` holds the keys and values [1, H, m, D] of each KV block, or
    `contiguous` those of the whole prefix with room for n more. Rows run one by one and share one buffer for prefix and
    target, so a batch holds the prefix once.
    """
    if contiguous is not None:
        keys, values = contiguous  # each [1, H, m + n, D], the last n still to be filled
        filled = 0
    elif prefix:
        keys = torch.cat([*(keys for keys, _ in prefix), k[:1]], dim=2)  # [1, H, m + n, D]
        values = torch.cat([*(values for _, values in prefix), v[:1]], dim=2)
        filled = 1  # the first row's keys and values already follow the prefix
    else:
        return attend(q, k, v)
    tokens = k.shape[2]
    attended = []
    for row in range(len(q)):
        if row >= filled:
            keys[:, :, -tokens:] = k[row : row + 1]
            values[:, :, -tokens:] = v[row : row + 1]
        attended.append(attend(q[row : row + 1], keys, values))  # [1, H, n, D]
    return attended[0] if len(attended) == 1 else torch.cat(attended)

"""Attention over segments: exact, without a mask over the whole sequence.

An attention function takes q [B, H, n, D], k and v [B, H, m, D] and `mask` (boolean [n, m], True where seen) or
`causal=True` (only with n == m), and returns [B, H, n, D]. Pass another one to use another kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

CAUSAL_CHUNK = 1024  # query rows per masked call: a mask of 1024 x m booleans is the largest ever built


class AttentionFunction(Protocol):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """q [B, H, n, D], k and v [B, H, m, D] -> [B, H, n, D]."""


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """PyTorch's own attention, softmax scale 1 / sqrt(D)."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)


def segment_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, attend: AttentionFunction = sdpa) -> Tensor:
    """Queries of the last segment over all keys up to that segment's own end.

    q [B, H, n, D] are the last n of the m positions of k and v [B, H, m, D]. An image segment sees everything; a text
    segment (`causal`) sees itself causally, aligned bottom-right, in chunks whose size follows from lengths alone, so
    that the same prefix always rounds the same way.
    """
    n, m = q.shape[2], k.shape[2]
    if not causal or n == 1:
        return attend(q, k, v)
    if n == m:
        return attend(q, k, v, causal=True)  # the prefix's first segment: no mask at any length
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
    """Queries of a batch of targets over [prefix, target], unmasked: [B, H, n, D].

    q, k, v [B, H, n, D]; `prefix` are keys and values [1, H, m, D] of one piece after another, or `contiguous` has them
    in one piece with room for n more. Rows run one by one in one buffer of a prefix and a target, so a batch holds the
    prefix once.
    """
    if contiguous is not None:
        keys, values = contiguous  # each [1, H, m + n, D], the last n still to be filled
        filled = 0
    elif prefix:
        keys = torch.cat([*(keys for keys, _ in prefix), k[:1]], dim=2)  # [1, H, m + n, D]
        values = torch.cat([*(values for _, values in prefix), v[:1]], dim=2)
        filled = 1  # the first row's own keys and values are behind the prefix already
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

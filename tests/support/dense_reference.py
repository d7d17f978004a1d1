"""The whole sequence in one pass under a dense mask: slow, and the reference for prefill + denoise."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from qwen21.models.dit import DiT
from qwen21.ops.rope import rotation
from qwen21.sequence import block_ids, prefix_layout


def full_sequence_pass(dit: DiT, text, references, slots, target, sigma):
    """Velocity [B, C, h, w] from all tokens in one sequence: per-token modulation, one dense boolean mask."""
    grid = tuple(target.shape[-2:])
    layout = prefix_layout(len(text), slots, [tuple(r.shape[-2:]) for r in references])
    segments = [*layout.segments, layout.target(grid)]
    ids = torch.tensor(block_ids(layout, grid))
    order = torch.arange(len(ids))
    mask = (order[:, None] >= order[None]) | ((ids[:, None] == ids[None]) & (ids[:, None] >= 0))
    is_target = (order >= layout.length)[None, :, None]
    texts = dit.txt_in(text[None])
    parts = []
    for segment in layout.segments:
        if hasattr(segment, "first"):
            parts.append(texts[:, segment.first : segment.first + segment.length])
        else:
            parts.append(dit.img_in(references[segment.index].flatten(1).T[None]))
    x = torch.cat(
        [
            torch.cat(parts, 1).expand(len(target), -1, -1) if parts else texts[:, :0],
            dit.img_in(target.flatten(2).transpose(1, 2)),
        ],
        1,
    )
    rope = torch.cat([rotation(s, dit.config.rope_axes, dit.config.rope_base) for s in segments])
    zero, now = (dit.time_text_embed["timestep_embedder"](torch.tensor(s), text.dtype) for s in (0.0, sigma))
    modulations = [torch.where(is_target, b, a).chunk(4, -1) for a, b in [(dit.modulation(zero), dit.modulation(now))]]
    scale1, gate1, scale2, gate2 = modulations[0]
    for block in dit.transformer_blocks:
        q, k, v = block.attn.qkv(F.layer_norm(x, x.shape[-1:], eps=block.eps) * (1 + scale1), rope)
        scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
        attended = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        x = x + gate1.tanh() * block.attn.output(attended)
        x = x + gate2.tanh() * block.img_mlp(F.layer_norm(x, x.shape[-1:], eps=block.eps) * (1 + scale2))
    x = x[:, layout.length :]
    scale = 1 + dit.norm_out["linear"](F.silu(now))
    v = dit.proj_out(F.layer_norm(x, x.shape[-1:], eps=dit.config.eps) * scale)
    return v.transpose(1, 2).unflatten(2, grid)

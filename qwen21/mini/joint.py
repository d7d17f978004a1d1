"""The whole model over a batch, with gradients: what training runs in place of prefill and denoise.

All prompts of a batch have one length and all pictures one place in the sequence, so nothing is padded. The sequence
is computed at once under a mask, as `tests/joint.py` does for one prompt; sampling never comes here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dit import DiT
from ..encoder import TextEncoder, text_rope
from ..prompt import TokenLayout
from ..rope import rotation
from ..sequence import ImageSegment, block_ids, prefix_layout


def text_states(encoder: TextEncoder, ids: Tensor, layout: TokenLayout, patches: Sequence[Tensor]) -> Tensor:
    """States [B, T, width] of the kept tokens.

    ids [B, S] differ within a batch, their `layout` does not; `patches` holds for each reference of the prompt what
    `vision_patches` makes of the pictures of the batch, one after another.
    """
    hidden = encoder.language_model.embed_tokens(ids)
    pictures = []
    for rows, span, (height, width) in zip(patches, layout.images, layout.blocks, strict=True):
        features = encoder.encode_vision(rows, (1, 2 * height, 2 * width))
        batched = [part.view(len(ids), len(span), -1) for part in (features.embeds, *features.deepstack)]
        pictures.append((span, batched))
        hidden = torch.cat([hidden[:, : span.start], batched[0].to(hidden), hidden[:, span.stop :]], dim=1)
    text = encoder.config.text
    cos, sin = text_rope(layout.positions(), text.rope_base, text.head_dim, text.mrope_sections)
    for i, layer in enumerate(encoder.language_model.layers):
        hidden = layer(hidden, position_embeddings=(cos, sin), attention_mask=None)
        for span, (_, *deepstack) in pictures:
            if i < len(deepstack):
                before, inside, behind = hidden.split([span.start, len(span), hidden.shape[1] - span.stop], dim=1)
                hidden = torch.cat([before, inside + deepstack[i], behind], dim=1)
    return hidden[:, list(layout.kept)]


def velocity(
    dit: DiT, text: Tensor, references: Sequence[Tensor], slots: Sequence[int], target: Tensor, sigma: Tensor
) -> Tensor:
    """Velocity [B, C, h, w] of targets [B, C, h, w] at noise levels sigma [B].

    text [B, T, text_width]; references [B, C, h, w] normalised latents, each behind its slot's number of text tokens.
    """
    grid = tuple(target.shape[-2:])
    layout = prefix_layout(text.shape[1], slots, [tuple(reference.shape[-2:]) for reference in references])
    segments = [*layout.segments, layout.target(grid)]
    axes, base = dit.config.rope_axes, dit.config.rope_base
    turn = torch.cat([rotation(segment, axes, base) for segment in segments])
    ids = torch.tensor(block_ids(layout, grid))
    order = torch.arange(len(ids))
    mask = (order[:, None] >= order) | ((ids[:, None] == ids) & (ids >= 0))  # query i sees key j

    words = dit.txt_in(text)
    pictures = [dit.img_in(reference.flatten(2).transpose(1, 2)) for reference in (*references, target)]
    x = torch.cat(
        [
            pictures[segment.index] if isinstance(segment, ImageSegment) else words[:, segment.states]
            for segment in segments
        ],
        dim=1,
    )
    embed = dit.time_text_embed["timestep_embedder"]
    before, now = embed(torch.zeros(1), torch.float32), embed(sigma, torch.float32)
    spans = (layout.length, x.shape[1] - layout.length)
    scale1, gate1, scale2, gate2 = (
        torch.cat([part[:, None].expand(len(x), count, -1) for part, count in zip(parts, spans, strict=True)], dim=1)
        for parts in zip(*(dit.modulation(embedding).chunk(4, -1) for embedding in (before, now)), strict=True)
    )
    scale1, gate1, scale2, gate2 = 1 + scale1, gate1.tanh(), 1 + scale2, gate2.tanh()
    for block in dit.transformer_blocks:
        q, k, v = block.attn.project(F.layer_norm(x, x.shape[-1:], eps=block.eps) * scale1, turn)
        x = x + gate1 * block.attn.output(dit.attend(q, k, v, mask=mask))
        x = x + gate2 * block.img_mlp(F.layer_norm(x, x.shape[-1:], eps=block.eps) * scale2)
    x = F.layer_norm(x[:, layout.length :], x.shape[-1:], eps=dit.config.eps)
    x = x * (1 + dit.norm_out["linear"](F.silu(now)))[:, None]
    return dit.proj_out(x).transpose(1, 2).unflatten(2, grid)

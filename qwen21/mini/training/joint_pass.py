"""Run the whole model over a batch, with gradients: training uses it in place of prefill and denoise.

All prompts of a batch have one length and all pictures one place in the sequence, so nothing is padded. The sequence
is computed at once under a mask. Sampling does not use it; tests compare prefill and denoise with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...inputs.prompt import TokenLayout
from ...models.dit import DiT
from ...models.dit_block import Block
from ...models.qwen3vl_positions import text_rope
from ...models.text_encoder import TextEncoder
from ...ops.attention import AttentionFunction
from ...ops.rope import rotation
from ...sequence import ImageSegment, block_ids, prefix_layout


def text_states(encoder: TextEncoder, ids: Tensor, layout: TokenLayout, patches: Sequence[Tensor]) -> Tensor:
    """States [B, T, width] of the kept tokens.

    ids [B, S] differ within a batch, their `layout` does not. `patches` holds, for each reference of the prompt, the
    result of `vision_patches` for the batch's pictures, concatenated.
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


def run_whole_block(
    block: Block,
    attend: AttentionFunction,
    x: Tensor,
    scale1: Tensor,
    gate1: Tensor,
    scale2: Tensor,
    gate2: Tensor,
    rope: Tensor,
    mask: Tensor,
) -> Tensor:
    """Run a block over the whole sequence x [B, S, width], each token with its own scales and gates."""
    q, k, v = block.attn.qkv(_norm(x, block.eps) * scale1, rope)
    x = x + gate1 * block.attn.output(attend(q, k, v, mask=mask))
    return x + gate2 * block.img_mlp(_norm(x, block.eps) * scale2)


def _norm(x: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=eps)


def velocity(
    dit: DiT,
    text: Tensor,
    references: Sequence[Tensor],
    slots: Sequence[int],
    target: Tensor,
    sigma: Tensor,
    run_block: Callable[..., Tensor] = run_whole_block,
) -> Tensor:
    """Velocity [B, C, h, w] of targets [B, C, h, w] at noise levels sigma [B].

    text [B, T, text_width]; references [B, C, h, w] are normalised latents, each placed after `slots[i]` text tokens.
    `run_block` is `run_whole_block`, or a compiled version of it.
    """
    grid = tuple(target.shape[-2:])
    layout = prefix_layout(text.shape[1], slots, [tuple(reference.shape[-2:]) for reference in references])
    segments = [*layout.segments, layout.target(grid)]
    axes, base = dit.config.rope_axes, dit.config.rope_base
    rope = torch.cat([rotation(segment, axes, base) for segment in segments])
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
    before, now = embed(torch.zeros(1), text.dtype), embed(sigma, text.dtype)
    spans = (layout.length, x.shape[1] - layout.length)
    scale1, gate1, scale2, gate2 = (
        torch.cat([part[:, None].expand(len(x), count, -1) for part, count in zip(parts, spans, strict=True)], dim=1)
        for parts in zip(*(dit.modulation(embedding).chunk(4, -1) for embedding in (before, now)), strict=True)
    )
    scale1, gate1, scale2, gate2 = 1 + scale1, gate1.tanh(), 1 + scale2, gate2.tanh()
    *blocks, last = dit.transformer_blocks
    for block in blocks:
        x = run_block(block, dit.attend, x, scale1, gate1, scale2, gate2, rope, mask)
    # Only the target is read from the last block's output.
    q, k, v = last.attn.qkv(_norm(x, last.eps) * scale1, rope)
    x, gate1, scale2, gate2 = (part[:, layout.length :] for part in (x, gate1, scale2, gate2))
    x = x + gate1 * last.attn.output(dit.attend(q[:, :, layout.length :], k, v, mask=mask[layout.length :]))
    x = x + gate2 * last.img_mlp(_norm(x, last.eps) * scale2)
    x = _norm(x, dit.config.eps)
    x = x * (1 + dit.norm_out["linear"](F.silu(now)))[:, None]
    return dit.proj_out(x).transpose(1, 2).unflatten(2, grid)

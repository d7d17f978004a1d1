"""Prefill of a whole prefix in one pass, with FlexAttention and a block mask that lets it skip unseen blocks.

An alternative to `DiT.prefill`, which runs KV block by KV block. It is as exact, but rounds differently and holds the
activations of all tokens at once. `tests.bench.paths` compares the times of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from ..errors import UserError
from ..prefix import NATIVE, Codec, KVBlock, Prefix
from ..sequence import PrefixLayout, block_ids, prefix_layout
from .dit import DiT

BLOCK = 128  # tokens per side of the mask's blocks
MOST_UNCOMPILED = 2048  # tokens; above, uncompiled FlexAttention would hold gigabytes of scores


class FlexPrefill:
    """Prefills whole prefixes. Compiled once for all lengths on a GPU, once for each length on a CPU."""

    def __init__(self, compiled: bool = True) -> None:
        self._compiled = compiled
        self._attend: dict[str, Callable[..., Tensor]] = {}

    def __call__(
        self,
        dit: DiT,
        text: Tensor,
        references: Sequence[Tensor] = (),
        slots: Sequence[int] = (),
        *,
        codec: Codec = NATIVE,
        storage: torch.device | str | None = None,
        check_cancel: Callable[[], None] = lambda: None,
    ) -> Prefix:
        """K and V of a prefix, as `DiT.prefill` returns. Raises `UserError` also for a long prefix if not compiled."""
        dit.check_inputs(text, references)
        layout = prefix_layout(text.shape[0], slots, [tuple(r.shape[-2:]) for r in references])
        if not self._compiled and layout.length > MOST_UNCOMPILED:
            raise UserError(
                f"FlexAttention uncompiled would hold all scores of {layout.length} tokens; compile it, or prefill by "
                "units"
            )
        prefix = Prefix(layout, [KVBlock(tokens, codec) for tokens in layout.kv_block_tokens])
        _, modulation = dit.modulate(torch.zeros((), device=text.device), text.dtype)
        rope = torch.cat([dit.rotation(segment, text.device) for segment in layout.segments])
        x = torch.cat([dit.embed(segment, text, references) for segment in layout.segments], dim=1)
        mask, attend = block_mask(layout, text.device), self._attention(text.device)
        storage = text.device if storage is None else torch.device(storage)
        *before, last = dit.transformer_blocks
        for block in (*before, last):
            check_cancel()
            q, k, v = block.qkv(x, modulation, rope, dit.kernels)
            parts = (tensor.split([kv_block.tokens for kv_block in prefix.kv_blocks], dim=2) for tensor in (k, v))
            for kv_block, keys, values in zip(prefix.kv_blocks, *parts, strict=True):
                kv_block.append(keys.clone(), values.clone(), storage, len(dit.transformer_blocks))
            if block is not last:  # nothing reads the last block's output
                x = block.attn_out_mlp(x, attend(q, k, v, block_mask=mask), modulation, dit.kernels)
        for kv_block in prefix.kv_blocks:
            kv_block.synchronize()
        return prefix

    def _attention(self, device: torch.device) -> Callable[..., Tensor]:
        if not self._compiled:
            return flex_attention
        if device.type not in self._attend:
            # A kernel with dynamic lengths does not compile on a CPU (PyTorch 2.13).
            self._attend[device.type] = torch.compile(flex_attention, dynamic=device.type != "cpu")
        return self._attend[device.type]


def block_mask(layout: PrefixLayout, device: torch.device) -> BlockMask:
    """The attention mask of a prefix: every token sees those before it, an image token also all of its image."""
    blocks = torch.tensor(block_ids(layout), device=device)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) | ((blocks[query] == blocks[key]) & (blocks[query] >= 0))

    return create_block_mask(sees, None, None, layout.length, layout.length, device=device, BLOCK_SIZE=BLOCK)

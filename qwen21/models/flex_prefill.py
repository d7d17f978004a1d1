"""A prefix in one pass: every layer of all its tokens at once, under a mask of blocks that FlexAttention skips by.

Beside `DiT.prefill`, which goes KV block by KV block: as exact, but it rounds differently, and all tokens' activations
are alive at once. `tests.bench.paths` times one beside the other.
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

BLOCK = 128  # tokens a side of the mask's blocks
MOST_UNCOMPILED = 2048  # tokens: beyond, plain FlexAttention would hold gigabytes of scores


class FlexPrefill:
    """Prefills whole prefixes; compiled once for all lengths on a GPU, once for each on a CPU."""

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
        """As `DiT.prefill`. Raises `UserError` too where it is not compiled and the prefix is long."""
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
            parts = (side.split([kv_block.tokens for kv_block in prefix.kv_blocks], dim=2) for side in (k, v))
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
            # On a CPU the kernel for any length does not compile (PyTorch 2.13).
            self._attend[device.type] = torch.compile(flex_attention, dynamic=device.type != "cpu")
        return self._attend[device.type]


def block_mask(layout: PrefixLayout, device: torch.device) -> BlockMask:
    """Who sees whom: text what is before it, an image block all of itself as well."""
    blocks = torch.tensor(block_ids(layout), device=device)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) | ((blocks[query] == blocks[key]) & (blocks[query] >= 0))

    return create_block_mask(sees, None, None, layout.length, layout.length, device=device, BLOCK_SIZE=BLOCK)

"""A prefix in one pass: every layer of all its missing tokens at once, under a mask of blocks that FlexAttention skips.

Beside `DiT.prefill`, which goes KV block by KV block: as exact, but it rounds differently, and the activations of all
missing tokens are alive at once. `tests.bench.paths` times one beside the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from ..config.networks import DiTConfig
from ..errors import UserError
from ..prefix import NATIVE, Codec, KVBlock, LayerReader, Prefix
from ..sequence import PrefixLayout, block_ids
from .dit import DiT, seconds

BLOCK = 128  # tokens a side of the mask's blocks
MOST_UNCOMPILED = 2048  # tokens: beyond, plain FlexAttention would hold gigabytes of scores


class FlexPrefill:
    """Prefills prefixes for `dit`; compiled once for all lengths on a GPU, once for each length on a CPU."""

    def __init__(self, dit: DiT, compiled: bool = True) -> None:
        self.dit = dit
        self._compiled = compiled
        self._attend: dict[str, Callable[..., Tensor]] = {}

    @property
    def config(self) -> DiTConfig:
        return self.dit.config

    def prefill(
        self,
        text: Tensor,
        references: Sequence[Tensor] = (),
        slots: Sequence[int] = (),
        *,
        cached: Sequence[KVBlock] = (),
        codec: Codec = NATIVE,
        storage: torch.device | str | None = None,
        check_cancel: Callable[[], None] = lambda: None,
    ) -> Prefix:
        """As `DiT.prefill`. Raises `UserError` too where it is not compiled and the prefix is long."""
        dit = self.dit
        layout = dit.layout_of(text, references, slots)
        if not self._compiled and layout.length > MOST_UNCOMPILED:
            raise UserError(
                f"FlexAttention uncompiled would hold all scores of {layout.length} tokens; add --compile, or prefill "
                "by segments"
            )
        missing = layout.kv_blocks[len(cached) :]
        if not missing:
            return Prefix(layout, cached)
        started = seconds(text.device)
        segments = [segment for kv_block in missing for segment in kv_block]
        start, tokens = segments[0].offset, layout.kv_block_tokens[len(cached) :]
        made = [KVBlock(count, codec) for count in tokens]
        _, modulation = dit.modulate(torch.zeros((), device=text.device), text.dtype)
        rope = torch.cat([dit.rotation(segment, text.device) for segment in segments])
        x = torch.cat([dit.embed(segment, text, references) for segment in segments], dim=1)  # [1, S, width]
        mask, attend = block_mask(layout, text.device, start), self._attention(text.device)
        storage = text.device if storage is None else torch.device(storage)
        read = LayerReader(cached, x.device, x.dtype) if cached else None
        layers = len(dit.transformer_blocks)
        for layer, block in enumerate(dit.transformer_blocks):
            check_cancel()
            q, k, v = block.qkv(x, modulation, rope, dit.kernels)  # each [1, H, S, D]
            for kv_block, keys, values in zip(made, k.split(tokens, dim=2), v.split(tokens, dim=2), strict=True):
                kv_block.append(keys.clone(), values.clone(), storage, layers)
            if layer == layers - 1:  # nothing reads the last block's output
                break
            earlier = read(layer) if read else []
            k = torch.cat([*(keys for keys, _ in earlier), k], dim=2)  # [1, H, start + S, D]
            v = torch.cat([*(values for _, values in earlier), v], dim=2)
            x = block.attn_out_mlp(x, attend(q, k, v, block_mask=mask), modulation, dit.kernels)
        for kv_block in made:
            kv_block.synchronize()
        took = seconds(text.device) - started
        for kv_block in made:
            kv_block.seconds = took * kv_block.tokens / sum(tokens)
        return Prefix(layout, [*cached, *made])

    def _attention(self, device: torch.device) -> Callable[..., Tensor]:
        if not self._compiled:
            return flex_attention
        if device.type not in self._attend:
            # On a CPU the kernel for any length does not compile (PyTorch 2.13).
            self._attend[device.type] = torch.compile(flex_attention, dynamic=device.type != "cpu")
        return self._attend[device.type]


def block_mask(layout: PrefixLayout, device: torch.device, start: int = 0) -> BlockMask:
    """Who sees whom, for queries from the token `start` on: text what is before it, an image all of itself as well."""
    blocks = torch.tensor(block_ids(layout), device=device)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        query = query + start
        return (query >= key) | ((blocks[query] == blocks[key]) & (blocks[query] >= 0))

    queries = layout.length - start
    return create_block_mask(sees, None, None, queries, layout.length, device=device, BLOCK_SIZE=BLOCK)

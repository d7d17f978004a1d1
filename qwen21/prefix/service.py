"""The one way from a prefix's inputs to its keys and values: stored KV blocks are taken, missing ones prefilled.

The pipeline and the nodes both ask `PrefixService`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from ..config.networks import DiTConfig
from ..sequence import PrefixLayout, prefix_layout
from .codecs import CODECS, Codec, codec_named, fitting_codec, kv_block_bytes
from .contiguous import ContiguousKV
from .host_memory import same_device
from .keys import kv_block_names
from .kv import KVBlock, Prefix
from .placement import Placement
from .reuse import Reuse
from .store import ModelIdentity, Store

# Bytes that the device does not hold yet, and stored KV blocks that the prefix begins with -> where the prefix is kept.
Place = Callable[[int, Sequence[KVBlock]], torch.device]


class Prefiller(Protocol):
    """What computes prefixes: the diffusion transformer."""

    config: DiTConfig

    def prefill(
        self, text: Tensor, references: Sequence[Tensor], slots: Sequence[int], *, codec: Codec, **options: Any
    ) -> Prefix:
        """K and V of a prefix; `options` are those of `DiT.prefill`."""


@dataclass(frozen=True)
class PrefixInputs:
    """What `DiT.prefill` takes, and a name for each KV block of it (`kv_block_keys`).

    text [T, text_width] in the compute dtype, references [C, h, w] normalised latents, slots the number of text tokens
    before each reference.
    """

    text: Tensor
    references: Sequence[Tensor]
    slots: Sequence[int]
    keys: tuple[str, ...]

    @cached_property
    def layout(self) -> PrefixLayout:
        return prefix_layout(len(self.text), self.slots, [tuple(r.shape[-2:]) for r in self.references])

    def nbytes(self, config: DiTConfig, codec: Codec, stored: int = 0) -> int:
        """Bytes of the prefix under `codec`, without its first `stored` KV blocks."""
        tokens = self.layout.kv_block_tokens[stored:]
        return sum(kv_block_bytes(config, n, self.text.dtype, codec) for n in tokens)


@dataclass(frozen=True)
class RunLocal:
    """Why a prefix may serve no other run: `kind` is what the report calls it (off or miss), `reason` says why."""

    kind: str
    reason: str


@dataclass(frozen=True)
class PrefixService:
    """Prefixes for one run of one host.

    `placement` says where they are kept beside the run's activations, and owns the store. `codec` is auto or the name
    of one. `identity` tells, for a codec's name, under which model identity other runs may reuse a prefix, or why they
    may not.
    """

    dit: Prefiller
    placement: Placement
    codec: str
    identity: Callable[[str], ModelIdentity | RunLocal]
    lays_out: bool | None = None  # see `Backend`

    def get(self, inputs: PrefixInputs, **prefill: Any) -> tuple[Prefix, Reuse]:
        """The prefix of `inputs` and what became of it; further keywords go to `DiT.prefill`."""
        codec = self._codec_for(inputs)
        identity, place = self.identity(codec), self.placement.place
        if isinstance(identity, RunLocal):
            return run_local_prefix(self.dit, inputs, codec, place, identity.kind, identity.reason, **prefill)
        return stored_prefix(self.placement.store, identity, self.dit, inputs, place, **prefill)

    def lay_out(self, prefix: Prefix, tokens: int, dtype: torch.dtype) -> ContiguousKV | None:
        """`prefix` decoded in one piece a layer, with room for a target of `tokens` tokens, where that fits beside the
        run's activations; None where it does not, or where nothing is known of the device's memory."""
        if not (self._fits(prefix, tokens, dtype) if self.lays_out is None else self.lays_out):
            return None
        return ContiguousKV(prefix, tokens, self.dit.config.layers, self.placement.device, dtype)

    def _fits(self, prefix: Prefix, tokens: int, dtype: torch.dtype) -> bool:
        spare = self.placement.spare()
        needed = ContiguousKV.nbytes(self.dit.config, prefix.length, tokens, dtype)
        return spare is not None and ContiguousKV.fits(needed, self.placement.working, spare)

    def _codec_for(self, inputs: PrefixInputs) -> str:
        if self.codec != "auto":
            return self.codec
        sizes = {name: inputs.nbytes(self.dit.config, codec) for name, codec in CODECS.items()}
        return fitting_codec(sizes, *self.placement.room())


def stored_prefix(
    store: Store, identity: ModelIdentity, dit: Prefiller, inputs: PrefixInputs, place: Place, **prefill: Any
) -> tuple[Prefix, Reuse]:
    """The prefix of `inputs`: its longest stored match, and the rest prefilled and stored.

    `place` says where to keep it; further keywords go to `DiT.prefill`. Batches, both guidance branches and later runs
    share what they have in common.
    """
    codec, device = codec_named(identity.codec), inputs.text.device
    why = store.why_missing(identity, inputs.keys, kv_block_names(inputs.layout))
    cached = store.longest_match(identity, inputs.keys)
    absent = sum(kv_block.nbytes for kv_block in cached if not same_device(kv_block.device, device))
    storage = place(absent + inputs.nbytes(dit.config, codec, len(cached)), cached)
    for kv_block in cached:
        kv_block.move(storage)
    prefix = dit.prefill(
        inputs.text, inputs.references, inputs.slots, cached=cached, codec=codec, storage=storage, **prefill
    )
    store.add(identity, inputs.keys, prefix.kv_blocks)
    reuse = Reuse.of(prefix, len(cached), why)
    store.count(reuse)
    return prefix, reuse


def run_local_prefix(
    dit: Prefiller, inputs: PrefixInputs, codec: str, place: Place, kind: str, reason: str, **prefill: Any
) -> tuple[Prefix, Reuse]:
    """The prefix of `inputs`, all prefilled and kept by nobody else: `kind` and `reason` say why."""
    kept = codec_named(codec)
    storage = place(inputs.nbytes(dit.config, kept), ())
    prefix = dit.prefill(inputs.text, inputs.references, inputs.slots, codec=kept, storage=storage, **prefill)
    return prefix, Reuse.of(prefix, 0, reason, kind)

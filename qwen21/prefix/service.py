"""The prefix service: takes a prefix's inputs, reuses its stored KV blocks and prefills the missing ones.

Both the pipeline and the nodes use `PrefixService`.
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

# Takes the bytes that the device does not hold yet and the stored KV blocks that the prefix begins with; returns the
# device to keep the prefix on.
Place = Callable[[int, Sequence[KVBlock]], torch.device]


class Prefiller(Protocol):
    """The part of the diffusion transformer that computes prefixes."""

    config: DiTConfig

    def prefill(
        self, text: Tensor, references: Sequence[Tensor], slots: Sequence[int], *, codec: Codec, **options: Any
    ) -> Prefix:
        """K and V of a prefix; `options` are further parameters of `DiT.prefill`."""


@dataclass(frozen=True)
class PrefixInputs:
    """The inputs of `DiT.prefill`, and the key of each of their KV blocks, from `kv_block_keys`.

    text [T, text_width] is in the compute dtype, references [C, h, w] are normalised latents, and slots hold the number
    of text tokens before each reference.
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
    """The mark of a prefix that other runs may not reuse: `kind` is its kind in reports (off or miss), `reason` why."""

    kind: str
    reason: str


@dataclass(frozen=True)
class PrefixService:
    """Gives one run its prefixes.

    `placement` decides where prefixes are kept beside the run's activations, and holds the store. `codec` is auto or a
    codec's name. `identity` takes a codec's name and returns the model identity under which other runs may reuse a
    prefix, or a `RunLocal` that says why they may not. `lays_out` is that of `ops.backend.Backend`.
    """

    dit: Prefiller
    placement: Placement
    codec: str
    identity: Callable[[str], ModelIdentity | RunLocal]
    lays_out: bool | None = None

    def get(self, inputs: PrefixInputs, **prefill: Any) -> tuple[Prefix, Reuse]:
        """The prefix of `inputs` and how much of it was reused; further keywords go to `DiT.prefill`."""
        codec = self._codec_for(inputs)
        identity, place = self.identity(codec), self.placement.place
        if isinstance(identity, RunLocal):
            return run_local_prefix(self.dit, inputs, codec, place, identity.kind, identity.reason, **prefill)
        return stored_prefix(self.placement.store, identity, self.dit, inputs, place, **prefill)

    def lay_out(self, prefix: Prefix, tokens: int, dtype: torch.dtype) -> ContiguousKV | None:
        """`prefix` decoded to one tensor per layer, with room for a target of `tokens` tokens. None where that does not
        fit beside the run's activations, or where the device's free memory is unknown."""
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
    """The prefix of `inputs`: the longest match in `store`, with the rest prefilled and stored.

    `place` returns the device to keep it on; further keywords go to `DiT.prefill`. Batches, both guidance branches and
    later runs share the KV blocks that they have in common.
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
    """The prefix of `inputs`, prefilled as a whole and not stored; `kind` and `reason` go into its report."""
    kv_codec = codec_named(codec)
    storage = place(inputs.nbytes(dit.config, kv_codec), ())
    prefix = dit.prefill(inputs.text, inputs.references, inputs.slots, codec=kv_codec, storage=storage, **prefill)
    return prefix, Reuse.of(prefix, 0, reason, kind)

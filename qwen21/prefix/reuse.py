"""A prefix by way of the store: what is there is taken, the rest is prefilled and kept, and both are reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..sequence import PrefixLayout, prefix_layout
from .codecs import CODECS, Codec, codec_named, fitting_codec, kv_block_bytes
from .keys import kv_block_names
from .kv import KVBlock, Prefix
from .store import ModelIdentity, Store
from .transfer import same_device

if TYPE_CHECKING:
    from ..models.dit import DiT

# Bytes that the device does not hold yet, and stored KV blocks that the prefix begins with -> where the prefix is kept.
Place = Callable[[int, Sequence[KVBlock]], torch.device]


@dataclass(frozen=True)
class Reuse:
    """What became of one prefix: `kind` is hit, partial, miss or off, tokens are counted, times are seconds, `codec`
    and `device` say how and where it is kept."""

    kind: str
    reused: int
    tokens: int
    reason: str = ""
    codec: str = "native"
    device: str = "cpu"
    spent: float = 0.0
    saved: float = 0.0

    @classmethod
    def of(cls, prefix: Prefix, reused: int, reason: str, kind: str | None = None) -> Reuse:
        """Of a prefix whose first `reused` KV blocks were there before."""
        old, new = prefix.kv_blocks[:reused], prefix.kv_blocks[reused:]
        return cls(
            kind or ("miss" if not old else "partial" if new else "hit"),
            sum(kv_block.tokens for kv_block in old),
            prefix.length,
            reason,
            prefix.kv_blocks[0].codec.name,
            prefix.kv_blocks[0].device.type,
            sum(kv_block.seconds for kv_block in new),
            sum(kv_block.seconds for kv_block in old),
        )

    def __str__(self) -> str:
        """Such as `partial: 4111 of 4139 tokens reused, 1.21 s saved (the text is new)`."""
        why = f" ({self.reason})" if self.reason else ""
        why = why if self.codec == "native" else f", kept as {self.codec}{why}"
        if self.kind == "hit":
            return f"hit: all {self.tokens} tokens reused, {self.saved:.2f} s saved{why}"
        if self.kind == "partial":
            return f"partial: {self.reused} of {self.tokens} tokens reused, {self.saved:.2f} s saved{why}"
        return f"{self.kind}: {self.tokens} tokens computed in {self.spent:.2f} s{why}"

    @property
    def facts(self) -> dict[str, Any]:
        """As JSON, without the times: the same for the same run."""
        names = ("kind", "reused", "tokens", "reason", "codec", "device")
        return {name: getattr(self, name) for name in names}

    @property
    def timed_facts(self) -> dict[str, Any]:
        return {**self.facts, "spent": round(self.spent, 3), "saved": round(self.saved, 3)}


@dataclass(frozen=True)
class PrefixInputs:
    """What `DiT.prefill` takes, and a name for each KV block of it (`kv_block_keys`)."""

    text: Tensor
    references: Sequence[Tensor]
    slots: Sequence[int]
    keys: tuple[str, ...]

    @cached_property
    def layout(self) -> PrefixLayout:
        return prefix_layout(len(self.text), self.slots, [tuple(r.shape[-2:]) for r in self.references])

    def nbytes(self, dit: DiT, codec: Codec, stored: int = 0) -> int:
        """Bytes of the prefix, but for its first `stored` KV blocks."""
        return sum(kv_block_bytes(dit.config, n, self.text.dtype, codec) for n in self.layout.kv_block_tokens[stored:])

    def codec(self, name: str, dit: DiT, device: int | None, ram: int) -> str:
        """A codec's name as it is; for `auto` the one that fits, see `fitting_codec`."""
        if name != "auto":
            return name
        return fitting_codec({each: self.nbytes(dit, codec) for each, codec in CODECS.items()}, device, ram)


def prefix_through(
    store: Store,
    identity: ModelIdentity,
    dit: DiT,
    inputs: PrefixInputs,
    place: Place,
    **prefill: Any,
) -> tuple[Prefix, Reuse]:
    """The prefix of some inputs: its stored cached, and the rest prefilled and stored.

    `place` says where to keep it; further keywords go to
    `DiT.prefill`. Batches, both branches and later runs share what they have in common.
    """
    codec, device = codec_named(identity.codec), inputs.text.device
    why = store.why_missing(identity, inputs.keys, kv_block_names(inputs.layout))
    cached = store.cached(identity, inputs.keys)
    absent = sum(kv_block.nbytes for kv_block in cached if not same_device(kv_block.device, device))
    storage = place(absent + inputs.nbytes(dit, codec, len(cached)), cached)
    for kv_block in cached:
        kv_block.move(storage)
    prefix = dit.prefill(
        inputs.text, inputs.references, inputs.slots, cached=cached, codec=codec, storage=storage, **prefill
    )
    store.add(identity, inputs.keys, prefix.kv_blocks)
    reuse = Reuse.of(prefix, len(cached), why)
    store.count(reuse)
    return prefix, reuse


def prefix_for_now(
    dit: DiT, inputs: PrefixInputs, codec: str, place: Place, kind: str, reason: str, **prefill: Any
) -> tuple[Prefix, Reuse]:
    """The prefix of some inputs, all prefilled and kept by nobody else: `kind` and `reason` say why."""
    kept = codec_named(codec)
    storage = place(inputs.nbytes(dit, kept), ())
    prefix = dit.prefill(inputs.text, inputs.references, inputs.slots, codec=kept, storage=storage, **prefill)
    return prefix, Reuse.of(prefix, 0, reason, kind)

"""Facts of a prefix for reports: how much of it was reused, why not more, and how it is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..sequence import PrefixLayout
from .kv import Prefix


@dataclass(frozen=True)
class Reuse:
    """The result of one prefix lookup: `kind` is hit, partial, miss or off; `reused` of its `tokens` were stored;
    `reason` says why not more; `spent` and `saved` are seconds; `codec` and `device` say how and where it is kept."""

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
        """The lookup's result for `prefix`, whose first `reused` KV blocks were stored before."""
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
        """One line, such as `partial: 4111 of 4139 tokens reused, 1.21 s saved (the text is new)`."""
        why = f" ({self.reason})" if self.reason else ""
        why = why if self.codec == "native" else f", kept as {self.codec}{why}"
        if self.kind == "hit":
            return f"hit: all {self.tokens} tokens reused, {self.saved:.2f} s saved{why}"
        if self.kind == "partial":
            return f"partial: {self.reused} of {self.tokens} tokens reused, {self.saved:.2f} s saved{why}"
        return f"{self.kind}: {self.tokens} tokens computed in {self.spent:.2f} s{why}"

    @property
    def facts(self) -> dict[str, Any]:
        """The result as JSON values without times, so that a repeated run gives the same."""
        names = ("kind", "reused", "tokens", "reason", "codec", "device")
        return {name: getattr(self, name) for name in names}

    @property
    def timed_facts(self) -> dict[str, Any]:
        return {**self.facts, "spent": round(self.spent, 3), "saved": round(self.saved, 3)}


@dataclass(frozen=True)
class PrefixFacts:
    """Facts of one prefix for reports, which do not keep its tensors alive."""

    layout: PrefixLayout
    kv_blocks: dict[int, int]  # bytes of each KV block by its id, because prefixes share some
    reuse: Reuse

    @classmethod
    def of(cls, prefix: Prefix, reuse: Reuse) -> PrefixFacts:
        """The facts of `prefix` in its present state."""
        return cls(prefix.layout, {id(kv_block): kv_block.nbytes for kv_block in prefix.kv_blocks}, reuse)

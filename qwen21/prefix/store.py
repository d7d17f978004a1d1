"""The prefix store: KV blocks of K and V that outlive a run, found again by what made them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch

from .host_memory import same_device
from .kv import KVBlock
from .reuse import Reuse

REMEMBERED = 1024  # KV blocks given up whose reason is still known


@dataclass(frozen=True)
class ModelIdentity:
    """What else K and V depend on besides a prefix's inputs. Two are equal where their prefixes may be shared.

    weights: the stamp of the network's files and config; patches: a content hash of the LoRAs in force, or ''. prefill:
    segments or flex, which round differently.
    """

    weights: str
    dtype: str
    codec: str
    patches: str = ""
    device: str = ""
    prefill: str = "segments"

    NAMES = {"weights": "another checkpoint", "dtype": "another dtype", "codec": "another K/V codec",
             "patches": "other LoRAs or strengths", "device": "another device",
             "prefill": "another way to prefill"}  # fmt: skip

    def changes(self, other: ModelIdentity) -> list[str]:
        """What differs, in words."""
        return [self.NAMES[f.name] for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)]


Key = tuple[ModelIdentity, str]


@dataclass
class Statistics:
    """What a store has done since it was made."""

    hits: int = 0
    partial: int = 0
    misses: int = 0
    tokens_reused: int = 0
    tokens_computed: int = 0
    seconds_saved: float = 0.0
    evicted: int = 0


class Store:
    """KV blocks by (model, what made them and all before them), within a budget of bytes; least recently used ones go.

    Chains are used from their heads, so a KV block is never kept longer than the ones before it. All methods may be
    called from any thread. A KV block that is given up lives on in the prefixes that hold it.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.statistics = Statistics()
        self._kv_blocks: OrderedDict[Key, KVBlock] = OrderedDict()  # least recently used first
        self._parents: dict[Key, Key | None] = {}
        self._gone: OrderedDict[Key, str] = OrderedDict()
        self._latest: ModelIdentity | None = None
        self._lock = threading.RLock()

    def longest_match(self, identity: ModelIdentity, keys: Sequence[str]) -> list[KVBlock]:
        """The stored KV blocks that a chain begins with, as many as there are."""
        with self._lock:
            found: list[KVBlock] = []
            for key in keys:
                kv_block = self._kv_blocks.get((identity, key))
                if kv_block is None:
                    break
                found.append(kv_block)
            self._touch(identity, keys[: len(found)])
            return found

    def holds(self, identity: ModelIdentity, keys: Sequence[str], device: torch.device | None = None) -> int:
        """How many KV blocks of a chain are stored, from its first, on a device or on any. Counts as no use."""
        with self._lock:
            kv_blocks = [self._kv_blocks.get((identity, key)) for key in keys]
            return next(
                (i for i, kv_block in enumerate(kv_blocks) if kv_block is None or not _lies(kv_block, device)),
                len(keys),
            )

    def add(self, identity: ModelIdentity, keys: Sequence[str], kv_blocks: Sequence[KVBlock]) -> None:
        """Keep a chain, as far as the budget goes: its head outlasts its tail."""
        with self._lock:
            self._latest = identity
            parent: Key | None = None
            kept = 0
            for key, kv_block in zip(keys, kv_blocks, strict=True):
                if self._kv_blocks.setdefault((identity, key), kv_block) is not kv_block:
                    break  # another thread made this one too: what was made behind ours must not be found behind it
                self._parents[identity, key] = parent
                self._gone.pop((identity, key), None)
                parent = identity, key
                kept += 1
            self._touch(identity, keys[:kept])
            self._drop(self.nbytes() - self.budget, lambda kv_block: True, "the store's budget was full")

    def why_missing(self, identity: ModelIdentity, keys: Sequence[str], names: Sequence[str]) -> str:
        """Why the first of `keys` that is not stored is not; `names` say what people call each KV block."""
        with self._lock:
            at = self.holds(identity, keys)
            if at == len(keys):
                return ""
            if (gone := self._gone.get((identity, keys[at]))) is not None:
                return f"{names[at]} was stored, but {gone}"
            if self._latest is None:
                return "nothing stored yet for this loaded model"
            if identity != self._latest and not any(identity == known for known, _ in self._kv_blocks):
                return ", ".join(identity.changes(self._latest))
            return f"new from {names[at]} on" if at < len(keys) - 1 else f"{names[at]} is new"

    def nbytes(self, device: torch.device | None = None) -> int:
        """Bytes stored, on a device or on all."""
        with self._lock:
            return sum(kv_block.nbytes for kv_block in self._kv_blocks.values() if _lies(kv_block, device))

    def release(
        self,
        nbytes: int,
        device: torch.device | None,
        why: str,
        to: torch.device | None = None,
        most: int | None = None,
        exclude: Sequence[KVBlock] = (),
    ) -> int:
        """Free at least `nbytes` of what lies on `device`, oldest first, and return how many were freed.

        KV blocks move to the device `to` if given, at most `most` bytes of them, else they go. Those to be used now are
        spared.
        """
        spared = {id(kv_block) for kv_block in exclude}
        with self._lock:
            if to is None:
                return self._drop(nbytes, lambda kv_block: _lies(kv_block, device) and id(kv_block) not in spared, why)
            freed = 0
            for kv_block in list(self._kv_blocks.values()):
                if freed >= nbytes:
                    break
                if (
                    id(kv_block) not in spared
                    and _lies(kv_block, device)
                    and (most is None or freed + kv_block.nbytes <= most)
                ):
                    freed += kv_block.nbytes
                    kv_block.move(to)
            return freed

    def clear(self, why: str) -> None:
        with self._lock:
            self._drop(self.nbytes(), lambda kv_block: True, why)

    def count(self, reuse: Reuse) -> None:
        """Take a finished lookup into the statistics."""
        with self._lock:
            numbers = self.statistics
            numbers.hits += reuse.kind == "hit"
            numbers.partial += reuse.kind == "partial"
            numbers.misses += reuse.kind == "miss"
            numbers.tokens_reused += reuse.reused
            numbers.tokens_computed += reuse.tokens - reuse.reused
            numbers.seconds_saved += reuse.saved

    def __len__(self) -> int:
        return len(self._kv_blocks)

    def _touch(self, identity: ModelIdentity, keys: Sequence[str]) -> None:
        for key in reversed(keys):  # the head last, so that it is the last to go
            self._kv_blocks.move_to_end((identity, key))

    def _drop(self, nbytes: int, wanted: Callable[[KVBlock], bool], why: str) -> int:
        freed = 0
        for key, kv_block in list(self._kv_blocks.items()):
            if freed >= nbytes:
                break
            if key in self._kv_blocks and wanted(kv_block):
                freed += self._forget(key, wanted, why)
        while len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)
        return freed

    def _forget(self, key: Key, wanted: Callable[[KVBlock], bool], why: str) -> int:
        """Drop a KV block and those behind it, which cannot be found without it; returns the freed bytes that count."""
        kv_block = self._kv_blocks.pop(key)
        del self._parents[key]
        self._gone[key] = why
        self.statistics.evicted += 1
        freed = kv_block.nbytes if wanted(kv_block) else 0
        for child in [child for child, parent in self._parents.items() if parent == key]:
            freed += self._forget(child, wanted, why)
        return freed


def _lies(kv_block: KVBlock, device: torch.device | None) -> bool:
    return device is None or same_device(kv_block.device, device)

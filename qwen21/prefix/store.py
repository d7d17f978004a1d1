"""The prefix store: KV blocks that outlive a run, looked up by keys of what they were computed from."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch

from .host_memory import same_device
from .kv import KVBlock
from .reuse import Reuse

REMEMBERED = 1024  # evicted KV blocks of which the reason is remembered


@dataclass(frozen=True)
class ModelIdentity:
    """All that K and V depend on besides a prefix's inputs. Runs with equal identities may share prefixes.

    weights: the stamp of the network's files and config; patches: a content hash of the active LoRAs, or ''; prefill:
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
        """What differs from `other`, in words."""
        return [self.NAMES[f.name] for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)]


Key = tuple[ModelIdentity, str]


@dataclass
class Statistics:
    """Counts of a store since it was created."""

    hits: int = 0
    partial: int = 0
    misses: int = 0
    tokens_reused: int = 0
    tokens_computed: int = 0
    seconds_saved: float = 0.0
    evicted: int = 0


class Store:
    """KV blocks by model identity and key, within a budget of bytes; the least recently used ones are evicted.

    A prefix is looked up as the chain of its KV blocks, from the first, so no KV block is kept longer than the ones
    before it. All methods may be called from any thread. Prefixes that hold an evicted KV block keep it alive.
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
        """The longest run of stored KV blocks with which the chain of `keys` begins."""
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
        """How many KV blocks at the beginning of a chain are stored, on `device` or on any. Does not count as a use."""
        with self._lock:
            kv_blocks = [self._kv_blocks.get((identity, key)) for key in keys]
            return next(
                (i for i, kv_block in enumerate(kv_blocks) if kv_block is None or not _is_on(kv_block, device)),
                len(keys),
            )

    def add(self, identity: ModelIdentity, keys: Sequence[str], kv_blocks: Sequence[KVBlock]) -> None:
        """Store a chain of `kv_blocks`. If it exceeds the budget, its first KV blocks outlast its last ones."""
        with self._lock:
            self._latest = identity
            parent: Key | None = None
            kept = 0
            for key, kv_block in zip(keys, kv_blocks, strict=True):
                if self._kv_blocks.setdefault((identity, key), kv_block) is not kv_block:
                    break  # another thread stored this key: our later blocks do not continue its block
                self._parents[identity, key] = parent
                self._gone.pop((identity, key), None)
                parent = identity, key
                kept += 1
            self._touch(identity, keys[:kept])
            self._drop(self.nbytes() - self.budget, lambda kv_block: True, "the store's budget was full")

    def why_missing(self, identity: ModelIdentity, keys: Sequence[str], names: Sequence[str]) -> str:
        """Why the first missing KV block of `keys` is not stored, '' if none is; `names` are the blocks' names."""
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
        """Bytes stored, on `device` or on all."""
        with self._lock:
            return sum(kv_block.nbytes for kv_block in self._kv_blocks.values() if _is_on(kv_block, device))

    def release(
        self,
        nbytes: int,
        device: torch.device | None,
        why: str,
        to: torch.device | None = None,
        most: int | None = None,
        exclude: Sequence[KVBlock] = (),
    ) -> int:
        """Free at least `nbytes` on `device`, least recently used KV blocks first; returns the bytes freed.

        KV blocks move to the device `to` if given, at most `most` bytes of them, else they are dropped. Those in
        `exclude`, which are about to be used, stay.
        """
        excluded = {id(kv_block) for kv_block in exclude}
        with self._lock:
            if to is None:
                return self._drop(
                    nbytes, lambda kv_block: _is_on(kv_block, device) and id(kv_block) not in excluded, why
                )
            freed = 0
            for kv_block in list(self._kv_blocks.values()):
                if freed >= nbytes:
                    break
                if (
                    id(kv_block) not in excluded
                    and _is_on(kv_block, device)
                    and (most is None or freed + kv_block.nbytes <= most)
                ):
                    freed += kv_block.nbytes
                    kv_block.move(to)
            return freed

    def clear(self, why: str) -> None:
        with self._lock:
            self._drop(self.nbytes(), lambda kv_block: True, why)

    def count(self, reuse: Reuse) -> None:
        """Add a finished lookup to the statistics."""
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
        for key in reversed(keys):  # the chain's first block last, so that it is evicted last
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
        """Drop a KV block and those after it in its chains, which cannot be found without it; returns the bytes freed
        of blocks that are `wanted`."""
        kv_block = self._kv_blocks.pop(key)
        del self._parents[key]
        self._gone[key] = why
        self.statistics.evicted += 1
        freed = kv_block.nbytes if wanted(kv_block) else 0
        for child in [child for child, parent in self._parents.items() if parent == key]:
            freed += self._forget(child, wanted, why)
        return freed


def _is_on(kv_block: KVBlock, device: torch.device | None) -> bool:
    return device is None or same_device(kv_block.device, device)

"""Caches of encoded prompts and references, kept between runs; each entry knows what it was computed from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, MutableMapping, ValuesView
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from .prefix import TextOrigin
from .system_memory import available_ram

if TYPE_CHECKING:
    from .models.text_encoder import ReferenceContext, TextStates

T = TypeVar("T")

CONTEXT_SHARE = 8  # reference contexts are kept while RAM has this many times their size free


@dataclass(frozen=True, eq=False)
class EncodedPrompt:
    """A prompt's text states, encoded after its references, and their origin."""

    text: TextStates
    origin: TextOrigin


@dataclass(frozen=True, eq=False)
class EncodedReference:
    """A reference's normalised latent [64, h, w], and a name of its pixels and of the VAE that encoded it."""

    latent: Tensor
    origin: str


class ReferenceContexts(dict[tuple[str, ...], "ReferenceContext"]):
    """Contexts of the latest references, keyed by the digests of the references up to and including each.
    `TextEncoder.encode` reads and fills it."""

    def keep_only(self, digests: tuple[str, ...]) -> None:
        """Keep in RAM, where it has room, only the contexts of the references `digests`: a run with another prompt or
        further references can reuse them."""
        names = [digests[: i + 1] for i in range(len(digests))]
        kept = {name: self[name] for name in names if name in self}
        self.clear()
        if CONTEXT_SHARE * sum(context.nbytes for context in kept.values()) <= available_ram():
            self.update({name: context.to("cpu") for name, context in kept.items()})


class LRUCache(MutableMapping[Hashable, T]):
    """A mapping that keeps the `limit` most recently used values. Reading and writing both count as use."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[Hashable, T] = OrderedDict()

    def __getitem__(self, key: Hashable) -> T:
        self._kept.move_to_end(key)
        return self._kept[key]

    def __setitem__(self, key: Hashable, value: T) -> None:
        self._kept[key] = value
        self._kept.move_to_end(key)
        while len(self._kept) > self._limit:
            self._kept.popitem(last=False)

    def __delitem__(self, key: Hashable) -> None:
        del self._kept[key]

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: object) -> bool:
        return key in self._kept

    def values(self) -> ValuesView[T]:
        """The values, without counting as use."""
        return self._kept.values()

    def made(self, key: Callable[[], Hashable], make: Callable[[], T]) -> T:
        """The value under `key()`, from `make()` where it is missing. `make` may load a network from a file that was
        replaced meanwhile, so `key` is called again afterwards."""
        name = key()
        if name in self:
            return self[name]
        value = make()
        self[key()] = value
        return value

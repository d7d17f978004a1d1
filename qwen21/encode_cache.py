"""Caches of encoded prompts and references, kept between runs; each entry knows what it was computed from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

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


class LRUCache(Generic[T]):
    """The `limit` most recently used values, by key."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._made: OrderedDict[Hashable, T] = OrderedDict()

    def __iter__(self) -> Iterator[T]:
        return iter(self._made.values())

    def get(self, key: Callable[[], Hashable], make: Callable[[], T]) -> T:
        """The value under `key()`, from `make()` where it is missing. `make` may load a network from a file that was
        replaced meanwhile, so `key` is called again afterwards."""
        name = key()
        if name not in self._made:
            made = make()
            name = key()
            self._made[name] = made
        self._made.move_to_end(name)
        while len(self._made) > self._limit:
            self._made.popitem(last=False)
        return self._made[name]

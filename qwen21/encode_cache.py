"""Prompts and references as their networks encoded them, remembered between runs, each with what made it."""

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

CONTEXT_SHARE = 8  # contexts are kept while so many of their size are free in RAM


@dataclass(frozen=True, eq=False)
class EncodedPrompt:
    """A prompt's text states behind its references."""

    text: TextStates
    origin: TextOrigin


@dataclass(frozen=True, eq=False)
class EncodedReference:
    """A reference's normalised latent [64, h, w]."""

    latent: Tensor
    origin: str


class ReferenceContexts(dict[tuple[str, ...], "ReferenceContext"]):
    """Contexts of the references that were read last, by the digests up to each: what `TextEncoder.encode` reads and
    fills."""

    def keep_only(self, digests: tuple[str, ...]) -> None:
        """Keep those of these references alone, in RAM, if they may be: for a new prompt or more references behind."""
        names = [digests[: i + 1] for i in range(len(digests))]
        kept = {name: self[name] for name in names if name in self}
        self.clear()
        if CONTEXT_SHARE * sum(context.nbytes for context in kept.values()) <= available_ram():
            self.update({name: context.to("cpu") for name, context in kept.items()})


class LRUCache(Generic[T]):
    """The last few things that were made, by what they were made of."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._made: OrderedDict[Hashable, T] = OrderedDict()

    def __iter__(self) -> Iterator[T]:
        return iter(self._made.values())

    def get(self, key: Callable[[], Hashable], make: Callable[[], T]) -> T:
        """What `key()` names, made where it is missing. The key is asked again once it is made: the making may read a
        network's file, which may not be the one that lay there before."""
        name = key()
        if name not in self._made:
            made = make()
            name = key()
            self._made[name] = made
        self._made.move_to_end(name)
        while len(self._made) > self._limit:
            self._made.popitem(last=False)
        return self._made[name]

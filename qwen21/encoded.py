"""Prompts and references as their networks encoded them, remembered between runs, each with what made it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from torch import Tensor

from .prefix import TextOrigin
from .ram import available_ram

if TYPE_CHECKING:
    from .encoder import Head, TextStates

T = TypeVar("T")

HEAD_SHARE = 8  # a head is kept while so many of its size are free in RAM


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


class KeptHeads(dict[tuple[str, ...], "Head"]):
    """Heads of the references that were read last, by their digests: what `TextEncoder.encode` reads and fills."""

    def settle(self, digests: tuple[str, ...]) -> None:
        """Keep one alone, in RAM, if it may: a new prompt behind the same references is the one case that needs it."""
        head = self.get(digests)
        self.clear()
        if head is not None and HEAD_SHARE * head.nbytes <= available_ram():
            self[digests] = head.to("cpu")


class Remembered(Generic[T]):
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

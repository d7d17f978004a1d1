"""Where every token of the sequence sits: segments, positions, block ids. Integers only, no tensors.

The sequence is `text[0:s1], ref1, text[s1:s2], ref2, ..., text[sK:T], target`. Everything before the target is the
prefix. A text token at counter p sits at (p, p, p) and advances p by one; an image block of h x w tokens sits at
(p, i, j) on a grid centred on zero and advances p by max(h, w).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .errors import UserError

Grid = tuple[int, int]  # (height, width) in latent tokens


@dataclass(frozen=True)
class TextSegment:
    """Text tokens `first` to `first + length - 1` of the states, causal among themselves."""

    offset: int  # first token's index in the sequence
    position: int  # position counter at the first token
    first: int  # first token's index in the text states
    length: int

    @property
    def advance(self) -> int:
        return self.length

    @property
    def states(self) -> slice:
        """Its part of the text states."""
        return slice(self.first, self.first + self.length)

    @property
    def stop(self) -> int:
        return self.offset + self.length

    def axes(self) -> tuple[range, range, range]:
        """Positions along (frame, height, width); for text the three run together."""
        run = range(self.position, self.position + self.length)
        return run, run, run


@dataclass(frozen=True)
class ImageSegment:
    """One image block of height x width tokens, row-major, whose tokens all see each other."""

    offset: int
    position: int
    index: int  # which reference; the target has the number of references
    height: int
    width: int

    @property
    def length(self) -> int:
        return self.height * self.width

    @property
    def advance(self) -> int:
        return max(self.height, self.width)

    @property
    def stop(self) -> int:
        return self.offset + self.length

    def axes(self) -> tuple[range, range, range]:
        """Positions along (frame, height, width): one frame, and the outer product of the two other ranges."""
        return range(self.position, self.position + 1), _centred(self.height), _centred(self.width)


Segment = TextSegment | ImageSegment


def _centred(n: int) -> range:
    return range(-(n - n // 2), n // 2)


@dataclass(frozen=True)
class PrefixLayout:
    """The segments of a prefix, in order, and the position counter after them."""

    segments: tuple[Segment, ...]
    position: int

    @property
    def length(self) -> int:
        return self.segments[-1].stop if self.segments else 0

    @property
    def units(self) -> tuple[tuple[Segment, ...], ...]:
        """The segments in the runs that are computed together: a text with the image that follows it.

        The few tokens between two references would each cost a pass over all weights; together they cost none. A unit
        depends on nothing behind it, so a head of units rounds the same whatever follows.
        """
        units: list[tuple[Segment, ...]] = []
        waiting: tuple[Segment, ...] = ()
        for segment in self.segments:
            waiting = (*waiting, segment)
            if isinstance(segment, ImageSegment):
                units.append(waiting)
                waiting = ()
        return (*units, waiting) if waiting else tuple(units)

    @property
    def unit_tokens(self) -> tuple[int, ...]:
        """Tokens of each unit."""
        return tuple(unit[-1].stop - unit[0].offset for unit in self.units)

    @property
    def references(self) -> int:
        return sum(isinstance(segment, ImageSegment) for segment in self.segments)

    def target(self, grid: Grid) -> ImageSegment:
        """The target block that follows this prefix."""
        return ImageSegment(self.length, self.position, self.references, *grid)


def prefix_layout(text_tokens: int, slots: Sequence[int], grids: Sequence[Grid]) -> PrefixLayout:
    """Lay out `text_tokens` text states with one reference grid spliced in at each slot.

    A slot is the number of text tokens before its reference. Raises `UserError` where slots and grids do not agree.
    """
    _check_slots(text_tokens, slots, grids)
    segments: list[Segment] = []
    offset = position = first = 0

    def append(segment: Segment) -> None:
        nonlocal offset, position
        segments.append(segment)
        offset, position = segment.stop, position + segment.advance

    for index, (slot, (height, width)) in enumerate(zip(slots, grids, strict=True)):
        if slot > first:
            append(TextSegment(offset, position, first, slot - first))
            first = slot
        append(ImageSegment(offset, position, index, height, width))
    if text_tokens > first:
        append(TextSegment(offset, position, first, text_tokens - first))
    return PrefixLayout(tuple(segments), position)


def _check_slots(text_tokens: int, slots: Sequence[int], grids: Sequence[Grid]) -> None:
    if len(slots) != len(grids):
        raise UserError(
            f"got {len(slots)} image slots but {len(grids)} reference latents; each slot takes exactly one latent, so "
            "encode the prompt with the same references that are spliced in"
        )
    if list(slots) != sorted(slots) or any(not 0 <= slot <= text_tokens for slot in slots):
        raise UserError(
            f"image slots {list(slots)} must rise within 0 and the {text_tokens} text tokens; was the conditioning "
            "changed after encoding?"
        )
    if any(height < 1 or width < 1 for height, width in grids):
        raise UserError(f"reference grids {list(grids)} must be at least 1 x 1 tokens")


def settle_slots(slots: Sequence[int], latents: int, text_tokens: int) -> tuple[tuple[int, ...], str | None]:
    """Slots for `latents` reference latents, and a warning where the two differ in number.

    As in ComfyUI's core, latents beyond the slots go to the end of the text, and slots beyond the latents are left out.
    """
    missing = latents - len(slots)
    if missing > 0:
        warning = f"{missing} of {latents} reference latents have no slot in the prompt and follow the text"
        return (*slots, *[text_tokens] * missing), warning
    if missing < 0:
        warning = f"{-missing} of {len(slots)} references of the prompt have no latent and are left out; wire the VAE"
        return tuple(slots[:latents]), warning
    return tuple(slots), None


def drop_spans(tokens: int, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Indices of the tokens outside the spans (start, length), and the number of those before each span: its slot."""
    dropped: set[int] = set()
    slots = []
    for start, length in spans:
        slots.append(start - len(dropped))
        dropped.update(range(start, start + length))
    return [i for i in range(tokens) if i not in dropped], slots


def block_ids(layout: PrefixLayout, target: Grid | None = None) -> list[int]:
    """For each token -1 for text, else the number of its image block. Query i sees key j if i >= j or ids match."""
    segments = [*layout.segments, *([layout.target(target)] if target else [])]
    return [
        segment.index if isinstance(segment, ImageSegment) else -1
        for segment in segments
        for _ in range(segment.length)
    ]

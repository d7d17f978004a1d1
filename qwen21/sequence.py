"""The token sequence: segments, positions and block ids. Integers only, no tensors.

The sequence is `text[0:s1], ref1, text[s1:s2], ref2, ..., text[sK:T], target`. Everything before the target is the
prefix. A text token at position counter p has the position (p, p, p) and advances p by one; the tokens of an image of
h x w have the positions (p, i, j), with i and j centred on zero, and the image advances p by max(h, w).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .errors import UserError

Grid = tuple[int, int]  # (height, width) in latent tokens


@dataclass(frozen=True)
class TextSegment:
    """Text states `first` to `first + length - 1`, with causal attention among themselves."""

    offset: int  # first token's index in the sequence
    position: int  # position counter at the first token
    first: int  # first token's index in the text states
    length: int

    @property
    def advance(self) -> int:
        return self.length

    @property
    def states(self) -> slice:
        """The slice of the text states that this segment holds."""
        return slice(self.first, self.first + self.length)

    @property
    def stop(self) -> int:
        return self.offset + self.length

    def axes(self) -> tuple[range, range, range]:
        """Positions along (frame, height, width); the three are equal for text."""
        run = range(self.position, self.position + self.length)
        return run, run, run


@dataclass(frozen=True)
class ImageSegment:
    """One image of height x width tokens, row-major, whose tokens all attend to each other."""

    offset: int
    position: int
    index: int  # number of the reference, from 0; for the target, the count of references
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
        """Positions along (frame, height, width): the tokens are the outer product of the three ranges."""
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
    def kv_blocks(self) -> tuple[tuple[Segment, ...], ...]:
        """The segments of each KV block, which is computed in one pass: an image with the text before it.

        The few tokens between two references would cost a pass over all weights of their own. A KV block depends on
        nothing after it, so the KV blocks at the beginning round the same whatever follows.
        """
        kv_blocks: list[tuple[Segment, ...]] = []
        pending: tuple[Segment, ...] = ()
        for segment in self.segments:
            pending = (*pending, segment)
            if isinstance(segment, ImageSegment):
                kv_blocks.append(pending)
                pending = ()
        return (*kv_blocks, pending) if pending else tuple(kv_blocks)

    @property
    def kv_block_tokens(self) -> tuple[int, ...]:
        """The number of tokens of each KV block."""
        return tuple(kv_block[-1].stop - kv_block[0].offset for kv_block in self.kv_blocks)

    @property
    def references(self) -> int:
        return sum(isinstance(segment, ImageSegment) for segment in self.segments)

    def target(self, grid: Grid) -> ImageSegment:
        """The target's segment, which follows this prefix."""
        return ImageSegment(self.length, self.position, self.references, *grid)


def prefix_layout(text_tokens: int, slots: Sequence[int], grids: Sequence[Grid]) -> PrefixLayout:
    """Lay out `text_tokens` text states with one reference grid inserted at each slot.

    A slot is the number of text tokens before its reference. Raises `UserError` where `slots` and `grids` do not match.
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
    """One slot for each of `latents` reference latents, and a warning where `slots` has another number of entries.

    As in ComfyUI's core, surplus latents go to the end of the text, and surplus slots are dropped.
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
    """Indices of the tokens outside all `spans` (start, length), and each span's slot: the number of them before it."""
    dropped: set[int] = set()
    slots = []
    for start, length in spans:
        slots.append(start - len(dropped))
        dropped.update(range(start, start + length))
    return [i for i in range(tokens) if i not in dropped], slots


def block_ids(layout: PrefixLayout, target: Grid | None = None) -> list[int]:
    """The block id of each token: -1 for text, else its image's index. Query i sees key j if i >= j, or if both belong
    to one image."""
    segments = [*layout.segments, *([layout.target(target)] if target else [])]
    return [
        segment.index if isinstance(segment, ImageSegment) else -1
        for segment in segments
        for _ in range(segment.length)
    ]

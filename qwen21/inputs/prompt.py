"""The text encoder's input: the prompt template, and the layout of all tokens.

Pure functions on strings and integers, without weights. User input is always plain text: special tokens are inserted
by id, and the text between them is tokenized with special tokens disabled.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ..errors import UserError
from .references import VISION_MERGE, check_count

SYSTEM_PROMPT = "Comprehend and analyze the provided prompt."
IM_START, IM_END = "<|im_start|>", "<|im_end|>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE_PAD, VIDEO_PAD = "<|image_pad|>", "<|video_pad|>"
RESERVED_TOKENS = (IM_START, IM_END, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD)
PLACEHOLDER = re.compile(r"[<＜]\s*(?:image|img|picture|reference)[\s_#:.-]*(\d{1,3})\s*/?[>＞]", re.IGNORECASE)


class Tokenizer(Protocol):
    """The tokenizer that `layout_tokens` needs; `tokenizer.load_tokenizer` returns one."""

    special: dict[str, int]

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; special tokens written in it stay text."""
        ...


@dataclass(frozen=True)
class Special:
    """A special token of the template, given by its name."""

    name: str


def template(prompt: str, n_references: int = 0) -> list[str | Special]:
    """The whole conversation as pieces of literal text and special tokens. An empty prompt becomes one space."""
    check_count(n_references)
    user = "user\n"
    message: list[str | Special] = []
    for i in range(1, n_references + 1):
        lead = user if i == 1 else " "
        message += [f"{lead}<image{i}>", Special(VISION_START), Special(IMAGE_PAD), Special(VISION_END)]
    message.append((prompt or " ") if n_references else user + (prompt or " "))
    return [
        *(Special(IM_START), "system\n" + SYSTEM_PROMPT, Special(IM_END), "\n"),
        *(Special(IM_START), *message, Special(IM_END), "\n"),
        *(Special(IM_START), "assistant\n"),
    ]


@dataclass(frozen=True)
class TokenLayout:
    """The layout of the encoder's input of S tokens. Indices count from its start.

    ids: all input ids. drop: length of the system message, whose states are dropped. images: the image_pad indices of
    each reference. blocks: rows and columns of each reference in vision tokens.
    """

    ids: tuple[int, ...]
    drop: int
    images: tuple[range, ...] = ()
    blocks: tuple[tuple[int, int], ...] = ()

    @property
    def kept(self) -> list[int]:
        """Indices of the T tokens whose states the transformer reads: all but the system message and image_pad."""
        pads = {index for span in self.images for index in span}
        return [index for index in range(self.drop, len(self.ids)) if index not in pads]

    @property
    def image_slots(self) -> tuple[int, ...]:
        """The number of kept tokens before each reference."""
        slots, pads = [], 0
        for span in self.images:
            slots.append(span.start - self.drop - pads)
            pads += len(span)
        return tuple(slots)

    def positions(self) -> torch.Tensor:
        """M-RoPE positions [3, S], int64: text at (p, p, p); a reference at (p, p + row, p + column), then p advances
        by its longer side."""
        parts, p, index = [], 0, 0
        for span, (rows, columns) in zip(self.images, self.blocks, strict=True):
            parts.append(torch.arange(p, p + span.start - index).expand(3, -1))
            p += span.start - index
            row, column = torch.arange(rows), torch.arange(columns)
            still = torch.zeros(rows * columns, dtype=torch.int64)
            parts.append(torch.stack([still, row.repeat_interleave(columns), column.repeat(rows)]) + p)
            p += max(rows, columns)
            index = span.stop
        parts.append(torch.arange(p, p + len(self.ids) - index).expand(3, -1))
        return torch.cat(parts, dim=1)


def placeholder_warnings(prompts: Iterable[str], references: int) -> list[str]:
    """Warnings about `<imageN>` in `prompts` beyond the number of `references`, and about misspelled placeholders."""
    written = {match[0]: int(match[1]) for prompt in prompts for match in PLACEHOLDER.finditer(prompt)}
    exact = sorted(number for text, number in written.items() if text == f"<image{number}>")
    warnings = []
    if strange := ", ".join(f"<image{number}>" for number in exact if not 1 <= number <= references):
        there = "there is 1 reference" if references == 1 else f"there are {references or 'no'} references"
        warnings.append(f"the prompt speaks of {strange}, but {there}")
    if odd := {text: number for text, number in written.items() if text != f"<image{number}>"}:
        right = ", ".join(f"<image{number}>" for number in sorted(set(odd.values())))
        warnings.append(f"the prompt says {', '.join(odd)}, which names no reference: write {right}")
    return warnings


def layout_tokens(prompt: str, tokenizer: Tokenizer, grids: Sequence[tuple[int, int, int]] = ()) -> TokenLayout:
    """The token layout of a prompt after references with the vision grids `grids` (1, rows, columns), in patches.

    `UserError` if the prompt is not valid Unicode, or tokenizing it gives a special token.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UserError("the prompt holds characters that are not valid Unicode; retype it") from None
    blocks = tuple((rows // VISION_MERGE, columns // VISION_MERGE) for _, rows, columns in grids)
    reserved = {tokenizer.special[name]: name for name in RESERVED_TOKENS}
    ids: list[int] = []
    messages: list[int] = []  # index of the first token of each message
    images: list[range] = []
    for piece in template(prompt, len(blocks)):
        if isinstance(piece, str):
            text = tokenizer.encode(piece)
            if found := reserved.keys() & set(text):
                names = ", ".join(sorted(reserved[token] for token in found))
                raise UserError(f"the prompt holds the special token {names}, expected plain text; take it out")
            ids += text
            continue
        count = 1
        if piece.name == IM_START:
            messages.append(len(ids))
        elif piece.name == IMAGE_PAD:
            count = math.prod(blocks[len(images)])
            images.append(range(len(ids), len(ids) + count))
        ids += [tokenizer.special[piece.name]] * count
    return TokenLayout(tuple(ids), messages[1], tuple(images), blocks)

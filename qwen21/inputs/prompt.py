"""Inputs of the text encoder: prompt template, prepared references, vision patches, and the layout of all tokens.

Pure functions on strings, pictures and integers, without weights. User input is always plain text: special tokens are
inserted by id, and the text between them is tokenized with special tokens disabled.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from einops import rearrange, repeat
from PIL import Image

from ..choices import CANVASES, FITS
from ..config.networks import LATENT_PIXELS, MAX_REFERENCES, SIZE_MULTIPLE
from ..errors import UserError
from .images import over_white, to_rgba

DEFAULT_RESOLUTION = 1024
OWN_SIZE = 0  # resolution: each picture keeps its size
SYSTEM_PROMPT = "Comprehend and analyze the provided prompt."
IM_START, IM_END = "<|im_start|>", "<|im_end|>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE_PAD, VIDEO_PAD = "<|image_pad|>", "<|video_pad|>"
RESERVED_TOKENS = (IM_START, IM_END, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD)
TEMPORAL_PATCH = 2  # frames per vision patch; a picture is repeated for all of them
PLACEHOLDER = re.compile(r"[<＜]\s*(?:image|img|picture|reference)[\s_#:.-]*(\d{1,3})\s*/?[>＞]", re.IGNORECASE)
VISION_MERGE = SIZE_MULTIPLE // LATENT_PIXELS  # patches per vision token, each way

Size = tuple[int, int]  # (width, height)


class Tokenizer(Protocol):
    """The tokenizer that `layout_tokens` needs; `tokenizer.load_tokenizer` returns one."""

    special: dict[str, int]

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; special tokens written in it stay text."""
        ...


# --- sizes ---------------------------------------------------------------------------------------------------------


def _positive(value: object, what: str, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise UserError(f"{what} is {value}, expected a whole number of pixels, at least {least}")
    return int(value)


def reference_size(width: int, height: int, resolution: int = DEFAULT_RESOLUTION) -> Size:
    """The size that a reference of width x height pixels is resized to: about resolution x resolution, same shape.

    Both sides are multiples of 32, rounded half to even, and at least 32. Resolution 0 keeps the picture's own size,
    each side rounded down.
    """
    ratio = _positive(width, "the picture's width") / _positive(height, "the picture's height")
    if resolution == OWN_SIZE:
        return tuple(max(SIZE_MULTIPLE, side // SIZE_MULTIPLE * SIZE_MULTIPLE) for side in (width, height))
    resolution = _positive(resolution, "the resolution", SIZE_MULTIPLE)
    ideal_width = math.sqrt(resolution * resolution * ratio)
    ideal_height = ideal_width / ratio  # from the unrounded width
    sides = (round(side / SIZE_MULTIPLE) * SIZE_MULTIPLE for side in (ideal_width, ideal_height))
    return tuple(max(SIZE_MULTIPLE, side) for side in sides)


@dataclass(frozen=True)
class Canvas:
    """Size of the output in pixels, and a warning where it differs from the requested size."""

    width: int
    height: int
    warning: str | None = None


def canvas_size(sizes: Sequence[Size], choice: str | Size = "last", resolution: int = DEFAULT_RESOLUTION) -> Canvas:
    """The output's size: that of the `last`, `first` or `largest` reference, or an explicit (width, height).

    `sizes` are the references' own sizes, before resizing. Without references, the size is resolution x resolution.
    Explicit sizes are rounded down to multiples of 32, with a warning. Of equally large references the last one counts.
    Resolution 0 keeps the reference's own size.
    """
    if not isinstance(choice, str):
        width, height = choice
        return _floored(_positive(width, "the width", SIZE_MULTIPLE), _positive(height, "the height", SIZE_MULTIPLE))
    if choice not in CANVASES:
        raise UserError(f"the canvas is {choice!r}, expected 'last', 'first', 'largest' or a size as width and height")
    if not sizes:
        if resolution == OWN_SIZE:
            raise UserError(f"resolution {OWN_SIZE} keeps a picture's own size, but there is none; give --size")
        resolution = _positive(resolution, "the resolution", SIZE_MULTIPLE)
        return _floored(resolution, resolution)
    return Canvas(*reference_size(*sizes[followed(sizes, choice)], resolution))


def followed(sizes: Sequence[Size], choice: str) -> int:
    """Index of the reference that the canvas follows, by the references' own sizes; of equally large ones the last."""
    last = len(sizes) - 1
    return {"last": last, "first": 0}.get(choice, max(range(last, -1, -1), key=lambda i: math.prod(sizes[i])))


def _floored(width: int, height: int) -> Canvas:
    floored = (width // SIZE_MULTIPLE * SIZE_MULTIPLE, height // SIZE_MULTIPLE * SIZE_MULTIPLE)
    if floored == (width, height):
        return Canvas(width, height)
    note = f"size {width}x{height} is not a multiple of {SIZE_MULTIPLE} each way: using {floored[0]}x{floored[1]}"
    return Canvas(*floored, note)


# --- references ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Reference:
    """A reference picture, resized once for both encoder and VAE.

    `original` is the (width, height) before resizing, `image` the resized RGBA picture, `digest` a hash of its pixels,
    `crop` the (width, height) of the picture without padding, from the top left, and `resolution` what it was resized
    to.
    """

    original: Size
    image: Image.Image
    digest: str
    crop: Size
    resolution: int = DEFAULT_RESOLUTION

    @classmethod
    def prepare(cls, image: Image.Image, resolution: int = DEFAULT_RESOLUTION, fit: str = "resize") -> Reference:
        """The reference of a picture of any mode and size, resized by Pillow's Lanczos in RGBA: premultiplied, 8-bit.

        `fit` resize is the released rule: both sides become multiples of 32, which distorts the picture by a few
        pixels. mirror keeps its shape and pads right and bottom to the grid with its mirror image.
        """
        if fit not in FITS:
            raise UserError(f"fit is {fit!r}, expected one of {', '.join(FITS)}")
        rgba = to_rgba(image)
        size = reference_size(*rgba.size, resolution)
        crop = size if fit == "resize" else _unbent(rgba.size, resolution)
        resized = rgba.resize(crop, Image.Resampling.LANCZOS)
        if fit == "mirror":
            resized = _mirrored(resized)
        digest = hashlib.sha256(f"{resized.width}x{resized.height}:".encode() + resized.tobytes()).hexdigest()
        return cls(rgba.size, resized, digest, crop, resolution)

    @property
    def tokens(self) -> int:
        """The number of vision tokens, each of which covers 2 x 2 latent cells."""
        return self.width * self.height // VISION_MERGE**2

    @property
    def over_white(self) -> Image.Image:
        """An RGB copy for the vision tower, composited over white in 8 bits."""
        return over_white(self.image)

    @property
    def width(self) -> int:
        """The width in latent cells."""
        return self.image.width // LATENT_PIXELS

    @property
    def height(self) -> int:
        """The height in latent cells."""
        return self.image.height // LATENT_PIXELS


def _unbent(size: Size, resolution: int) -> Size:
    """A size of about resolution x resolution pixels with the aspect ratio of `size`; `size` itself for 0."""
    if resolution == OWN_SIZE:
        return size
    scale = math.sqrt(resolution * resolution / math.prod(size))
    width, height = (max(1, round(side * scale)) for side in size)
    return width, height


def _mirrored(image: Image.Image) -> Image.Image:
    """`image` padded right and bottom to multiples of 32 by mirroring, with edge pixels repeated."""
    padding = [(0, -side % SIZE_MULTIPLE) for side in (image.height, image.width)]
    return Image.fromarray(np.pad(np.asarray(image), [*padding, (0, 0)], mode="symmetric"))


def prepare_references(images: Sequence[Image.Image], resolution: int = DEFAULT_RESOLUTION) -> list[Reference]:
    check_count(len(images))
    return [Reference.prepare(image, resolution) for image in images]


def check_count(n_references: int) -> None:
    """`UserError` above the ten references the model takes."""
    if n_references > MAX_REFERENCES:
        raise UserError(f"got {n_references} references, at most {MAX_REFERENCES} are possible; leave some out")


def vision_patches(image: Image.Image) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """Patches of an RGB picture for the vision tower: float32 [n, 3*2*16*16] in [-1, 1], and grid (1, rows, columns).

    The four patches of a vision token are consecutive; within a patch the order is channel, frame, y, x. Sides must be
    multiples of 32. Nothing is resized here, so that no pixel limit of a processor applies.
    """
    if image.mode != "RGB" or image.width % SIZE_MULTIPLE or image.height % SIZE_MULTIPLE:
        raise UserError(
            f"the vision tower got a {image.mode} picture of {image.width}x{image.height} pixels, expected RGB with "
            f"sides that are multiples of {SIZE_MULTIPLE}; prepare it with Reference.prepare"
        )
    pixels = (np.asarray(image, dtype=np.float32) - 127.5) / 127.5
    patches = rearrange(
        torch.from_numpy(pixels),
        "(rows my y) (columns mx x) c -> (rows columns my mx) c y x",
        my=VISION_MERGE,
        mx=VISION_MERGE,
        y=LATENT_PIXELS,
        x=LATENT_PIXELS,
    )
    patches = repeat(patches, "n c y x -> n (c t y x)", t=TEMPORAL_PATCH)
    return patches, (1, image.height // LATENT_PIXELS, image.width // LATENT_PIXELS)


# --- tokens --------------------------------------------------------------------------------------------------------


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

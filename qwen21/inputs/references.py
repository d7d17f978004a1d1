"""Reference pictures: their sizes, the canvas that follows them, chains of them, and patches for the vision tower."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
AUTO = -1  # resolution: that of the reference before, or the model's
TEMPORAL_PATCH = 2  # frames per vision patch; a picture is repeated for all of them
VISION_MERGE = SIZE_MULTIPLE // LATENT_PIXELS  # patches per vision token, each way

Size = tuple[int, int]  # (width, height)


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


# --- chains ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class OpenReference(Reference):
    """A reference at the default resolution, with its original `picture`, so that a model trained on another size can
    resize it again."""

    picture: Image.Image | None = None


def following(chain: Sequence[Reference], image: Image.Image, resolution: int, fit: str = "resize") -> Reference:
    """The reference of `image`, to be appended to `chain`.

    `AUTO` takes the resolution of the last reference. If there is none, or it is an `OpenReference`, the result is an
    `OpenReference` too; but not with `fit` mirror, whose padding is reported at once.
    """
    if resolution != AUTO:
        return Reference.prepare(image, resolution, fit)
    before = chain[-1] if chain else None
    if before is not None and not isinstance(before, OpenReference):
        return Reference.prepare(image, before.resolution, fit)
    if fit == "mirror":
        return Reference.prepare(image, DEFAULT_RESOLUTION, fit)
    return replace(OpenReference.prepare(image, DEFAULT_RESOLUTION, fit), picture=image)


def settled(chain: Sequence[Reference], trained: tuple[int, int] | None) -> list[Reference]:
    """The references of `chain` as a model reads them: open ones at the smallest size that it was trained on.

    `trained` holds the smallest and the largest side in pixels, None where they are unknown.
    """
    if trained is None:
        return list(chain)
    smallest, _ = trained
    return [Reference.prepare(each.picture, smallest) if isinstance(each, OpenReference) else each for each in chain]

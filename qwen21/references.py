"""Chains of references whose size nobody chose: it is that of the one before, or of the model that will read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from PIL import Image

from .prompt import DEFAULT_RESOLUTION, Reference

AUTO = -1  # a resolution: as the reference before, or as the model has it


@dataclass(frozen=True, eq=False)
class OpenReference(Reference):
    """A reference at the default resolution, and its `picture`, for a model that turns out to know another size."""

    picture: Image.Image | None = None


def following(chain: Sequence[Reference], image: Image.Image, resolution: int, fit: str = "resize") -> Reference:
    """The reference of `image` behind those of a `chain`.

    `AUTO` takes the resolution of the one before. Where there is none, or that one is open too, the reference stays
    open; but not with `fit` mirror, for how much of it is padding is told at once.
    """
    if resolution != AUTO:
        return Reference.prepare(image, resolution, fit)
    before = chain[-1] if chain else None
    if before is not None and not isinstance(before, OpenReference):
        return Reference.prepare(image, before.resolution, fit)
    if fit == "mirror":
        return Reference.prepare(image, DEFAULT_RESOLUTION, fit)
    return replace(OpenReference.prepare(image, DEFAULT_RESOLUTION, fit), picture=image)


def settled(chain: Sequence[Reference], known: int | None) -> list[Reference]:
    """The references of a `chain` as a model reads them: open ones at the resolution that it knows, if one is."""
    return [
        Reference.prepare(each.picture, known) if known and isinstance(each, OpenReference) else each for each in chain
    ]

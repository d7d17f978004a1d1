"""Chains of references without a chosen size: it is that of the reference before, or that of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from PIL import Image

from .prompt import DEFAULT_RESOLUTION, Reference

AUTO = -1  # resolution: that of the reference before, or the model's


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

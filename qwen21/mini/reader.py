"""Read pictures of the toy world back into scenes, without any network, and judge pictures painted for a task.

Shapes are found by their colours, measured against the ground around them, and classified by the silhouette that
overlaps best. Blurred, bent or half-drawn shapes count as faults.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import permutations

import numpy as np
from PIL import Image

from .world import COLORS, GROUNDS, KINDS, PLACES, SIZES, SPREAD, Scene, Shape, Task, draw, draw_ground, silhouette

COLOR_ERROR = 48.0  # largest distance of a pixel from its named colour, in RGB of 255
LEAST_CORE = 0.002  # share of the picture; smaller spots are not shapes
LEAST_OVERLAP = 0.75  # least intersection over union of a shape with its silhouette
GROUND_ERROR = 12.0  # largest mean error of a ground's colour, of 255
CLEAR, SOLID = 0.2, 0.8  # mean opacity below and above which a ground is transparent or opaque
MOST_DIRT = 0.01  # share of the picture: pixels beside the shapes that differ from the ground
DIRT = 0.25  # opacity or colour error from which a pixel of the ground counts as dirt
KEPT_ERROR = 0.03  # mean error of the pixels that an edit must not change, of 1

# Area of each silhouette at radius 1.
AREAS = {"circle": math.pi, "square": 3.125, "triangle": 2.195, "star": 2.292}


@dataclass(frozen=True)
class Reading:
    """The scene in a picture, and the faults, which belong to no scene. A ground without a name is `("?",)`."""

    scene: Scene
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """Which parts of a task a picture gets right.

    asked: the requested shapes, by kind and colour; for an edit, the change. placed: they have the requested place and
    size. kept: the requested ground, no faults, and for an edit nothing else changed. alpha: opaque or transparent as
    requested.
    """

    asked: bool
    placed: bool
    kept: bool
    alpha: bool

    @property
    def right(self) -> bool:
        return self.asked and self.placed and self.kept and self.alpha


# --- reading -------------------------------------------------------------------------------------------------------


def read(picture: Image.Image) -> Reading:
    """Read the scene in an RGBA picture, including the measured `shift` of each shape."""
    pixels = np.asarray(picture.convert("RGBA"), float)
    spots = list(_colored(pixels))
    beside = ~_grown(np.logical_or.reduce([spot for _, spot in spots]), 4) if spots else np.ones(pixels.shape[:2], bool)
    ground, faults = _ground(pixels, beside)
    behind = draw_ground(ground if "?" not in ground else (), pixels.shape[1], pixels.shape[0])
    shapes, inside = [], np.zeros_like(beside)
    found = np.array([COLORS[color] for color, _ in spots], float).reshape(-1, 3)
    nearest = np.linalg.norm(pixels[..., None, :3] - found, axis=-1).argmin(-1) if spots else None
    for i, (color, spot) in enumerate(spots):
        cover = (_cover(pixels, behind, found[i]) > 0.5) & (found[nearest] == found[i]).all(-1)  # shapes may touch
        cover = _spread(spot, cover & _grown(spot, 6))
        shape, overlap = _shape(color, cover)
        shapes.append(shape)
        inside |= _grown(cover, 4)
        if overlap < LEAST_OVERLAP:
            faults.append(f"the {color} shape at the {shape.place} is no clear {shape.kind}")
    if not faults:
        off = np.abs(pixels - behind) / 255
        off[..., :3] *= behind[..., 3:] / 255
        dirt = float(((off.max(-1) > DIRT) & ~inside).mean())
        if dirt > MOST_DIRT:
            faults.append(f"{dirt:.1%} of the picture is neither shape nor ground")
    return Reading(Scene(tuple(shapes), ground), tuple(faults))


def _colored(pixels: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the colour and mask of each thick spot of one colour. Edges mix colours, but they are thin."""
    names = np.array([*COLORS.values(), *GROUNDS.values()], float)
    distances = np.linalg.norm(pixels[..., None, :3] - names, axis=-1)
    nearest = np.where((distances.min(-1) < COLOR_ERROR) & (pixels[..., 3] > 127), distances.argmin(-1), -1)
    for i, color in enumerate(COLORS):
        mask = nearest == i
        left = ~_grown(~mask, 1)
        while left.any():
            seed = np.zeros_like(mask)
            seed[np.unravel_index(left.argmax(), left.shape)] = True
            spot = _spread(seed, mask)
            if (spot & left).mean() > LEAST_CORE:
                yield color, spot
            left &= ~spot


def _grown(mask: np.ndarray, by: int) -> np.ndarray:
    """Dilate a mask by `by` pixels, over the sides of pixels."""
    for _ in range(by):
        padded = np.pad(mask, 1)
        mask = mask | padded[2:, 1:-1] | padded[:-2, 1:-1] | padded[1:-1, 2:] | padded[1:-1, :-2]
    return mask


def _spread(seed: np.ndarray, within: np.ndarray) -> np.ndarray:
    """Grow `seed` to all of `within` that is connected to it."""
    while True:
        grown = seed | (_grown(seed, 1) & within)
        if (grown == seed).all():
            return seed
        seed = grown


def _ground(pixels: np.ndarray, beside: np.ndarray) -> tuple[tuple[str, ...], list[str]]:
    """The ground, from the pixels beside the shapes, and its faults."""
    if beside.mean() < 0.1:
        return ("?",), ["shapes cover everything"]
    opacity = pixels[..., 3][beside].mean() / 255
    if opacity < CLEAR:
        return (), []
    if opacity < SOLID:
        return ("?",), [f"the ground is neither opaque nor transparent ({opacity:.0%})"]
    height, width = beside.shape
    choices = [(name,) for name in GROUNDS] + list(permutations(GROUNDS, 2))
    errors = {choice: np.abs(draw_ground(choice, width, height) - pixels)[..., :3][beside].mean() for choice in choices}
    ground = min(errors, key=errors.__getitem__)
    if errors[ground] > GROUND_ERROR:
        return ("?",), [f"the ground is none that is known (nearest: {' to '.join(ground)})"]
    return ground, []


def _cover(pixels: np.ndarray, behind: np.ndarray, color: np.ndarray) -> np.ndarray:
    """Coverage of each pixel by `color` over the ground `behind`."""
    if not behind[..., 3].any():
        return pixels[..., 3] / 255
    way = color - behind[..., :3]
    return ((pixels[..., :3] - behind[..., :3]) * way).sum(-1) / np.square(way).sum(-1)


def _shape(color: str, cover: np.ndarray) -> tuple[Shape, float]:
    """The shape that a mask shows, and its overlap with the best silhouette."""
    height, width = cover.shape
    unit = min(height, width)
    rows, columns = np.nonzero(cover)
    x, y = columns.mean() + 0.5, rows.mean() + 0.5

    def overlap(kind: str) -> float:
        radius = math.sqrt(len(rows) / AREAS[kind])
        ideal = np.asarray(silhouette(kind, radius, (x, y), width, height)) > 127
        return float((ideal & cover).sum() / (ideal | cover).sum())

    kind = max(KINDS, key=overlap)
    radius = math.sqrt(len(rows) / AREAS[kind]) / unit
    size = min(SIZES, key=lambda name: abs(math.log(SIZES[name] / radius)))
    offsets = {
        place: ((x - width * (0.5 + SPREAD * column)) / unit, (y - height * (0.5 + SPREAD * row)) / unit)
        for place, (column, row) in PLACES.items()
    }
    place = min(offsets, key=lambda name: math.hypot(*offsets[name]))
    return Shape(kind, color, size, place, offsets[place]), overlap(kind)


# --- judging -------------------------------------------------------------------------------------------------------


def judge(task: Task, picture: Image.Image) -> Verdict:
    """Judge a picture by its reading and, for an edit, by its pixels."""
    reading = read(picture)
    got, wanted = reading.scene, task.result
    ground = got.ground == wanted.ground and not reading.faults
    alpha = "?" not in got.ground and (not got.ground) == (not wanted.ground)
    if task.kind in ("paint", "combine"):
        asked = _named(got.shapes) == _named(wanted.shapes)
        placed = _told(got.shapes) == _told(wanted.shapes)
        kept = ground and (task.kind == "paint" or _untouched(task, picture))
        return Verdict(asked, placed, kept, alpha)
    (source,) = task.references
    if task.kind in ("background", "cut out"):
        asked = got.ground == wanted.ground
        placed = _told(got.shapes) == _told(wanted.shapes)
        return Verdict(asked, placed, placed and not reading.faults and _untouched(task, picture), alpha)
    new, old = (_told(set(a.shapes) - set(b.shapes)) for a, b in ((wanted, source), (source, wanted)))
    found = _told(got.shapes)
    asked = _by_name(new) <= _by_name(found) and not old & found
    placed = new <= found
    rest = _told(set(wanted.shapes) & set(source.shapes))
    return Verdict(asked, placed, rest == found - new and ground and _untouched(task, picture), alpha)


def _named(shapes: Iterable[Shape]) -> set[tuple[str, ...]]:
    return {(shape.kind, shape.color) for shape in shapes}


def _told(shapes: Iterable[Shape]) -> set[tuple[str, ...]]:
    """What captions mention of shapes: kind, colour, size and place."""
    return {(shape.kind, shape.color, shape.size, shape.place) for shape in shapes}


def _by_name(told: set[tuple[str, ...]]) -> set[tuple[str, ...]]:
    return {entry[:2] for entry in told}


def _untouched(task: Task, picture: Image.Image) -> bool:
    """Whether an edit left everything unchanged but the ground, or but the changed shapes, depending on the task."""
    width, height = picture.size
    wanted = np.asarray(draw(task.result, width, height), float) / 255
    got = np.asarray(picture.convert("RGBA"), float) / 255
    error = np.abs(_over_gray(got) - _over_gray(wanted)).max(-1)
    if task.kind in ("background", "cut out"):
        touched = ~_mask(task.result.shapes, width, height)
    elif task.kind == "combine":
        touched = _mask(task.result.shapes, width, height)
    else:
        touched = _mask(set(task.references[0].shapes) ^ set(task.result.shapes), width, height)
    return touched.all() or float(error[~_grown(touched, 3)].mean()) < KEPT_ERROR


def _over_gray(pixels: np.ndarray) -> np.ndarray:
    """Colours over middle grey, and alpha."""
    alpha = pixels[..., 3:]
    return np.concatenate([pixels[..., :3] * alpha + 0.5 * (1 - alpha), alpha], axis=-1)


def _mask(shapes: Iterable[Shape], width: int, height: int) -> np.ndarray:
    mask = np.zeros((height, width), bool)
    for shape in shapes:
        mask |= np.asarray(draw(Scene((shape,), ()), width, height))[..., 3] > 0
    return mask

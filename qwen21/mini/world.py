"""The miniature's world: small RGBA scenes, the captions that describe them, and edits from one scene to another.

A scene has one to three shapes on a 3 x 3 grid of places. Within a scene no two shapes share a kind, a colour or a
place, so each can be named by colour and kind. Everything is drawn from a seeded generator; nothing is stored.
`reader.py` reads pictures back into scenes.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import numpy as np
from PIL import Image, ImageDraw

KINDS = ("circle", "square", "triangle", "star")
COLORS = {
    "red": (220, 30, 35),
    "orange": (250, 140, 20),
    "yellow": (250, 225, 40),
    "green": (35, 155, 60),
    "cyan": (45, 205, 215),
    "blue": (35, 75, 215),
    "purple": (130, 45, 170),
    "pink": (250, 130, 185),
}
GROUNDS = {
    "white": (250, 250, 250),
    "gray": (150, 150, 150),
    "black": (20, 20, 20),
    "beige": (222, 202, 164),
    "brown": (110, 72, 45),
}
SIZES = {"small": 0.105, "big": 0.14}  # radius, as a share of the picture's shorter side
PLACES = {
    "top left": (-1, -1),
    "top": (0, -1),
    "top right": (1, -1),
    "left": (-1, 0),
    "center": (0, 0),
    "right": (1, 0),
    "bottom left": (-1, 1),
    "bottom": (0, 1),
    "bottom right": (1, 1),
}
JITTER = 0.015  # largest offset of a shape from the middle of its place, as a share of the shorter side
SPREAD = 0.305  # distance between neighbouring places, as a share of the side
HELD_OUT = 16  # one prompt in this many is excluded from training
OVERSAMPLING = 4

# Distance of a kind's corners from its middle, in radii, so that all kinds look equally large.
_CORNERS = {"square": (4, 1.25, 1.25, math.pi / 4), "triangle": (3, 1.3, 1.3, 0.0), "star": (10, 1.3, 0.6, 0.0)}


@dataclass(frozen=True)
class Shape:
    """One shape. `shift` is its offset (x, y) from the middle of its place, as a share of the shorter side."""

    kind: str
    color: str
    size: str
    place: str
    shift: tuple[float, float] = (0.0, 0.0)

    @property
    def name(self) -> str:
        return f"{self.color} {self.kind}"


@dataclass(frozen=True)
class Scene:
    """Shapes on a ground: one colour, two (a gradient from top to bottom), or none (transparent)."""

    shapes: tuple[Shape, ...]
    ground: tuple[str, ...] = ("white",)


@dataclass(frozen=True)
class Task:
    """A task for the model: paint `result` from a prompt and references. `kind` names the sort of edit."""

    kind: str
    prompt: str
    references: tuple[Scene, ...]
    result: Scene

    @property
    def held_out(self) -> bool:
        """Whether this prompt with these references is excluded from training."""
        told = "|".join([self.prompt, *(caption(scene) for scene in self.references)])
        return zlib.crc32(told.encode()) % HELD_OUT == 0


# --- drawing -------------------------------------------------------------------------------------------------------


def middle(shape: Shape, width: int, height: int) -> tuple[float, float]:
    """The middle of a shape, in pixels."""
    unit, (column, row) = min(width, height), PLACES[shape.place]
    x, y = width * (0.5 + SPREAD * column), height * (0.5 + SPREAD * row)
    return x + shape.shift[0] * unit, y + shape.shift[1] * unit


def silhouette(kind: str, radius: float, at: tuple[float, float], width: int, height: int) -> Image.Image:
    """Coverage of one shape as an 8-bit grey picture with smooth edges."""
    mask = Image.new("L", (width * OVERSAMPLING, height * OVERSAMPLING))
    x, y, r = (value * OVERSAMPLING for value in (*at, radius))
    draw = ImageDraw.Draw(mask)
    if kind == "circle":
        draw.ellipse((x - r, y - r, x + r, y + r), fill=255)
    else:
        count, outer, inner, turn = _CORNERS[kind]
        angles = [turn + 2 * math.pi * i / count for i in range(count)]
        reach = [r * (inner if i % 2 else outer) for i in range(count)]
        points = [(x + d * math.sin(a), y - d * math.cos(a)) for a, d in zip(angles, reach, strict=True)]
        draw.polygon(points, fill=255)
    return mask.resize((width, height), Image.Resampling.BOX)


def draw_ground(ground: tuple[str, ...], width: int, height: int) -> np.ndarray:
    """RGBA pixels [height, width, 4] of a ground, floats in 0 to 255; transparent is black with alpha 0."""
    pixels = np.zeros((height, width, 4))
    if ground:
        top, bottom = (np.array(GROUNDS[name], float) for name in (ground[0], ground[-1]))
        down = np.linspace(0, 1, height)[:, None, None]
        pixels[..., :3] = top + (bottom - top) * down
        pixels[..., 3] = 255
    return pixels


def draw(scene: Scene, width: int = 96, height: int = 96) -> Image.Image:
    """Draw the scene as an RGBA picture; fully transparent pixels are black."""
    pixels = draw_ground(scene.ground, width, height)
    for shape in scene.shapes:
        radius = SIZES[shape.size] * min(width, height)
        mask = silhouette(shape.kind, radius, middle(shape, width, height), width, height)
        cover = np.asarray(mask, float)[..., None] / 255
        alpha = cover + (1 - cover) * pixels[..., 3:] / 255
        color = cover * np.array(COLORS[shape.color]) + (1 - cover) * pixels[..., :3] * (pixels[..., 3:] / 255)
        pixels = np.concatenate([color / np.maximum(alpha, 1e-6), alpha * 255], axis=-1)
    return Image.fromarray(np.round(pixels).clip(0, 255).astype(np.uint8))


# --- words ---------------------------------------------------------------------------------------------------------


def ground_words(ground: tuple[str, ...]) -> str:
    if not ground:
        return "a transparent background"
    if len(ground) == 1:
        return f"a {ground[0]} background"
    return f"a gradient from {ground[0]} to {ground[1]}"


def caption(scene: Scene) -> str:
    """The prompt that asks for a scene: `A big red circle at the top left on a white background.`"""
    shapes = [f"a {shape.size} {shape.name} at the {shape.place}" for shape in scene.shapes]
    listed = " and ".join([", ".join(shapes[:-1]), shapes[-1]] if len(shapes) > 1 else shapes)
    return f"A{listed[1:]} on {ground_words(scene.ground)}."


# --- chance --------------------------------------------------------------------------------------------------------


def random_ground(rng: Random) -> tuple[str, ...]:
    """Draw a random ground: half are plain, a quarter gradients, a quarter transparent."""
    chance = rng.random()
    if chance < 0.25:
        return ()
    return tuple(rng.sample(list(GROUNDS), 1 if chance < 0.75 else 2))


def random_shift(rng: Random) -> tuple[float, float]:
    return rng.uniform(-JITTER, JITTER), rng.uniform(-JITTER, JITTER)


def random_scene(rng: Random, fewest: int = 1, most: int = 3) -> Scene:
    """Draw a random scene. One shape is as likely as two, three are half as likely."""
    count = rng.choices(range(fewest, most + 1), [(2, 2, 1)[n - 1] for n in range(fewest, most + 1)])[0]
    kinds, colors = rng.sample(KINDS, count), rng.sample(list(COLORS), count)
    places = rng.sample(list(PLACES), count)
    shapes = [
        Shape(kind, color, rng.choice(list(SIZES)), place, random_shift(rng))
        for kind, color, place in zip(kinds, colors, places, strict=True)
    ]
    return Scene(tuple(shapes), random_ground(rng))


def _other(rng: Random, choices, taken) -> str:
    taken = set(taken)
    return rng.choice([choice for choice in choices if choice not in taken])


def _recolor(rng: Random) -> Task:
    scene = random_scene(rng)
    shape = rng.choice(scene.shapes)
    color = _other(rng, COLORS, (s.color for s in scene.shapes))
    return _changed(scene, shape, replace(shape, color=color), f"Make the {shape.name} {color}.")


def _move(rng: Random) -> Task:
    scene = random_scene(rng)
    shape = rng.choice(scene.shapes)
    place = _other(rng, PLACES, (s.place for s in scene.shapes))
    moved = replace(shape, place=place, shift=random_shift(rng))
    return _changed(scene, shape, moved, f"Move the {shape.name} to the {place}.")


def _add(rng: Random) -> Task:
    scene = random_scene(rng, most=2)
    new = Shape(
        _other(rng, KINDS, (s.kind for s in scene.shapes)),
        _other(rng, COLORS, (s.color for s in scene.shapes)),
        rng.choice(list(SIZES)),
        _other(rng, PLACES, (s.place for s in scene.shapes)),
        random_shift(rng),
    )
    result = replace(scene, shapes=(*scene.shapes, new))
    return Task("add", f"Add a {new.size} {new.name} at the {new.place}.", (scene,), result)


def _remove(rng: Random) -> Task:
    scene = random_scene(rng, fewest=2)
    shape = rng.choice(scene.shapes)
    rest = tuple(s for s in scene.shapes if s != shape)
    return Task("remove", f"Remove the {shape.name}.", (scene,), replace(scene, shapes=rest))


def _background(rng: Random) -> Task:
    scene = random_scene(rng)
    ground = scene.ground
    while ground == scene.ground or not ground:
        ground = random_ground(rng)
    words = ground_words(ground)
    return Task("background", f"Change the background to {words}.", (scene,), replace(scene, ground=ground))


def _cut_out(rng: Random) -> Task:
    scene = random_scene(rng)
    while not scene.ground:
        scene = random_scene(rng)
    return Task("cut out", "Make the background transparent.", (scene,), replace(scene, ground=()))


def _combine(rng: Random) -> Task:
    """Combine two references: the shape of one, on its own ground and place, in the other's colour."""
    scenes, shape = _pair(rng), rng.randrange(2)
    kept, color = scenes[shape], scenes[1 - shape].shapes[0].color
    result = replace(kept, shapes=(replace(kept.shapes[0], color=color),))
    prompt = f"The shape of <image{shape + 1}> in the color of <image{2 - shape}>."
    return Task("combine", prompt, tuple(scenes), result)


def _copy(rng: Random) -> Task:
    """Copy one of two references, which teaches the model to tell them apart by their numbers."""
    scenes, number = _pair(rng), rng.randrange(2)
    prompt = f"The shape of <image{number + 1}> in the color of <image{number + 1}>."
    return Task("copy", prompt, tuple(scenes), scenes[number])


def _pair(rng: Random) -> list[Scene]:
    """Two scenes with one shape each, in different colours."""
    scenes = [random_scene(rng, most=1) for _ in range(2)]
    while scenes[0].shapes[0].color == scenes[1].shapes[0].color:
        scenes[1] = random_scene(rng, most=1)
    return scenes


def _changed(scene: Scene, shape: Shape, new: Shape, prompt: str) -> Task:
    kind = "recolor" if shape.place == new.place else "move"
    shapes = tuple(new if s == shape else s for s in scene.shapes)
    return Task(kind, prompt, (scene,), replace(scene, shapes=shapes))


EDITS: dict[str, Callable[[Random], Task]] = {
    "recolor": _recolor,
    "move": _move,
    "add": _add,
    "remove": _remove,
    "background": _background,
    "cut out": _cut_out,
    "combine": _combine,
}
LESSONS = {"copy": _copy}  # trained, but never requested


def random_task(rng: Random, kind: str, held_out: bool = False) -> Task:
    """Draw a task of a kind: `paint` (text to image), or one of `EDITS` or `LESSONS`; excluded from training or not."""
    while True:
        if kind == "paint":
            scene = random_scene(rng)
            task = Task(kind, caption(scene), (), scene)
        else:
            task = (EDITS | LESSONS)[kind](rng)
        if task.held_out == held_out:
            return task

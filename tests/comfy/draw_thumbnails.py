"""The templates' thumbnails: what goes in, a wire, what comes out. `python -m tests.comfy.draw_thumbnails` draws them.

Schematic pictures from numpy and Pillow, not the model's: no weights are needed to draw them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from qwen21.mini.sample import make_sample
from qwen21.mini.world import Scene, Shape
from qwen21.mini.world import draw as draw_world

FOLDER = Path(__file__).resolve().parents[2] / "workflows"
SIDE, SCALE = 512, 2  # drawn twice as large, then reduced
BACK, CARD, LINE, INK, ACCENT = (27, 28, 34), (46, 48, 57), (74, 77, 90), (150, 154, 170), (122, 162, 247)
GREEN = (126, 201, 128)


def scene(width: int, height: int, night: bool = False) -> Image.Image:
    """A lake between hills, by day or at night."""
    y, x = np.meshgrid(np.linspace(0, 1, height), np.linspace(0, 1, width), indexing="ij")
    top, low, lake = (
        ((18, 22, 58), (96, 74, 122), (38, 44, 92)) if night else ((88, 152, 214), (253, 214, 164), (98, 156, 184))
    )
    sky = np.array(top) + (np.array(low) - np.array(top)) * (y / 0.62).clip(0, 1)[..., None]
    sun = np.exp(-(((x - 0.68) ** 2 + (y - 0.33) ** 2) / 0.004))[..., None]
    picture = sky + (np.array([255, 250, 225]) - sky) * sun.clip(0, 1)
    ridges = ((0.50, 0.07, 5, 0.4, 0.55), (0.57, 0.05, 8, 2.1, 0.8))
    shade = np.array((40, 46, 84) if night else (86, 128, 116))
    for base, rise, waves, phase, dark in ridges:
        ridge = base - rise * np.sin(waves * x + phase) - 0.4 * rise * np.sin(2.7 * waves * x)
        picture = np.where((y > ridge)[..., None], shade * dark, picture)
    water = np.array(lake) * (0.85 + 0.15 * np.sin(90 * y + 3 * np.sin(11 * x)))[..., None]
    picture = np.where((y > 0.64)[..., None], water, picture)
    return Image.fromarray(picture.clip(0, 255).astype(np.uint8)).convert("RGBA")


def checkerboard(width: int, height: int, cell: int) -> Image.Image:
    y, x = np.indices((height, width)) // cell
    grey = np.where((x + y) % 2, 205, 240).astype(np.uint8)
    return Image.fromarray(np.stack([grey] * 3, axis=-1)).convert("RGBA")


def apple(width: int, height: int, green: bool = False) -> Image.Image:
    """The bundled sample, in red or green."""
    picture = make_sample(width, height)
    if green:
        red, grass, blue, alpha = picture.split()
        picture = Image.merge("RGBA", (grass, red, blue, alpha))
    return picture


def on(back: Image.Image, front: Image.Image) -> Image.Image:
    return Image.alpha_composite(back, front.resize(back.size))


class Canvas:
    """A dark node canvas; all positions in pixels of the finished picture."""

    def __init__(self) -> None:
        self.image = Image.new("RGBA", (SIDE * SCALE, SIDE * SCALE), BACK)
        self.draw = ImageDraw.Draw(self.image)
        for y in range(16, SIDE, 32):
            for x in range(16, SIDE, 32):
                self.draw.ellipse([v * SCALE for v in (x - 1, y - 1, x + 1, y + 1)], fill=LINE)

    def wire(self, start: tuple[int, int], end: tuple[int, int], colour: tuple[int, int, int]) -> None:
        """A curve from socket to socket, level at both ends."""
        t = np.linspace(0, 1, 60)
        pull = max(40, abs(end[0] - start[0]) / 2)
        weights = ((1 - t) ** 3, 3 * (1 - t) ** 2 * t, 3 * (1 - t) * t**2, t**3)
        points = (start, (start[0] + pull, start[1]), (end[0] - pull, end[1]), end)
        curve = sum(w[:, None] * np.array(p) for w, p in zip(weights, points, strict=True)) * SCALE
        self.draw.line([tuple(p) for p in curve], fill=colour, width=4 * SCALE, joint="curve")
        for x, y in (start, end):
            self.draw.ellipse([v * SCALE for v in (x - 6, y - 6, x + 6, y + 6)], fill=colour)

    def card(self, box: tuple[int, int, int, int]) -> None:
        shadow = Image.new("RGBA", self.image.size, (0, 0, 0, 0))
        large = [v * SCALE for v in box]
        ImageDraw.Draw(shadow).rounded_rectangle(large, 12 * SCALE, fill=(0, 0, 0, 150))
        self.image.alpha_composite(shadow.filter(ImageFilter.GaussianBlur(8 * SCALE)))
        self.draw.rounded_rectangle(large, 12 * SCALE, fill=CARD, outline=LINE, width=SCALE)

    def picture(self, box: tuple[int, int, int, int], picture: Image.Image) -> None:
        """A card with a picture."""
        self.card(box)
        left, top, right, bottom = ((v + d) * SCALE for v, d in zip(box, (9, 9, -9, -9), strict=True))
        fitted = picture.resize((right - left, bottom - top), Image.Resampling.LANCZOS)
        mask = Image.new("L", fitted.size, 0)
        ImageDraw.Draw(mask).rounded_rectangle([0, 0, *fitted.size], 7 * SCALE, fill=255)
        self.image.paste(fitted, (left, top), mask)

    def text(self, box: tuple[int, int, int, int], widths: Sequence[float], colour: tuple[int, int, int] = INK) -> None:
        """A card with lines of writing, each a part of its width."""
        self.card(box)
        left, top, right, bottom = box
        for i, width in enumerate(widths):
            y = top + (bottom - top) * (i + 0.75) / (len(widths) + 0.5)
            end = left + 16 + (right - left - 32) * width
            self.draw.rounded_rectangle([v * SCALE for v in (left + 16, y - 4, end, y + 4)], 4 * SCALE, fill=colour)

    def steps(self, count: int, y: int, left: int, right: int) -> None:
        """A row of dots, one per step."""
        for x in np.linspace(left, right, count):
            self.draw.ellipse([v * SCALE for v in (x - 6, y - 6, x + 6, y + 6)], fill=ACCENT)

    def finish(self) -> Image.Image:
        return self.image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.LANCZOS)


RESULT = (228, 148, 484, 364)
PROMPT = (28, 196, 172, 316)
LINES = (0.9, 1.0, 0.75, 0.5)
SMALL = (480, 404)


def from_text(result: Image.Image, steps: int = 0) -> Image.Image:
    canvas = Canvas()
    canvas.wire((172, 256), (228, 256), GREEN)
    canvas.text(PROMPT, LINES)
    canvas.picture(RESULT, result)
    if steps:
        canvas.steps(steps, 392, 248, 464)
    return canvas.finish()


def from_pictures(inputs: Sequence[Image.Image], result: Image.Image) -> Image.Image:
    canvas = Canvas()
    tops = {1: (196,), 2: (128, 266)}[len(inputs)]
    for top in tops:
        canvas.wire((172, top + 60), (228, 256), ACCENT)
    for top, picture in zip(tops, inputs, strict=True):
        canvas.picture((28, top, 172, top + 122), picture)
    canvas.picture(RESULT, result)
    return canvas.finish()


def sampler(result: Image.Image) -> Image.Image:
    """A node of many widgets in place of the prompt."""
    canvas = Canvas()
    canvas.wire((172, 256), (228, 256), (196, 140, 224))
    canvas.card((28, 136, 172, 376))
    for i in range(7):
        y = 172 + i * 28
        canvas.draw.rounded_rectangle([v * SCALE for v in (44, y - 9, 156, y + 9)], 9 * SCALE, fill=BACK)
        end = 60 + (i * 37) % 44
        canvas.draw.rounded_rectangle([v * SCALE for v in (54, y - 3, end + 10, y + 3)], 3 * SCALE, fill=INK)
        canvas.draw.ellipse([v * SCALE for v in (141, y - 4, 149, y + 4)], fill=ACCENT)
    canvas.picture(RESULT, result)
    return canvas.finish()


def thumbnails() -> dict[str, Image.Image]:
    """All thumbnails by workflow."""
    day, night, board = scene(*SMALL), scene(*SMALL, night=True), checkerboard(*SMALL, 22)
    plain = Image.new("RGBA", SMALL, (214, 206, 196, 255))
    red, green = apple(*SMALL), apple(*SMALL, green=True)
    return {
        "text_to_image": from_text(day),
        "turbo": from_text(night, steps=8),
        "edit": from_pictures([on(plain, red)], on(plain, green)),
        "multi_reference_edit": from_pictures([on(plain, red), day], on(day, red)),
        "rgba_text_to_image": from_text(on(board, green)),
        "cut_out": from_pictures([on(night, red)], on(board, red)),
        "ksampler": sampler(on(day, green)),
        "miniature": from_pictures([toy("red")], toy("blue")),
    }


def toy(color: str) -> Image.Image:
    """A picture of the miniature's world."""
    shapes = (Shape("circle", color, "big", "left"), Shape("star", "yellow", "small", "top right"))
    return draw_world(Scene(shapes, ("black", "gray")), *SMALL)


if __name__ == "__main__":
    for name, image in thumbnails().items():
        image.save(FOLDER / f"{name}.jpg", quality=86, optimize=True)
        print(FOLDER / f"{name}.jpg")

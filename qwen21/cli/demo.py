"""`python -m qwen21 demo`: six prompts and four edits on the bundled miniature, through the whole pipeline."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from ..atomic_write import write_together
from ..checkpoint.load import find_folder
from ..mini import WEIGHTS
from ..mini.model import RESOLUTION
from ..mini.world import Scene, Shape, Task, draw
from ..pipeline import Pipeline, Watch
from ..request import Request
from .outputs import write

STEPS = 20
ZOOM = 2
CHECKS = 8  # side in pixels of the chequered squares behind transparent areas
NOTE = (
    f"Painted by the bundled miniature, which knows coloured shapes of {RESOLUTION} pixels a side and was trained on "
    "two CPU cores. The code is what runs the released model."
)

CORAL = Scene((Shape("circle", "red", "big", "left"), Shape("star", "yellow", "small", "top right")), ("gray",))
MEADOW = Scene((Shape("triangle", "green", "big", "center"),), ("white", "beige"))
NIGHT = Scene((Shape("star", "cyan", "big", "center"),), ("black",))


@dataclass(frozen=True)
class DemoJob:
    """One picture of the demo: the name of its file, its prompt, and the scenes in its references."""

    name: str
    prompt: str
    references: tuple[Scene, ...] = ()


def request_of(task: DemoJob | Task, seed: int) -> Request:
    """Build the request of `task`: its prompt and its drawn references, at the miniature's size."""
    pictures = tuple(draw(scene, RESOLUTION, RESOLUTION) for scene in task.references)
    return Request(task.prompt, references=pictures, steps=STEPS, resolution=RESOLUTION, seed=seed)


JOBS = (
    DemoJob("paint_1", "A big red circle at the center on a white background."),
    DemoJob("paint_2", "A big yellow star at the top left on a gradient from black to gray."),
    DemoJob("paint_3", "A big blue square at the left and a small pink circle at the right on a beige background."),
    DemoJob("paint_4", "A small green triangle at the top and a big purple square at the bottom on a gray background."),
    DemoJob("paint_5", "A big orange star at the center on a transparent background."),
    DemoJob(
        "paint_6",
        "A small cyan circle at the top left, a big red triangle at the center and a small yellow square at the bottom "
        "right on a black background.",
    ),
    DemoJob("edit_1", "Make the red circle blue.", (CORAL,)),
    DemoJob("edit_2", "Move the yellow star to the bottom right.", (CORAL,)),
    DemoJob("edit_3", "Make the background transparent.", (MEADOW,)),
    DemoJob("edit_4", "The shape of <image1> in the color of <image2>.", (MEADOW, NIGHT)),
)


def run(out: Path, progress: Callable[[], Any]) -> list[Path]:
    """Paint the demo into the folder `out`; return the paths, the contact sheet last. `progress` makes a bar."""
    pipeline = Pipeline(find_folder(WEIGHTS), keep_loaded=True)
    results = {}
    for seed, job in enumerate(JOBS, 1):
        with progress() as bar:
            watch = Watch(on_step=bar.step, on_stage=bar.stage)
            results[out / f"{job.name}.png"] = pipeline.generate(request_of(job, seed), watch)
    paths = write(results)
    sheet = contact_sheet(JOBS, [result.images[0] for result in results.values()])
    path = out / "contact_sheet.png"
    write_together({path: lambda stream: sheet.save(stream, "PNG")})
    return [*paths, path]


def contact_sheet(jobs: Sequence[DemoJob], pictures: Sequence[Image.Image]) -> Image.Image:
    """Draw every picture after its references and under its prompt: rows of three prompts, then rows of two edits."""
    side, gap, top = ZOOM * RESOLUTION, 16, 64
    font = ImageFont.load_default(14)
    sheet = Image.new("RGB", (6 * (side + gap) + gap, 4 * (top + side + gap)), "white")
    pen = ImageDraw.Draw(sheet)
    x, y = gap, gap
    for job, picture in zip(jobs, pictures, strict=True):
        width = (3 if job.references else 2) * (side + gap)
        if x + width > sheet.width:
            x, y = gap, y + top + side + gap
        pen.text((x, y), "\n".join(textwrap.wrap(job.prompt, width // 8)[:3]), fill="black", font=font)
        shown = [*(draw(scene, RESOLUTION, RESOLUTION) for scene in job.references), picture]
        for i, each in enumerate(shown):
            left = x + i * (side + gap)
            sheet.paste(_shown(each), (left, y + top - 8))
            pen.rectangle((left - 1, y + top - 9, left + side, y + top + side - 8), outline="gray")
            sign = ("+", ">")[i == len(job.references) - 1] if i < len(job.references) else ""
            pen.text((left + side + 4, y + top + side // 2 - 16), sign, fill="black", font=font)
        x += width
    return sheet


def _shown(picture: Image.Image) -> Image.Image:
    """Enlarge a picture and put it over a chequered background."""
    large = picture.convert("RGBA").resize((picture.width * ZOOM, picture.height * ZOOM), Image.Resampling.BICUBIC)
    checks = Image.new("RGBA", large.size, "white")
    pen = ImageDraw.Draw(checks)
    for y in range(0, large.height, CHECKS):
        for x in range(y % (2 * CHECKS), large.width, 2 * CHECKS):
            pen.rectangle((x, y, x + CHECKS - 1, y + CHECKS - 1), fill="lightgray")
    checks.alpha_composite(large)
    return checks.convert("RGB")

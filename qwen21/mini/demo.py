"""`python -m qwen21 demo`: a text to image and an edit on an embedded model, through the whole pipeline."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..checkpoint.load import find_folder
from ..images import open_image
from ..outputs import write
from ..pipeline import Pipeline, Request, Result, Watch
from .random_model import write_random_model

SAMPLE = Path(__file__).with_name("sample.png")
NOTE = (
    "The embedded model has random weights, so its pictures are coloured noise: the demo shows that every stage runs, "
    "not what the released model paints."
)


def jobs(sample: Path) -> dict[str, Request]:
    """What the demo paints, by file name."""
    edit = "Put the fruit of <image1> on a wooden table."
    return {
        "text_to_image.png": Request("A red fruit on a wooden table.", steps=8, resolution=192, seed=1),
        "edit.png": Request(edit, references=(open_image(sample),), steps=8, resolution=192, seed=1),
    }


def run(out: Path, progress: Callable[[], Any]) -> list[Path]:
    """Paint the demo's pictures into the folder `out`; returns their paths. `progress` makes a progress bar."""
    results: dict[Path, Result] = {}
    with tempfile.TemporaryDirectory() as folder:
        pipeline = Pipeline(find_folder(write_random_model(Path(folder))), keep_loaded=True)
        for name, request in jobs(SAMPLE).items():
            with progress() as bar:
                results[out / name] = pipeline.generate(request, Watch(on_step=bar.step, on_stage=bar.stage))
    return write(results)

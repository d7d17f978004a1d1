"""The bundled miniature means something: it paints what it is told, and what breaks the model or the code is seen."""

from random import Random

import numpy as np
import pytest
import torch

from qwen21 import mini
from qwen21.checkpoint.load import find_folder
from qwen21.mini.demo import request_of
from qwen21.mini.reader import judge
from qwen21.mini.world import EDITS, random_task
from qwen21.pipeline import Pipeline
from qwen21.sequence import ImageSegment


@pytest.fixture(scope="module")
def files():
    return find_folder(mini.WEIGHTS)


@pytest.fixture
def pipeline(files):
    return Pipeline(files, keep_loaded=True)


def fixed(kinds, count):
    """The same held-out tasks every time."""
    return [random_task(Random(f"{kind} {i}"), kind, held_out=True) for kind in kinds for i in range(count)]


def verdicts(pipeline, tasks):
    return [judge(task, pipeline.generate(request_of(task, seed)).images[0]) for seed, task in enumerate(tasks)]


def share(found, *parts):
    return np.mean([all(getattr(verdict, part) for part in parts) for verdict in found])


def test_prompts_are_painted(pipeline):
    found = verdicts(pipeline, fixed(["paint"], 16))
    assert share(found, "asked") >= 0.85
    assert share(found, "asked", "placed") >= 0.75


def test_edits_do_what_is_asked_and_nothing_else(pipeline):
    tasks = fixed(list(EDITS), 3)
    found = verdicts(pipeline, tasks)
    assert share(found, "asked", "placed") >= 0.8
    assert share(found, "kept") >= 0.8
    assert share([v for v, task in zip(found, tasks, strict=True) if not task.result.ground], "alpha") >= 0.85


def lose_alpha(monkeypatch):
    from qwen21 import images

    read = images.from_vae_pixels

    def opaque(pixels):
        for picture in read(pixels):
            picture.putalpha(255)
            yield picture

    monkeypatch.setattr(images, "from_vae_pixels", lambda pixels: list(opaque(pixels)))


def change_references(change):
    def patch(monkeypatch):
        encode = Pipeline._encode_references
        monkeypatch.setattr(Pipeline, "_encode_references", lambda *a: change(encode(*a)))

    return patch


def lose_the_last(references):
    from dataclasses import replace

    *others, last = references
    return [*others, replace(last, latent=torch.zeros_like(last.latent))]


def swap_axes(monkeypatch):
    axes = ImageSegment.axes

    def swapped(segment):
        frame, height, width = axes(segment)
        return frame, width, height

    monkeypatch.setattr(ImageSegment, "axes", swapped)


@pytest.mark.parametrize(
    ("kind", "breaks", "parts"),
    [
        ("combine", change_references(lambda references: references[::-1]), ("asked", "kept")),
        ("recolor", change_references(lose_the_last), ("asked", "placed", "kept")),
        ("move", swap_axes, ("asked", "placed")),
        ("cut out", lose_alpha, ("alpha",)),
    ],
    ids=["slots swapped", "a reference lost", "rope axes swapped", "alpha lost"],
)
def test_what_breaks_the_model_is_seen(pipeline, monkeypatch, kind, breaks, parts):
    breaks(monkeypatch)
    assert share(verdicts(pipeline, fixed([kind], 4)), *parts) <= 0.5

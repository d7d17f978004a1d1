"""The bundled miniature means something: it paints what it is told, and what breaks the model or the code is seen."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch

from qwen21 import mini
from qwen21.checkpoint.load import find_folder
from qwen21.cli.demo import request_of
from qwen21.inputs import images
from qwen21.mini.reader import judge
from qwen21.mini.world import EDITS, random_task
from qwen21.models import dit
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
    tasks = fixed(list(EDITS), 6)
    found = verdicts(pipeline, tasks)
    assert share(found, "asked", "placed") >= 0.8
    assert share(found, "kept") >= 0.8
    assert share([v for v, task in zip(found, tasks, strict=True) if not task.result.ground], "alpha") >= 0.85


def lose_alpha(monkeypatch):
    read = images.from_vae_pixels

    def opaque(pixels):
        pictures = list(read(pixels))
        for picture in pictures:
            picture.putalpha(255)
        return pictures

    monkeypatch.setattr(images, "from_vae_pixels", opaque)


def swap_slots(monkeypatch):
    """Each of two latents in the slot of the other; the encoder sees the pictures as they are."""
    encode = Pipeline._encode_references
    monkeypatch.setattr(Pipeline, "_encode_references", lambda *args: encode(*args)[::-1])


def lose_a_latent(monkeypatch):
    encode = Pipeline._encode_references

    def lost(*args):
        *others, last = encode(*args)
        return [*others, replace(last, latent=torch.zeros_like(last.latent))]

    monkeypatch.setattr(Pipeline, "_encode_references", lost)


def swap_axes(monkeypatch):
    """Height for width in the positions of pictures, which are square here."""
    rotation = dit.rotation

    def swapped(segment, *args):
        turn = rotation(segment, *args)
        if isinstance(segment, ImageSegment):
            turn = turn.unflatten(0, (segment.height, segment.width)).transpose(0, 1).flatten(0, 1)
        return turn

    monkeypatch.setattr(dit, "rotation", swapped)


@pytest.mark.parametrize(
    ("kind", "breaks", "parts"),
    [
        ("combine", swap_slots, ("asked",)),
        ("recolor", lose_a_latent, ("kept",)),
        ("move", swap_axes, ("placed",)),
        ("cut out", lose_alpha, ("alpha",)),
    ],
    ids=["slots swapped", "a reference lost", "rope axes swapped", "alpha lost"],
)
def test_what_breaks_the_model_is_seen(files, monkeypatch, kind, breaks, parts):
    tasks = fixed([kind], 4)
    assert share(verdicts(Pipeline(files, keep_loaded=True), tasks), *parts) >= 0.75
    breaks(monkeypatch)
    assert share(verdicts(Pipeline(files, keep_loaded=True), tasks), *parts) <= 0.25

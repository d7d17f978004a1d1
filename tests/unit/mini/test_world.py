"""The toy world: what is drawn is read back, what is wrong is not taken for right, and what is held out stays out."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from PIL import Image, ImageFilter

from qwen21.mini.reader import judge, read
from qwen21.mini.world import (
    COLORS,
    EDITS,
    GROUNDS,
    KINDS,
    PLACES,
    SIZES,
    Scene,
    Shape,
    Task,
    caption,
    draw,
    random_scene,
    random_task,
)

KINDS_OF_TASKS = ["paint", *EDITS]


def told(scene):
    return {(shape.kind, shape.color, shape.size, shape.place) for shape in scene.shapes}


@pytest.mark.parametrize("size", [(96, 96), (128, 128), (128, 96), (96, 128)])
def test_every_scene_is_read_back(size):
    for seed in range(10):
        scene = random_scene(Random(seed))
        reading = read(draw(scene, *size))
        assert reading.faults == ()
        assert (told(reading.scene), reading.scene.ground) == (told(scene), scene.ground)
        for shape in scene.shapes:
            (found,) = [s for s in reading.scene.shapes if s.color == shape.color]
            assert np.abs(np.subtract(found.shift, shape.shift)).max() < 0.02


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_every_kind_in_every_colour(kind, size):
    grounds = [(), *[(name,) for name in GROUNDS], ("black", "white"), ("white", "brown")]
    for color, place, ground in zip(COLORS, PLACES, grounds, strict=False):
        scene = Scene((Shape(kind, color, size, place),), ground)
        reading = read(draw(scene))
        assert (told(reading.scene), reading.scene.ground, reading.faults) == (told(scene), ground, ())


@pytest.mark.parametrize("kind", KINDS_OF_TASKS)
def test_right_results_are_right_and_sources_are_not(kind):
    for seed in range(6):
        task = random_task(Random(seed), kind)
        assert judge(task, draw(task.result)).right, task
        for reference in task.references:
            assert not judge(task, draw(reference)).right, task


def altered(picture, change):
    pixels = np.array(picture, dtype=float)
    change(pixels)
    return Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8))


SCENE = Scene((Shape("square", "red", "big", "left"), Shape("star", "blue", "small", "right")), ("white",))
TASK = Task("paint", caption(SCENE), (), SCENE)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda p: p.__setitem__((slice(None), slice(None), 3), 0.5 * p[..., 3]), "alpha"),
        (lambda p: p.__setitem__((slice(None), slice(None), slice(0, 3)), p[..., [2, 1, 0]]), "asked"),
        (lambda p: p.__setitem__((slice(None), slice(None)), p[:, ::-1].copy()), "placed"),
        (lambda p: p.__setitem__((slice(60, 90), slice(40, 60), slice(0, 3)), (20, 20, 20)), "kept"),
        (lambda p: p.__setitem__((slice(10, 30), slice(40, 60), slice(0, 3)), COLORS["green"]), "asked"),
        (lambda p: p.__setitem__((slice(35, 50), slice(5, 20), slice(0, 3)), GROUNDS["white"]), "kept"),
        (lambda p: p.__setitem__((slice(None), slice(None), slice(0, 3)), 0.8 * p[..., :3]), "kept"),
    ],
    ids=["half clear", "colours swapped", "mirrored", "a dark patch", "one shape more", "a bite", "too dark"],
)
def test_wrong_pictures_are_seen(change, part):
    assert judge(TASK, draw(SCENE)).right
    assert not getattr(judge(TASK, altered(draw(SCENE), change)), part)


def test_blur_noise_and_nothing_are_no_shapes():
    blurred = draw(SCENE).filter(ImageFilter.GaussianBlur(8))
    assert not judge(TASK, blurred).right
    noise = np.random.default_rng(0).integers(0, 255, (96, 96, 4), dtype=np.uint8)
    assert not judge(TASK, Image.fromarray(noise)).right
    assert not judge(TASK, Image.new("RGBA", (96, 96))).right
    assert read(Image.new("RGBA", (96, 96))).scene == Scene((), ())


def test_an_edit_must_leave_the_rest_alone():
    pink = replace(SCENE, shapes=(replace(SCENE.shapes[0], color="pink"), SCENE.shapes[1]))
    task = Task("recolor", "", (SCENE,), pink)
    moved = replace(task.result.shapes[1], shift=(0.0, 0.09))
    assert judge(task, draw(task.result)).right
    verdict = judge(task, draw(replace(task.result, shapes=(task.result.shapes[0], replace(moved, size="big")))))
    assert verdict.asked and not verdict.kept


def test_held_out_tasks_never_occur_in_training():
    def seen(kind, held_out, count):
        tasks = [random_task(Random(f"{held_out} {i}"), kind, held_out) for i in range(count)]
        return {(task.prompt, *map(caption, task.references)) for task in tasks}

    for kind in KINDS_OF_TASKS:
        assert not seen(kind, True, 60) & seen(kind, False, 400)


def test_the_same_seed_draws_the_same():
    for kind in KINDS_OF_TASKS:
        assert random_task(Random(4), kind) == random_task(Random(4), kind)
        assert random_task(Random(4), kind) != random_task(Random(5), kind)


@pytest.mark.parametrize("kind", list(EDITS))
def test_an_edit_changes_something(kind):
    for seed in range(40):
        task = random_task(Random(seed), kind)
        assert task.result not in task.references
        colors = [shape.color for shape in task.result.shapes]
        assert len(set(colors)) == len(colors)


def test_a_copy_is_of_the_reference_that_is_named():
    tasks = [random_task(Random(seed), "copy") for seed in range(20)]
    assert all(task.result == task.references["<image2>" in task.prompt] for task in tasks)
    assert all(task.references[0] != task.references[1] for task in tasks)
    assert len({task.prompt for task in tasks}) == 2

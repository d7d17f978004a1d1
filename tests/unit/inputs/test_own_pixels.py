"""Edits at the picture's own size, and what a mask keeps: pixels, bit for bit."""

import numpy as np
import pytest
from PIL import Image

from qwen21.checkpoint.load import find_folder
from qwen21.cli.main import main
from qwen21.inputs.images import kept_outside, open_image
from qwen21.inputs.references import Canvas, Reference, canvas_size, reference_size
from qwen21.mini import WEIGHTS
from qwen21.pipeline import Pipeline
from qwen21.request import Request, resolve_request
from tests.support import tiny


def noise(width, height, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 4), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return find_folder(tiny.Tiny(tmp_path_factory.mktemp("model")).folder)


@pytest.mark.parametrize(
    ("size", "own"), [((96, 64), (96, 64)), ((127, 95), (96, 64)), ((200, 133), (192, 128)), ((7, 40), (32, 32))]
)
def test_resolution_0_is_the_own_size_on_the_grid(size, own):
    assert reference_size(*size, 0) == own
    assert canvas_size([(500, 500), size], "last", 0) == Canvas(*own)


def test_resolution_0_keeps_every_pixel_of_what_fits_the_grid():
    picture = noise(96, 64)
    assert Reference.prepare(picture, 0).image.tobytes() == picture.tobytes()


def test_mirror_pads_the_own_size():
    picture = noise(90, 70)
    reference = Reference.prepare(picture, 0, "mirror")
    assert reference.image.size == (96, 96) and reference.crop == (90, 70)
    assert reference.image.crop((0, 0, 90, 70)).tobytes() == picture.tobytes()
    padded = np.asarray(reference.image)
    assert np.array_equal(padded[:, 90:], padded[:, 89:83:-1]) and np.array_equal(padded[70:], padded[69:43:-1])


def test_an_edit_at_the_own_size(files):
    plan = resolve_request(Request("x", references=(noise(96, 64), noise(130, 100)), resolution=0), files)
    assert [reference.image.size for reference in plan.references] == [(96, 64), (128, 96)]
    assert plan.size == (128, 96)
    assert resolve_request(Request("x", init_image=noise(65, 130), resolution=0), files).size == (64, 128)


def test_the_miniature_has_a_size_of_its_own(files):
    assert resolve_request(Request("x"), find_folder(WEIGHTS)).size == (96, 96)
    assert resolve_request(Request("x", resolution=128), find_folder(WEIGHTS)).size == (128, 128)
    assert resolve_request(Request("x"), files).size == (1024, 1024)


def test_plan_knows_the_own_size(files, tmp_path, capsys):
    noise(200, 133).save(tmp_path / "a.png")
    model = files.dit.checkpoint.path.parent
    assert main(["plan", "--model", str(model), "--image", str(tmp_path / "a.png"), "--resolution", "0"]) == 0
    assert "192x128 pixels, batch 1, 1 reference" in capsys.readouterr().out


# --- masks ---------------------------------------------------------------------------------------------------------


def test_pixels_outside_the_mask_are_the_pictures_own(files):
    """Colours of what is transparent and alpha too."""
    picture, mask = noise(96, 64), Image.new("L", (96, 64), 0)
    mask.paste(255, (20, 10, 50, 40))
    request = Request("x", init_image=picture, mask=mask, resolution=0, steps=2, batch=2)
    plain = Pipeline(files).generate(Request("x", init_image=picture, resolution=0, steps=2, batch=2))
    outside = np.asarray(mask) == 0
    for result, free in zip(Pipeline(files).generate(request).images, plain.images, strict=True):
        assert np.array_equal(np.asarray(result)[outside], np.asarray(picture)[outside])
        assert not np.array_equal(np.asarray(free)[outside], np.asarray(picture)[outside])
        assert not np.array_equal(np.asarray(result)[~outside], np.asarray(picture)[~outside])


def test_a_soft_edge_blends():
    """By hand: half of red over half of blue; a fully transparent side lends its alpha and none of its colour."""
    own = Image.fromarray(np.array([[[0, 0, 255, 255], [0, 0, 255, 255], [0, 255, 0, 0]]], dtype=np.uint8))
    painted = Image.fromarray(np.array([[[255, 0, 0, 255], [255, 0, 0, 255], [255, 0, 0, 200]]], dtype=np.uint8))
    mask = Image.fromarray(np.array([[255, 51, 51]], dtype=np.uint8))
    (found,) = kept_outside([painted], own, mask)
    assert np.asarray(found).tolist() == [[[255, 0, 0, 255], [51, 0, 204, 255], [255, 0, 0, 40]]]


def test_a_mask_through_the_command_line(files, tmp_path):
    picture, mask = noise(96, 64), Image.new("L", (96, 64), 0)
    mask.paste(255, (0, 0, 48, 64))
    picture.save(tmp_path / "a.png"), mask.save(tmp_path / "m.png")
    command = ["generate", "--model", str(files.dit.checkpoint.path.parent), "--prompt", "x", "--steps", "1"]
    command += ["--init-image", str(tmp_path / "a.png"), "--mask", str(tmp_path / "m.png"), "--resolution", "0"]
    assert main([*command, "--out", str(tmp_path / "o.png")]) == 0
    found = open_image(tmp_path / "o.png")
    assert found.size == (96, 64)
    assert found.crop((48, 0, 96, 64)).tobytes() == picture.crop((48, 0, 96, 64)).tobytes()

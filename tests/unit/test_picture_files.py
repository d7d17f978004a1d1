"""The kinds of picture that the command line writes: pixels, alpha and the manifest."""

import io
import json

import numpy as np
import pytest
from PIL import ExifTags, Image

from qwen21.cli import main
from qwen21.errors import UserError
from qwen21.images import picture_bytes
from qwen21.outputs import check_size
from tests import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.Tiny(tmp_path_factory.mktemp("model")).folder


def noise():
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 40, 4), dtype=np.uint8))


def comment(image):
    """EXIF's UserComment behind its character code."""
    code, text = np.split(np.frombuffer(image.getexif().get_ifd(ExifTags.IFD.Exif)[0x9286], "u1"), [8])
    assert code.tobytes() == b"ASCII\0\0\0"
    return json.loads(text.tobytes().decode("ascii"))


def test_webp_is_lossless_in_what_is_transparent_too():
    with Image.open(io.BytesIO(picture_bytes(noise(), ".webp", {"qwen21": "ein Bär 一只猫"}))) as image:
        assert (image.format, image.mode) == ("WEBP", "RGBA")
        assert image.tobytes() == noise().tobytes()
        assert comment(image) == {"qwen21": "ein Bär 一只猫"}


@pytest.mark.parametrize("suffix", [".jpg", ".jpeg"])
def test_jpeg_is_over_white(suffix):
    clear = Image.new("RGBA", (16, 16), (255, 0, 0, 51))  # a fifth of red over white
    with Image.open(io.BytesIO(picture_bytes(clear, suffix, {"qwen21": "{}"}))) as image:
        assert (image.format, image.mode) == ("JPEG", "RGB")
        assert np.abs(np.asarray(image).astype(int) - [255, 204, 204]).max() <= 2
        assert comment(image) == {"qwen21": "{}"}


def test_a_manifest_that_a_jpeg_cannot_hold_costs_no_picture():
    with Image.open(io.BytesIO(picture_bytes(noise(), ".jpg", {"qwen21": "x" * 70000}))) as image:
        assert image.size == (40, 24) and not image.getexif()


@pytest.mark.parametrize("name", ["o.webp", "o.jpg", "o.JPEG", "o.png"])
def test_the_command_line_writes_it(model, tmp_path, capsys, name):
    command = ["generate", "--model", str(model), "--prompt", "ü", "--steps", "1", "--resolution", "32", "--batch", "2"]
    assert main([*command, "--out", str(tmp_path / name)]) == 0
    stem, dot, suffix = name.rpartition(".")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{stem}-1{dot}{suffix}", f"{stem}-2{dot}{suffix}"]
    with Image.open(tmp_path / f"{stem}-1.{suffix}") as image:
        manifest = json.loads(image.text["qwen21"] if suffix == "png" else comment(image)["qwen21"])
        assert image.size == (32, 32) and manifest["prompt"] == "ü"
    said = f"qwen21: warning: {name}: a JPEG holds no transparency, so the picture goes over white"
    assert (said in capsys.readouterr().err) == (suffix in ("jpg", "JPEG"))
    assert main(["plan", *command[1:], "--out", str(tmp_path / name)]) == 0
    assert (said in capsys.readouterr().err) == (suffix in ("jpg", "JPEG"))


def test_jobs_of_a_session_write_it(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs.json").write_text(json.dumps([{"out": "a.webp"}, {"out": "b.png"}]))
    command = ["generate", "--model", str(model), "--prompt", "x", "--steps", "1", "--resolution", "32"]
    assert main([*command, "--session", "jobs.json"]) == 0
    with Image.open("a.webp") as webp, Image.open("b.png") as png:
        assert webp.tobytes() == png.tobytes()


def test_webp_has_a_largest_size(tmp_path):
    with pytest.raises(UserError, match="WebP holds 16383 pixels a side, not 16384x64"):
        check_size(tmp_path / "a.webp", (16384, 64))
    check_size(tmp_path / "a.png", (16384, 64))

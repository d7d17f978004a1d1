"""Requests from plain values: every option as JSON and as a command line write it, and what is refused."""

import io

import pytest
from PIL import Image

from qwen21.errors import UserError
from qwen21.request import Request
from qwen21.sampling.euler import GuidanceRange

GOOD = [
    ({"negative": "fog"}, "negative", "fog"),
    ({"cfg": "4.5"}, "cfg", 4.5),
    ({"cfg": 4}, "cfg", 4.0),
    ({"cfg-range": "1:10:4.0"}, "cfg_ranges", (GuidanceRange(1, 10, 4.0),)),
    ({"cfg_range": [1, 10, 4]}, "cfg_ranges", (GuidanceRange(1, 10, 4.0),)),
    ({"cfg_range": [[1, 2, 4], "3:4:1"]}, "cfg_ranges", (GuidanceRange(1, 2, 4.0), GuidanceRange(3, 4, 1.0))),
    ({"steps": "8"}, "steps", 8),
    ({"schedule": "turbo"}, "schedule", "turbo"),
    ({"sigmas": "1,0.5,0"}, "sigmas", (1.0, 0.5, 0.0)),
    ({"sigmas": [1, 0.5, 0]}, "sigmas", (1.0, 0.5, 0.0)),
    ({"shift": "dynamic"}, "shift", "dynamic"),
    ({"shift": 0.7}, "shift", 0.7),
    ({"seed": 2**63}, "seed", 2**63),
    ({"size": "64x32"}, "size", (64, 32)),
    ({"size": [64, 32]}, "size", (64, 32)),
    ({"resolution": 0}, "resolution", 0),
    ({"canvas": "first"}, "canvas", "first"),
    ({"batch": 3}, "batch", 3),
    ({"edit-noise": "released"}, "edit_noise", "released"),
    ({"denoise": 0.5}, "denoise", 0.5),
    ({"prefix_cache": "off"}, "prefix_cache", False),
    ({"prefix-cache": True}, "prefix_cache", True),
    ({"seed": None}, "seed", 0),
    ({"prompt": ["a", "b"]}, "prompts", ("a", "b")),
]


@pytest.mark.parametrize(("options", "name", "expected"), GOOD, ids=[str(options) for options, *_ in GOOD])
def test_options_are_read(options, name, expected):
    assert getattr(Request.from_dict({"prompt": "x", **options}), name) == expected


BAD = [
    ({"sead": 3}, "there is no option 'sead'"),
    ({"steps": "many"}, "steps: got 'many', expected a whole number"),
    ({"steps": True}, "steps: got True, expected a whole number"),
    ({"cfg": [1]}, "cfg: got [1], expected a number"),
    ({"size": "big"}, "size: got 'big', expected WIDTHxHEIGHT"),
    ({"size": [1, 2, 3]}, "expected WIDTHxHEIGHT"),
    ({"sigmas": {"a": 1}}, "expected a list of sigmas"),
    ({"shift": "much"}, "shift: got 'much', expected a number such as 0.7, or dynamic"),
    ({"shift": float("nan")}, "shift: got nan"),
    ({"cfg_range": "1:2"}, "cfg_range: got '1:2', expected A:B:CFG"),
    ({"canvas": "middle"}, "canvas: got 'middle', expected one of last, first, largest"),
    ({"prefix_cache": 1}, "prefix_cache: got 1, expected on or off"),
    ({"image": [3]}, "image: got 3, expected a picture"),
    ({"prompt": ["a", 3]}, "prompt: got 3, expected a string"),
    ({"prompt": None}, "prompt is missing"),
    ({"image": ["x.png"] * 11}, "11 references"),
]


@pytest.mark.parametrize(("options", "words"), BAD, ids=[str(options)[:40] for options, _ in BAD])
def test_what_cannot_be_is_refused_by_name(options, words):
    with pytest.raises(UserError) as error:
        Request.from_dict({"prompt": "x", **options})
    assert words in str(error.value) and "\n" not in str(error.value)


def test_pictures_are_paths_bytes_or_images(tmp_path):
    picture = Image.new("RGBA", (32, 48), (10, 20, 30, 40))
    picture.save(tmp_path / "a.png")
    held = io.BytesIO()
    picture.save(held, "PNG")
    options = {"image": [str(tmp_path / "a.png"), held.getvalue(), picture], "init_image": picture, "mask": picture}
    request = Request.from_dict({"prompt": "x", **options})
    for read in (*request.references, request.init_image, request.mask):
        assert read.mode == "RGBA" and read.tobytes() == picture.tobytes()


@pytest.mark.parametrize("data", [b"", b"no picture", b"\x89PNG\r\n\x1a\n broken"])
def test_bytes_that_are_no_picture_are_refused(data):
    with pytest.raises(UserError, match="the picture cannot be read"):
        Request.from_dict({"prompt": "x", "image": [data]})

"""Reading pictures of every kind, writing PNGs whole or not at all, and VAE pixels as diffusers makes them."""

import os

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image

from qwen21.errors import UserError
from qwen21.inputs.images import from_pixels, from_vae_pixels, open_image, save_png, to_rgba, to_vae_pixels

PROCESSOR = VaeImageProcessor(vae_scale_factor=16, vae_latent_channels=64)


def noise(height=5, width=7, channels=4, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def one_line(info):
    text = str(info.value)
    assert "\n" not in text and len(text) < 700
    return text


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"])
def test_modes_become_what_pillow_makes_of_them(tmp_path, mode):
    picture = Image.fromarray(noise()).convert("RGB" if mode == "CMYK" else "RGBA")
    picture = picture.convert("RGB").convert(mode) if mode in ("YCbCr", "P") else picture.convert(mode)
    path = tmp_path / ("x.tif" if mode in ("CMYK", "YCbCr") else "x.png")
    picture.save(path)
    got = open_image(path)
    with Image.open(path) as again:
        want = again.convert("RGB").convert("RGBA") if mode == "CMYK" else again.convert("RGBA")
    assert got.mode == "RGBA" and got.tobytes() == want.tobytes()


@pytest.mark.parametrize("name", ["x.jpg", "x.webp", "x.gif", "x.bmp"])
def test_formats(tmp_path, name):
    Image.fromarray(noise(channels=3)).save(tmp_path / name)
    with Image.open(tmp_path / name) as again:
        want = again.convert("RGBA")
    assert open_image(tmp_path / name).tobytes() == want.tobytes()


@pytest.mark.parametrize("transparency", [2, bytes([255, 128, 0, 7])])
def test_palette_with_transparency(tmp_path, transparency):
    picture = Image.new("P", (4, 1))
    picture.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90, 1, 2, 3])
    picture.putdata([0, 1, 2, 3])
    picture.save(tmp_path / "x.png", transparency=transparency)
    alpha = [255, 255, 0, 255] if isinstance(transparency, int) else list(transparency)
    got = np.asarray(open_image(tmp_path / "x.png"))[0]
    assert got[:, 3].tolist() == alpha
    assert got[1, :3].tolist() == [40, 50, 60]


VALUES = [0, 1, 128, 129, 385, 386, 32768, 40000, 65406, 65407, 65535]


@pytest.mark.parametrize("mode", ["I;16", "I"])
def test_16_bit_grey_is_scaled_not_clipped(mode):
    dtype = np.uint16 if mode == "I;16" else np.int32
    picture = to_rgba(Image.fromarray(np.array([VALUES], dtype=dtype)))
    got = np.asarray(picture)[0]
    assert got[:, 0].tolist() == [int(value / 257 + 0.5) for value in VALUES]
    assert (got[:, :3] == got[:, :1]).all() and (got[:, 3] == 255).all()


def test_16_bit_png_with_a_transparent_grey(tmp_path):
    Image.fromarray(np.array([VALUES], dtype=np.uint16)).save(tmp_path / "x.png", transparency=40000)
    got = np.asarray(open_image(tmp_path / "x.png"))[0]
    assert got[:, 3].tolist() == [0 if value == 40000 else 255 for value in VALUES]
    assert got[7, 0] == 156


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("name", ["x.jpg", "x.png", "x.webp"])
def test_exif_orientation_is_applied(tmp_path, orientation, name):
    pixels = np.zeros((16, 32, 3), dtype=np.uint8)
    pixels[:8, :16, 0] = 255  # red is top left before turning
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(tmp_path / name, exif=exif)
    got = np.asarray(open_image(tmp_path / name))
    qk_norm_rope = {
        1: pixels,
        2: pixels[:, ::-1],
        3: pixels[::-1, ::-1],
        4: pixels[::-1],
        5: pixels.transpose(1, 0, 2),
        6: np.rot90(pixels, -1),
        7: pixels.transpose(1, 0, 2)[::-1, ::-1],
        8: np.rot90(pixels),
    }[orientation]
    assert got.shape[:2] == qk_norm_rope.shape[:2]
    assert ((got[..., 0] > 127) == (qk_norm_rope[..., 0] > 127)).mean() > 0.97


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_broken_exif_is_ignored(tmp_path):
    Image.fromarray(noise(channels=3)).save(tmp_path / "x.png", exif=b"Exif\x00\x00MM\x00*\x00\x00\x00\x08\xff\xff\x01")
    assert open_image(tmp_path / "x.png").size == (7, 5)


@pytest.mark.parametrize("name", ["x.gif", "x.webp", "x.png", "x.tif"])
def test_animation_gives_its_first_frame(tmp_path, name):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:])
    red, green, blue, alpha = open_image(tmp_path / name).getpixel((4, 4))
    assert red > 240 and green < 16 and blue < 16 and alpha == 255


def test_one_pixel(tmp_path):
    Image.new("RGBA", (1, 1), (1, 2, 3, 4)).save(tmp_path / "x.png")
    assert open_image(tmp_path / "x.png").getpixel((0, 0)) == (1, 2, 3, 4)


def test_files_that_are_no_pictures(tmp_path):
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "drawing.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n")
    assert "does not exist" in one_line(_refused(tmp_path / "missing.png"))
    assert "is a folder" in one_line(_refused(tmp_path))
    for name in ("empty.png", "text.png", "drawing.eps"):
        assert "not a picture" in one_line(_refused(tmp_path / name))
    one_line(_refused("x" * 300 + ".png"))
    one_line(_refused("x\0y.png"))


def _refused(path):
    with pytest.raises(UserError) as info:
        open_image(path)
    return info


@pytest.mark.parametrize("name", ["x.png", "x.jpg", "x.webp", "x.gif", "x.tif"])
def test_truncated_files(tmp_path, name):
    Image.fromarray(noise(64, 64, 3)).save(tmp_path / name)
    whole = (tmp_path / name).read_bytes()
    for share in (0.3, 0.6, 0.9):
        (tmp_path / name).write_bytes(whole[: int(len(whole) * share)])
        assert name in one_line(_refused(tmp_path / name))


def test_picture_without_pixels(tmp_path):
    Image.fromarray(noise(channels=3)).save(tmp_path / "x.bmp")
    data = bytearray((tmp_path / "x.bmp").read_bytes())
    data[18:22] = (0).to_bytes(4, "little")  # width
    (tmp_path / "x.bmp").write_bytes(data)
    one_line(_refused(tmp_path / "x.bmp"))
    with pytest.raises(UserError, match="0x4"):
        to_rgba(Image.new("RGB", (0, 4)))


def test_decompression_bomb(tmp_path, monkeypatch):
    Image.new("1", (400, 400)).save(tmp_path / "x.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    assert "too many pixels" in one_line(_refused(tmp_path / "x.png"))


def test_save_keeps_pixels_alpha_and_text(tmp_path):
    path = tmp_path / "out.png"
    text = {"manifest": '{"seed": 1}', "prompt": "ein Bär 一只猫", "odd": "a\ud800b"}
    save_png(Image.fromarray(noise()), path, text)
    with Image.open(path) as again:
        assert again.mode == "RGBA" and np.array_equal(np.asarray(again), noise())
        assert again.text == {**text, "odd": "a?b"}
    opaque = noise()
    opaque[..., 3] = 255
    save_png(opaque, path)
    with Image.open(path) as again:
        assert again.mode == "RGBA" and np.array_equal(np.asarray(again), opaque)
    assert os.listdir(tmp_path) == ["out.png"]
    plain = tmp_path / "plain"
    plain.write_bytes(b"")
    assert path.stat().st_mode == plain.stat().st_mode


def test_save_that_is_stopped_leaves_nothing(tmp_path, monkeypatch):
    def stopped(self, file, **kwargs):
        file.write(b"half")
        raise KeyboardInterrupt

    path = tmp_path / "out.png"
    save_png(noise(), path)
    before = path.read_bytes()
    monkeypatch.setattr(Image.Image, "save", stopped)
    with pytest.raises(KeyboardInterrupt):
        save_png(noise(seed=1), path)
    assert os.listdir(tmp_path) == ["out.png"] and path.read_bytes() == before


def test_save_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "no" / "x.png", tmp_path, tmp_path / "file" / "x.png", tmp_path / ("x" * 300), "/dev/null"):
        with pytest.raises(UserError) as info:
            save_png(noise(), path)
        one_line(info)
    assert os.listdir(tmp_path) == ["file"]


def test_vae_pixels_equal_diffusers():
    picture = Image.fromarray(noise(48, 64))
    got = to_vae_pixels(picture)
    assert got.dtype == torch.float32 and got.shape == (1, 4, 48, 64)
    assert torch.equal(got, PROCESSOR.preprocess(picture))
    with pytest.raises(UserError, match="RGB"):
        to_vae_pixels(picture.convert("RGB"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pictures_equal_diffusers(dtype):
    pixels = torch.randn(2, 4, 33, 31, generator=torch.Generator().manual_seed(0)).to(dtype)
    got = from_vae_pixels(pixels)
    want = PROCESSOR.postprocess(pixels, output_type="pil")
    assert [one.mode for one in got] == ["RGBA", "RGBA"]
    assert [one.tobytes() for one in got] == [one.tobytes() for one in want]


def test_vae_pixels_there_and_back():
    picture = Image.fromarray(noise(32, 32))
    assert from_vae_pixels(to_vae_pixels(picture))[0].tobytes() == picture.tobytes()


def test_floats_become_pictures():
    floats = torch.tensor([[[0.0, 0.5, 1.0], [-1.0, 2.0, 0.1]]])
    assert np.asarray(from_pixels(floats)).tolist() == [[[0, 128, 255, 255], [0, 255, 26, 255]]]
    assert np.asarray(from_pixels(noise()[..., :1]))[..., 2].tolist() == noise()[..., 0].tolist()
    with pytest.raises(UserError, match=r"\[5, 7\]"):
        from_pixels(noise()[..., 0])
    with pytest.raises(UserError, match="finite"):
        from_pixels(torch.full((2, 2, 3), float("nan")))

"""Pictures as 8-bit RGBA: read from files, written as PNG, WebP or JPEG, turned into VAE pixels and back.

Every picture of a user is converted to RGBA before any other use; the conversions to and from VAE pixels equal those of
diffusers' `VaeImageProcessor` bit for bit.
"""

from __future__ import annotations

import io
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, PngImagePlugin, UnidentifiedImageError

from ..atomic_write import write_together
from ..errors import UserError

# Formats that are read. Not all of Pillow's: EPS starts a program, and some parsers are unmaintained.
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
SUFFIXES = (".png", ".webp", ".jpg", ".jpeg")  # of written pictures
LARGEST_EXIF = 65533  # bytes in a JPEG
LARGEST_WEBP = 16383  # pixels a side
READABLE = "a PNG, JPEG or WebP picture"


def open_any(picture: Image.Image | bytes | str | os.PathLike[str]) -> Image.Image:
    """A picture as an RGBA image, turned upright: a path, the bytes of a file, or a PIL image.

    `UserError` as `open_image` raises it.
    """
    if isinstance(picture, Image.Image):
        return to_rgba(_upright(picture))
    if isinstance(picture, (bytes, bytearray)):
        try:
            return _decode(io.BytesIO(picture))
        except (MemoryError, UserError):
            raise
        except Exception as error:  # decoders of damaged files raise nearly anything
            raise UserError(f"the picture cannot be read ({_one_line(error)}); expected {READABLE}") from None
    return open_image(picture)


def _decode(source: Path | io.BytesIO) -> Image.Image:
    """The RGBA image that a file or its bytes hold."""
    Image.init()  # or a format that this Pillow was built without would be a KeyError
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # large is fine; above twice that it raises
        with Image.open(source, formats=[name for name in FORMATS if name in Image.OPEN]) as image:
            image.load()
            return to_rgba(_upright(image))


def open_image(path: str | os.PathLike[str]) -> Image.Image:
    """The picture in a file as an RGBA image, turned upright by its EXIF orientation; of an animation the first frame.

    `UserError` if there is no such file, or it is not a picture, damaged, or larger than Pillow's bomb limit.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise UserError(f"{str(path)!r} is a folder, expected {READABLE}; name one file in it")
        if path.exists() and not path.is_file():  # a pipe would block forever
            raise UserError(f"{str(path)!r} is no regular file, expected {READABLE}")
        return _decode(path)
    except FileNotFoundError:
        raise UserError(f"{str(path)!r} does not exist, expected {READABLE}; check the path") from None
    except UnidentifiedImageError:
        raise UserError(f"{str(path)!r} is not a picture that can be read, expected {READABLE}") from None
    except Image.DecompressionBombError as error:
        raise UserError(f"{str(path)!r} has too many pixels ({_one_line(error)}); make it smaller first") from None
    except UserError as error:
        shown = str(error)
        raise UserError(shown if str(path) in shown else f"{str(path)!r}: {shown}") from None
    except MemoryError:
        raise
    except Exception as error:  # decoders of damaged files raise nearly anything
        raise UserError(
            f"{str(path)!r} cannot be read ({_one_line(error)}); is the file complete and readable?"
        ) from error


def _one_line(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(text.split())[:200]


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # a broken EXIF block is no reason to refuse the picture
        return image


def to_rgba(image: Image.Image) -> Image.Image:
    """Any Pillow image as 8-bit RGBA. 16-bit greys are scaled (Pillow's own conversion would clip them to white)."""
    if min(image.size) < 1:
        raise UserError(f"the picture is {image.width}x{image.height} pixels, expected at least 1x1")
    if image.mode.startswith("I"):
        return _scale_16_bit(image)
    if image.mode == "F":
        raise UserError("the picture has floating-point pixels, expected 8 or 16 bits; save it as PNG first")
    if image.mode in ("CMYK", "YCbCr", "LAB", "HSV"):
        image = image.convert("RGB")
    return image.convert("RGBA")


def _scale_16_bit(image: Image.Image) -> Image.Image:
    values = np.clip(np.asarray(image).astype(np.int64), 0, 65535)
    grey = ((values + 128) // 257).astype(np.uint8)  # rounds value / 257
    alpha = np.full_like(grey, 255)
    if isinstance(image.info.get("transparency"), int):
        alpha[values == image.info["transparency"]] = 0
    return Image.fromarray(np.stack([grey, grey, grey, alpha], axis=-1))


def from_pixels(pixels: np.ndarray | torch.Tensor) -> Image.Image:
    """RGBA image of pixels [H, W, C], C = 1, 3 or 4, uint8 or floats in [0, 1], rounded; opaque without alpha."""
    array = pixels.detach().cpu() if isinstance(pixels, torch.Tensor) else np.asarray(pixels)
    if isinstance(array, torch.Tensor):
        array = (array.float() if array.is_floating_point() else array).numpy()
    if array.ndim != 3 or array.shape[-1] not in (1, 3, 4):
        raise UserError(f"pixels have shape {list(array.shape)}, expected [height, width, 1, 3 or 4 channels]")
    if array.dtype != np.uint8:
        if not np.isfinite(array).all():
            raise UserError("the picture holds values that are not finite, expected numbers in [0, 1]")
        array = (np.clip(array, 0, 1) * 255).round().astype(np.uint8)
    if array.shape[-1] == 1:
        array = array.repeat(3, axis=-1)
    return to_rgba(Image.fromarray(np.ascontiguousarray(array)))


def to_pixels(image: Image.Image) -> torch.Tensor:
    """Pixels [H, W, 4], floats in [0, 1], of an RGBA image: the inverse of `from_pixels`."""
    return torch.from_numpy(np.array(image).astype(np.float32) / 255.0)


def with_mask(pixels: torch.Tensor, mask: torch.Tensor | None) -> Image.Image:
    """RGBA image of pixels [H, W, C] in [0, 1] and a mask [h, w] of what is transparent (1), resized to the picture."""
    image = from_pixels(pixels)
    if mask is None:
        return image
    opacity = 1 - mask.detach().float().cpu()[None, None]
    if opacity.shape[2:] != (image.height, image.width):
        opacity = torch.nn.functional.interpolate(opacity, size=(image.height, image.width), mode="bilinear")
    alpha = to_pixels(image)[..., 3] * opacity[0, 0].clamp(0, 1)
    image.putalpha(Image.fromarray((alpha * 255).round().to(torch.uint8).numpy()))
    return image


def png_bytes(image: Image.Image | np.ndarray | torch.Tensor, text: Mapping[str, str] | None = None) -> bytes:
    """An RGBA PNG file with text chunks. `image` is a Pillow image or what `from_pixels` takes."""
    image = to_rgba(image) if isinstance(image, Image.Image) else from_pixels(image)
    chunks = PngImagePlugin.PngInfo()
    for key, value in (text or {}).items():
        chunks.add_text(key, value.encode("utf-8", "replace").decode("utf-8"))
    stream = io.BytesIO()
    image.save(stream, format="PNG", pnginfo=chunks)
    return stream.getvalue()


def picture_bytes(image: Image.Image, suffix: str, text: Mapping[str, str] | None = None) -> bytes:
    """A picture file in the format of `suffix`, one of `SUFFIXES`, with `text` in its metadata.

    PNG and WebP are lossless and keep alpha, WebP with the colours of transparent pixels; JPEG is composited over
    white. In WebP and JPEG the text is JSON in EXIF's UserComment; a JPEG with more than 64 KiB of it holds no text.
    """
    if suffix == ".png":
        return png_bytes(image, text)
    exif = Image.Exif()
    if text:
        exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.UserComment] = b"ASCII\0\0\0" + json.dumps(dict(text)).encode()
    stream = io.BytesIO()
    if suffix == ".webp":
        to_rgba(image).save(stream, "WEBP", lossless=True, exact=True, exif=exif)
        return stream.getvalue()
    known = exif.tobytes() if text else b""
    kept = known if len(known) <= LARGEST_EXIF else b""
    over_white(to_rgba(image)).save(stream, "JPEG", quality=95, subsampling=0, exif=kept)
    return stream.getvalue()


def over_white(image: Image.Image) -> Image.Image:
    """RGB copy of an RGBA image, composited over white in 8 bits."""
    white = Image.new("RGB", image.size, (255, 255, 255))
    white.paste(image, mask=image.getchannel("A"))
    return white


def save_png(
    image: Image.Image | np.ndarray | torch.Tensor, path: str | os.PathLike[str], text: Mapping[str, str] | None = None
) -> None:
    """Write an RGBA PNG with text chunks atomically. `UserError` if the path cannot be written."""
    write_together({Path(path): png_bytes(image, text)})


def to_vae_pixels(image: Image.Image) -> torch.Tensor:
    """VAE pixels [1, 4, H, W], float32 in [-1, 1], of an RGBA image."""
    if image.mode != "RGBA":
        raise UserError(f"the picture is {image.mode}, expected RGBA; convert it with to_rgba")
    pixels = torch.from_numpy(np.array(image).astype(np.float32) / 255.0)
    return 2.0 * pixels.permute(2, 0, 1)[None] - 1.0


def from_vae_pixels(pixels: torch.Tensor) -> list[Image.Image]:
    """RGBA images of VAE pixels [B, 4, H, W] in [-1, 1]; values outside are clamped."""
    unit = (pixels * 0.5 + 0.5).clamp(0, 1)  # in the given dtype, as the released pipeline does
    array = unit.detach().cpu().permute(0, 2, 3, 1).float().numpy()
    return [Image.fromarray(one) for one in (array * 255).round().astype(np.uint8)]


def fit(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """`image` as RGBA, resized to `size` (width, height) by Lanczos, as references are."""
    return to_rgba(image).resize(size, Image.Resampling.LANCZOS)


def latent_mask(mask: Image.Image, grid: tuple[int, int]) -> torch.Tensor:
    """Mask [1, 1, h, w] on a latent grid (h, w): 1 where the picture is white, 0 where it is black or transparent."""
    return torch.nn.functional.interpolate(_whiteness(mask)[None, None], size=grid, mode="bilinear")


def _whiteness(mask: Image.Image) -> torch.Tensor:
    rgba = to_rgba(mask)
    values = np.asarray(rgba.convert("L"), dtype=np.float32) * np.asarray(rgba.getchannel("A"), dtype=np.float32)
    return torch.from_numpy(values / 255.0**2)


def kept_outside(
    painted: list[Image.Image], picture: Image.Image | None, mask: Image.Image | None
) -> list[Image.Image]:
    """The images `painted`, with the pixels of `picture` where `mask` is black, and a blend where it is grey.

    Picture and mask are resized to the painted size. Colours are weighted by their alpha. Without a picture or a mask,
    `painted` is returned unchanged.
    """
    if picture is None or mask is None or not painted:
        return painted
    size = painted[0].size
    white = torch.nn.functional.interpolate(_whiteness(mask)[None, None], size=size[::-1], mode="bilinear")
    share, own = white[0, 0, :, :, None].numpy(), np.asarray(fit(picture, size), dtype=np.float32)
    return [_blended(own, np.asarray(to_rgba(each), dtype=np.float32), share) for each in painted]


def _blended(own: np.ndarray, painted: np.ndarray, share: np.ndarray) -> Image.Image:
    """A blend of pixels `own` and `painted` [H, W, 4], 0 to 255; `share` [H, W, 1] is the weight of `painted`."""
    alpha = (1 - share) * own[..., 3:] + share * painted[..., 3:]
    weight = np.divide(share * painted[..., 3:], alpha, out=share.copy(), where=alpha > 0)
    colour = (1 - weight) * own[..., :3] + weight * painted[..., :3]
    return Image.fromarray(np.concatenate([colour, alpha], axis=-1).round().astype(np.uint8))


def is_opaque(opacity: torch.Tensor) -> bool:
    """Whether decoded alphas `opacity` [B, ...] in [0, 1] are those of opaque pictures.

    Decoded alphas of an opaque picture are not 1 everywhere: single pixels of 210 of 255 were seen, and one pixel in
    1000 below 240. So no pixel may be below 192, and at most 1% of each picture's pixels below 240.
    """
    faint = (opacity < 240 / 255).flatten(1).float().mean(dim=1)
    return bool((opacity >= 192 / 255).all()) and bool((faint <= 0.01).all())

"""Write the outputs of a run: pictures with their manifest, and latents."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save

from ..atomic_write import check_writable, write_together
from ..config.networks import MAX_BATCH
from ..config.validate import printable
from ..errors import UserError
from ..inputs.images import LARGEST_WEBP, SUFFIXES, picture_bytes

if TYPE_CHECKING:
    from ..pipeline import Result

MANIFEST_KEY = "qwen21"  # the text chunk's key in a PNG, and the key in other metadata


def names(out: Path, pictures: int) -> list[Path]:
    """Output paths: FILE.png for one picture, FILE-1.png to FILE-N.png for more. Invalid counts are clamped."""
    if pictures <= 1:
        return [out]
    return [numbered(out, i) for i in range(1, min(pictures, MAX_BATCH) + 1)]


def numbered(path: Path, i: int) -> Path:
    """FILE-i.png for FILE.png."""
    return path.parent / f"{path.stem}-{i}{path.suffix}"


def write(results: Mapping[Path, Result], latent: Path | None = None) -> list[Path]:
    """Write the pictures of each result at its path, and the first result's latents; return the pictures' paths.

    The manifest is stored in each picture's metadata. All files appear together, or none does.
    """
    contents: dict[Path, bytes] = {}
    for out, result in results.items():
        text = {MANIFEST_KEY: json.dumps(result.manifest, ensure_ascii=False, allow_nan=False)}
        paths = names(out, len(result.images))
        pairs = zip(paths, result.images, strict=True)
        contents |= {path: picture_bytes(image, path.suffix.lower(), text) for path, image in pairs}
    pictures = list(contents)
    if latent is not None:
        contents[latent] = latent_bytes(next(iter(results.values())).latents)
    write_together(contents)
    return pictures


def check_size(out: Path | None, size: tuple[int, int]) -> None:
    """Refuse a picture with more pixels than its file format can hold."""
    if out is not None and out.suffix.lower() == ".webp" and max(size) > LARGEST_WEBP:
        width, height = size
        raise UserError(f"{str(out)!r}: WebP holds {LARGEST_WEBP} pixels a side, not {width}x{height}; write a .png")


def lost(out: Path | None) -> list[str]:
    """Lines about what the file format of `out` cannot store of a picture."""
    if out is None or out.suffix.lower() not in (".jpg", ".jpeg"):
        return []
    return [f"{printable(out.name)}: a JPEG holds no transparency, so the picture goes over white; .webp and .png do"]


def latent_bytes(latents: torch.Tensor) -> bytes:
    """Serialise `latents` to safetensors: one fp32 tensor `latent` [B, 64, h, w], normalised as for the transformer."""
    return save({"latent": latents.float().cpu().contiguous()}, metadata={"space": "normalised"})


def check_outputs(
    out: Path | None,
    latent: Path | None,
    pictures: int,
    inputs: Sequence[Path],
    suffixes: tuple[str, ...] = SUFFIXES,
) -> None:
    """Refuse outputs that cannot be written, or would overwrite an input, before any work is done.

    `out` must end in one of `suffixes`.
    """
    paths = dict.fromkeys(names(out, pictures) if out else [], suffixes)
    for path, allowed in (paths | ({latent: (".safetensors",)} if latent else {})).items():
        if path.suffix.lower() not in allowed:
            raise UserError(f"{str(path)!r}: the output's name must end in {' or '.join(allowed)}")
        check_writable(path)
        for other in inputs:
            if path.exists() and other.exists() and path.samefile(other):
                raise UserError(f"{str(path)!r} is an input of this run and would be overwritten; choose another name")

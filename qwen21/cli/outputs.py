"""What a run leaves on disk: pictures with their manifest, and latents."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save

from ..atomic_write import check_writable, write_together
from ..config.networks import MAX_BATCH
from ..errors import UserError
from ..inputs.images import png_bytes

if TYPE_CHECKING:
    from ..pipeline import Result

MANIFEST_KEY = "qwen21"  # the PNG text chunk


def names(out: Path, pictures: int) -> list[Path]:
    """FILE.png for one picture, FILE-1.png to FILE-N.png for more; of what no batch can be, as for the nearest."""
    if pictures <= 1:
        return [out]
    return [numbered(out, i) for i in range(1, min(pictures, MAX_BATCH) + 1)]


def numbered(path: Path, i: int) -> Path:
    """FILE-i.png of FILE.png."""
    return path.parent / f"{path.stem}-{i}{path.suffix}"


def write(results: Mapping[Path, Result], latent: Path | None = None) -> list[Path]:
    """Write the pictures of each result at its path, and the first one's latents; returns the pictures' paths.

    The manifest travels in each picture's text chunk. All files appear together or none does.
    """
    contents: dict[Path, bytes] = {}
    for out, result in results.items():
        text = {MANIFEST_KEY: json.dumps(result.manifest, ensure_ascii=False, allow_nan=False)}
        paths = names(out, len(result.images))
        contents |= {path: png_bytes(image, text) for path, image in zip(paths, result.images, strict=True)}
    pictures = list(contents)
    if latent is not None:
        contents[latent] = latent_bytes(next(iter(results.values())).latents)
    write_together(contents)
    return pictures


def latent_bytes(latents: torch.Tensor) -> bytes:
    """A safetensors file of one fp32 tensor `latent` [B, 64, h, w], normalised as the transformer sees it."""
    return save({"latent": latents.float().cpu().contiguous()}, metadata={"space": "normalised"})


def check_outputs(out: Path | None, latent: Path | None, pictures: int, inputs: Sequence[Path]) -> None:
    """Refuse, before any work is done, outputs that cannot be written or that would destroy an input."""
    paths = dict.fromkeys(names(out, pictures) if out else [], ".png") | ({latent: ".safetensors"} if latent else {})
    for path, suffix in paths.items():
        if path.suffix.lower() != suffix:
            raise UserError(f"{str(path)!r}: the output's name must end in {suffix}")
        check_writable(path)
        for other in inputs:
            if path.exists() and other.exists() and path.samefile(other):
                raise UserError(f"{str(path)!r} is an input of this run and would be overwritten; choose another name")

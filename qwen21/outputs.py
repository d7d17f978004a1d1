"""What a run leaves on disk, and where it computes: pictures with their manifest, latents, device and dtype choices."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save

from .checked import printable
from .checkpoint.packing import DTYPES
from .config import MAX_BATCH
from .errors import UserError
from .images import LARGEST_WEBP, SUFFIXES, picture_bytes
from .writing import check_writable, write_together

if TYPE_CHECKING:
    from .pipeline import Result

MANIFEST_KEY = "qwen21"  # the text chunk of a PNG, the key in other metadata


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this PyTorch finds no CUDA device; use --device cpu, or install a CUDA build")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def dtypes(name: str, device: torch.device) -> tuple[torch.dtype, ...]:
    """What to compute in: the first that fits. `auto` is bf16 on CUDA, which the model was released in, and fp32
    elsewhere, bf16 where that does not fit; `fp8` is about weights alone, and computes as `auto`."""
    if name in ("auto", "fp8"):
        return tuple(DTYPES[each] for each in (("bf16",) if device.type == "cuda" else ("fp32", "bf16")))
    return (DTYPES[name],)


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

    The manifest travels in each picture's metadata. All files appear together or none does.
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
    """Refuse a picture of more pixels than its kind of file holds."""
    if out is not None and out.suffix.lower() == ".webp" and max(size) > LARGEST_WEBP:
        width, height = size
        raise UserError(f"{str(out)!r}: WebP holds {LARGEST_WEBP} pixels a side, not {width}x{height}; write a .png")


def lost(out: Path | None) -> list[str]:
    """A line where the kind of file at `out` cannot hold all of a picture."""
    if out is None or out.suffix.lower() not in (".jpg", ".jpeg"):
        return []
    return [f"{printable(out.name)}: a JPEG holds no transparency, so the picture goes over white; .webp and .png do"]


def latent_bytes(latents: torch.Tensor) -> bytes:
    """A safetensors file of one fp32 tensor `latent` [B, 64, h, w], normalised as the transformer sees it."""
    return save({"latent": latents.float().cpu().contiguous()}, metadata={"space": "normalised"})


def check_outputs(
    out: Path | None,
    latent: Path | None,
    pictures: int,
    inputs: Sequence[Path],
    suffixes: tuple[str, ...] = SUFFIXES,
) -> None:
    """Refuse, before any work is done, outputs that cannot be written or that would destroy an input. `out` ends in
    one of `suffixes`."""
    paths = dict.fromkeys(names(out, pictures) if out else [], suffixes)
    for path, allowed in (paths | ({latent: (".safetensors",)} if latent else {})).items():
        if path.suffix.lower() not in allowed:
            raise UserError(f"{str(path)!r}: the output's name must end in {' or '.join(allowed)}")
        check_writable(path)
        for other in inputs:
            if path.exists() and other.exists() and path.samefile(other):
                raise UserError(f"{str(path)!r} is an input of this run and would be overwritten; choose another name")

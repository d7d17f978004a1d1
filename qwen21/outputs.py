"""What a run leaves on disk, and where it computes: PNGs with their manifest, latents, device and dtype choices."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .errors import UserError
from .images import save_png

if TYPE_CHECKING:
    from .pipeline import Result

MANIFEST_KEY = "qwen21"  # the PNG text chunk
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this PyTorch finds no CUDA device; use --device cpu, or install a CUDA build")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bf16 on CUDA, which the model was released in, and fp32 elsewhere."""
    if name == "auto":
        name = "bf16" if device.type == "cuda" else "fp32"
    return DTYPES[name]


def names(out: Path, pictures: int) -> list[Path]:
    """FILE.png for one picture, FILE-1.png to FILE-N.png for more."""
    if pictures == 1:
        return [out]
    return [out.with_name(f"{out.stem}-{i}{out.suffix}") for i in range(1, pictures + 1)]


def write(result: Result, paths: list[Path], latent: Path | None = None) -> None:
    """Write pictures with the manifest in their text chunk, and the latents. Each file is whole or absent."""
    text = {MANIFEST_KEY: json.dumps(result.manifest, ensure_ascii=False)}
    for image, path in zip(result.images, paths, strict=True):
        save_png(image, path, text)
    if latent is not None:
        save_latent(result.latents, latent)


def save_latent(latents: torch.Tensor, path: Path) -> None:
    """One fp32 tensor `latent` [B, 64, h, w], normalised as the transformer sees it; the header says so."""
    from safetensors.torch import save_file

    part = path.parent / f".{uuid.uuid4().hex}.part"
    try:
        save_file({"latent": latents.float().cpu().contiguous()}, part, metadata={"space": "normalised"})
        os.replace(part, path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error}); write elsewhere") from error
    finally:
        part.unlink(missing_ok=True)

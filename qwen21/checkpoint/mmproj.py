"""The vision tower of an encoder in GGUF, which is a file of its own (mmproj)."""

from __future__ import annotations

from pathlib import Path

from ..errors import UserError
from .container import Checkpoint
from .gguf_names import (
    ARCHITECTURE,
    EMBEDDING,
    PROJECTOR,
    VISION_ARCHITECTURE,
    VISION_PROJECTOR,
    has_gguf_vision,
    is_gguf_encoder,
)
from .open_file import open_checkpoint, open_files

PROJECTION = "mm.2.weight"  # [the language model's width, ...]


def with_vision(encoder: Checkpoint, mmproj: Path | None = None) -> Checkpoint:
    """`encoder` with the tensors of its vision tower, if it is an encoder in GGUF without one: those of the file
    `mmproj`, else of the first file beside it that fits.

    Without such a file it stays as it is: it can paint from text. Raises `UserError` where `mmproj` does not fit.
    """
    if not is_gguf_encoder(encoder.tensors) or has_gguf_vision(encoder.tensors):
        if mmproj is not None:
            raise UserError(f"{encoder.path}: this encoder needs no mmproj file; leave out {mmproj.name}")
        return encoder
    if mmproj is not None:
        vision = open_checkpoint(mmproj)
        if reason := _misfit(vision, encoder):
            raise UserError(f"{mmproj}: {reason}; take the mmproj file that was released with {encoder.path.name}")
    else:
        mmproj = _beside(encoder)
    return encoder if mmproj is None else open_files(encoder.path, (encoder.path, mmproj))


def _beside(encoder: Checkpoint) -> Path | None:
    """The first file, by name, in the encoder's folder that is its vision tower."""
    try:
        files = sorted(file for file in encoder.path.parent.iterdir() if _is_named_so(file))
    except OSError:  # a folder that may be entered and not listed
        return None
    return next((file for file in files if _fits(file, encoder)), None)


def _is_named_so(file: Path) -> bool:
    return file.suffix.lower() == ".gguf" and "mmproj" in file.name.lower()


def _fits(file: Path, encoder: Checkpoint) -> bool:
    try:
        return not _misfit(open_checkpoint(file), encoder)
    except UserError:
        return False  # damaged, or half downloaded


def _misfit(vision: Checkpoint, encoder: Checkpoint) -> str:
    """Why `vision` is not the vision tower of `encoder`; '' if it is."""
    told, projector = vision.metadata.get(ARCHITECTURE), [vision.metadata.get(key) for key in PROJECTOR]
    named = [name for name in projector if name and name != VISION_PROJECTOR]
    if told != VISION_ARCHITECTURE or not has_gguf_vision(vision.tensors) or PROJECTION not in vision.tensors:
        return "this is no vision tower (mmproj) in GGUF"
    if named:
        return f"this is the vision tower of another model ({named[0]}), expected {VISION_PROJECTOR}"
    got, width = vision.tensors[PROJECTION].shape[0], encoder.tensors[EMBEDDING].shape[1]
    return "" if got == width else f"this vision tower is for states of width {got}, the encoder's are {width} wide"

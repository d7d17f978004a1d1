"""The bundled miniature: a trained model of the released architecture for a toy world of coloured shapes."""

from collections.abc import Sequence
from pathlib import Path

from ..options import COMPONENT_FOLDERS

NAME = "qwen21-mini"  # for --model and inspect
WEIGHTS = Path(__file__).with_name("weights")  # a whole model in the diffusers layout
SMALLEST, LARGEST = 96, 128  # pixels a side that it was trained on


def located(path: Path, slot: str | None = None) -> Path:
    """The folder of the miniature, or of its part in a slot, where `path` is its name and nothing of that name lies
    there."""
    if str(path) != NAME or path.exists():
        return path
    return WEIGHTS / COMPONENT_FOLDERS[slot] if slot else WEIGHTS


def size_known(transformer: Path) -> int | None:
    """Pixels a side that a model is made for, where it is the miniature; `transformer` may be any part of it."""
    return SMALLEST if transformer.is_relative_to(WEIGHTS) else None


def size_warning(transformer: Path, size: tuple[int, int], references: Sequence[tuple[int, int]] = ()) -> str | None:
    """A line where the miniature is given another (width, height) than it knows, as output or as a reference's size
    after resizing."""
    return strange_size(references, size) if size_known(transformer) else None


def strange_size(references: Sequence[tuple[int, int]], size: tuple[int, int] | None = None) -> str | None:
    """A line where the miniature does not know references of such sizes, or an output of such a one."""
    named = [*([(size, "a picture")] if size else []), *((reference, "a reference") for reference in references)]
    for (width, height), what in named:
        if not (SMALLEST <= width <= LARGEST and SMALLEST <= height <= LARGEST):
            return (
                f"{NAME} knows pictures of {SMALLEST} to {LARGEST} pixels a side: {what} of {width}x{height} will look "
                f"like nothing; choose size and resolution {SMALLEST}, or load the released model"
            )
    return None

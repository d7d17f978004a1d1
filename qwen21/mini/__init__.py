"""The bundled miniature: a trained model of the released architecture for a toy world of coloured shapes."""

from pathlib import Path

from ..choices import COMPONENT_FOLDERS

NAME = "qwen21-mini"  # for --model and inspect
WEIGHTS = Path(__file__).with_name("weights")  # a whole model in the diffusers layout
SMALLEST, LARGEST = 96, 128  # pixels a side that it was trained on


def located(path: Path, slot: str | None = None) -> Path:
    """The folder of the miniature, or of its part in a slot, where `path` is its name and nothing of that name lies
    there."""
    if str(path) != NAME or path.exists():
        return path
    return WEIGHTS / COMPONENT_FOLDERS[slot] if slot else WEIGHTS

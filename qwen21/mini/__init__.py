"""The bundled miniature: a small trained model with the released architecture, for a toy world of coloured shapes."""

from pathlib import Path

from ..choices import COMPONENT_FOLDERS

NAME = "qwen21-mini"  # its name for --model and inspect
WEIGHTS = Path(__file__).with_name("weights")  # a whole model in the diffusers layout
SMALLEST, LARGEST = 96, 128  # picture sides in pixels that it was trained on


def located(path: Path, slot: str | None = None) -> Path:
    """Folder of the miniature, or of its part `slot`, where `path` is its name and nothing on disk has that name."""
    if str(path) != NAME or path.exists():
        return path
    return WEIGHTS / COMPONENT_FOLDERS[slot] if slot else WEIGHTS

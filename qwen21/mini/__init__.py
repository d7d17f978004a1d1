"""The bundled miniature: a trained model of the released architecture for a toy world of coloured shapes."""

from pathlib import Path

NAME = "qwen21-mini"  # for --model
WEIGHTS = Path(__file__).with_name("weights")  # a whole model in the diffusers layout
LARGEST = 128  # pixels a side that it was trained on


def size_warning(transformer: Path, size: tuple[int, int]) -> str | None:
    """A line where the miniature is asked for a larger (width, height) than it knows."""
    if not transformer.is_relative_to(WEIGHTS) or max(size) <= LARGEST:
        return None
    return (
        f"{NAME} knows pictures of 96 to {LARGEST} pixels a side: {size[0]}x{size[1]} will look like nothing; choose "
        "96x96, or load the released model"
    )

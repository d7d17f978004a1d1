"""What a whole-model folder says about its parts: the schedule, whether it is Turbo, and the trained picture sizes."""

from __future__ import annotations

from pathlib import Path

from ..config.networks import ScheduleConfig
from ..config.validate import sample_sigmas
from .component import Component
from .paths import errors_naming, is_folder, probe, read_json


def folder_schedule(folder: Path) -> tuple[ScheduleConfig, bool]:
    """Schedule of a whole-model folder, and whether it is Turbo, which `sample_sigmas` in the schedule mark."""
    index, scheduler = folder / "model_index.json", folder / "scheduler" / "scheduler_config.json"
    sigmas = read_json(index).get("sample_sigmas")
    if sigmas is not None:
        with errors_naming(index):
            sigmas = sample_sigmas(sigmas)
    numbers = read_json(scheduler) if probe(scheduler) else {}
    with errors_naming(scheduler):
        return ScheduleConfig.from_diffusers(numbers, sigmas), sigmas is not None


def schedule_of(dit: Component) -> tuple[ScheduleConfig, bool]:
    """Schedule of a transformer, and whether it is Turbo: from the whole model around it, else from its file's name."""
    folder = dit.checkpoint.path.parent
    if is_folder(dit.checkpoint.path) and probe(folder / "model_index.json"):
        return folder_schedule(folder)
    return ScheduleConfig(), dit.identity.turbo_hint


def trained_sizes(part: Component) -> tuple[int, int] | None:
    """Smallest and largest side in pixels of the pictures that a transformer was trained on.

    They come from `trained_sizes` in the model_index.json of the whole-model folder; None where it is absent.
    """
    index = part.checkpoint.path.parent / "model_index.json"
    if not probe(index):
        return None
    sizes = read_json(index).get("trained_sizes")
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(side) is int for side in sizes):
        return None
    return sizes[0], sizes[1]

"""Recognise LoRAs that were distilled to a few steps: by the header, by a file beside it, else by the file's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..checkpoint.container import Checkpoint
from ..checkpoint.paths import errors_naming, is_file, read_json
from ..config.validate import printable, require_falling, short
from ..errors import UserError
from ..sampling.few_steps import BY_NAME, LIGHTNING, PRUNA_5, PRUNA_8, TURBO, VIGGLE, Distilled, FewSteps
from ..sampling.schedule import DYNAMIC

KNOWN = {"turbo": TURBO, "pruna": PRUNA_8, "viggle": VIGGLE, "lightning": LIGHTNING}
FIVE_STEPS = ("5step", "5-step", "5_step", "5 step")
SETTINGS = ("sigmas", "shift", "cfg")


def distilled(checkpoint: Checkpoint) -> Distilled | None:
    """The schedule that a LoRA was distilled to, and what tells so; None for a LoRA of the usual steps.

    A file NAME.json beside NAME.safetensors with `sigmas`, and perhaps `shift` and `cfg`, is the user's own word, so it
    counts before the file's name. Raises `UserError` where it is wrong.
    """
    name = checkpoint.path.name
    for key, value in checkpoint.metadata.items():
        if _names_the_lora(key) and (few := _known(value)):
            return Distilled(name, few, f"its header's {printable(key)}")
    beside = checkpoint.path.with_suffix(".json")
    if checkpoint.path.suffix == ".safetensors" and is_file(beside) and (few := _of_sidecar(beside)):
        return Distilled(name, few, beside.name)
    few = _known(name)
    return Distilled(name, few, BY_NAME) if few else None


def _names_the_lora(key: str) -> bool:
    """Whether a key of the header names the LoRA. Names of the model that it was trained on say nothing: a LoRA trained
    on Turbo does not make a base model Turbo."""
    named = any(word in key.lower() for word in ("name", "title", "type", "schedule"))
    return named and not any(word in key.lower() for word in ("base", "sd_model"))


def _known(text: str) -> FewSteps | None:
    words = text.lower()
    few = next((few for word, few in KNOWN.items() if word in words), None)
    return PRUNA_5 if few is PRUNA_8 and any(word in words for word in FIVE_STEPS) else few


def _of_sidecar(file: Path) -> FewSteps | None:
    """The schedule in the JSON file beside a LoRA; None where the file is about something else."""
    with errors_naming(file):
        settings = read_json(file)
        if "sigmas" not in settings:
            return None
        sigmas = _sigmas(settings["sigmas"])
        shift, cfg = settings.get("shift"), settings.get("cfg", 1.0)
        if shift not in (None, DYNAMIC) and not _number(shift):
            raise UserError(f"shift is {short(shift)}, expected a number, {DYNAMIC!r} or null")
        if not _number(cfg) or cfg < 1:
            raise UserError(f"cfg is {short(cfg)}, expected a number of at least 1")
        return FewSteps(file.stem, sigmas, shift, float(cfg))


def _sigmas(values: Any) -> tuple[float, ...]:
    """The sigmas of a file, without a 0 at their end."""
    if not isinstance(values, list) or not values or not all(_number(value) for value in values) or len(values) > 1000:
        raise UserError(f"sigmas is {short(values)}, expected falling numbers such as [1, 0.75, 0.5, 0.25]")
    kept = [float(value) for value in (values[:-1] if values[-1] == 0 and len(values) > 1 else values)]
    require_falling([*kept, 0.0], f"sigmas {short(values)}")
    return tuple(kept)


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e4

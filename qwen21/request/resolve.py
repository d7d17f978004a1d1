"""Requests: what to paint, and everything about it that can be decided or refused before a weight is loaded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..checkpoint.load import ModelFiles
from ..config.networks import LATENT_PIXELS, MAX_BATCH
from ..errors import UserError
from ..inputs.prompt import placeholder_warnings
from ..inputs.references import (
    DEFAULT_RESOLUTION,
    Reference,
    Size,
    canvas_size,
    check_count,
    prepare_references,
    reference_size,
)
from ..sampling.euler import guidance, guides, noise_seed
from ..sampling.few_steps import Distilled, agreed, distilled_schedule, distilled_warnings
from ..sampling.schedule import DYNAMIC, Schedule, custom_schedule, make_schedule
from .request import Request

MAX_STEPS = 1000
SEEDS = 2**64
MAX_SIDE = 16384  # pixels
MIN_DENOISE = 0.001
MAX_ASPECT_CHANGE = 1.05  # change of a picture's aspect ratio without a warning; the 32 pixel grid changes it by less


@dataclass(frozen=True)
class ResolvedRequest:
    """A request together with all decisions about it that need no weights."""

    request: Request
    references: tuple[Reference, ...]
    size: Size  # in pixels
    schedule: Schedule
    cfg: tuple[float, ...]  # one value per step
    noise_seed: int
    warnings: tuple[str, ...]

    @property
    def grid(self) -> tuple[int, int]:
        """(height, width) of the target in latent cells."""
        return self.size[1] // LATENT_PIXELS, self.size[0] // LATENT_PIXELS

    @property
    def guided(self) -> bool:
        return self.request.negative is not None and any(guides(value) for value in self.cfg)


def resolve_request(request: Request, files: ModelFiles, distilled: Sequence[Distilled] = ()) -> ResolvedRequest:
    """Check a request, prepare its references, and decide sizes, schedule, guidance and noise. Loads no weights.

    `distilled` are the active LoRAs that were made for few steps.
    """
    decided = decide(request, files, distilled)
    return replace(decided, references=tuple(prepare_references(request.references, decided.request.resolution)))


def decide(request: Request, files: ModelFiles, distilled: Sequence[Distilled] = ()) -> ResolvedRequest:
    """The resolved request without its references. Only the `size` of pictures is used, so none has to be decoded."""
    warnings: list[str] = []
    if request.resolution is None:
        smallest, _ = files.trained_sizes or (DEFAULT_RESOLUTION, None)
        request = replace(request, resolution=smallest)
    _check_request(request)
    size = _canvas(request, warnings)
    warnings += _stretched(request, size)
    schedule = _schedule(request, files, size[0] * size[1] // LATENT_PIXELS**2, agreed(distilled))
    warnings += schedule.warnings
    resized = [reference_size(*picture.size, request.resolution) for picture in request.references]
    warnings += placeholder_warnings([*request.prompt_list, request.negative or ""], len(resized))
    if warning := size_warning(files.trained_sizes, size, resized):
        warnings.append(warning)
    cfg = guidance(schedule.steps, request.cfg, request.cfg_ranges)
    if any(guides(value) for value in cfg) and request.negative is None:
        raise UserError(f"cfg is {max(cfg):g} but there is no negative prompt; give --negative ('' will do), or cfg 1")
    if request.negative is not None and not any(guides(value) for value in cfg):
        warnings.append("the negative prompt is unused: it needs a CFG above 1")
    largest = 1.0 if request.negative is None else max([1.0, *filter(guides, cfg)])
    warnings += distilled_warnings(schedule.kind, schedule.steps, largest, distilled)
    seed = noise_seed(request.seed, len(resized), request.edit_noise)
    return ResolvedRequest(request, (), size, schedule, tuple(cfg), seed, tuple(warnings))


def size_warning(trained: tuple[int, int] | None, size: Size | None, references: Sequence[Size] = ()) -> str | None:
    """A warning where `size` (the output's width and height) or a resized reference lies outside the sides in pixels
    (smallest, largest) that the model was `trained` on. None where all lie within, or `trained` is unknown."""
    if trained is None:
        return None
    smallest, largest = trained
    named = [*([(size, "a picture")] if size else []), *((reference, "a reference") for reference in references)]
    for (width, height), what in named:
        if not (smallest <= width <= largest and smallest <= height <= largest):
            return (
                f"this model was trained on pictures of {smallest} to {largest} pixels a side: {what} of "
                f"{width}x{height} will look like nothing; choose size and resolution {smallest}, or load the released "
                "model"
            )
    return None


def _check_request(request: Request) -> None:
    if not 1 <= request.batch <= MAX_BATCH:
        raise UserError(f"batch is {request.batch}, expected 1 to {MAX_BATCH}")
    if request.steps is not None and request.steps > MAX_STEPS:
        raise UserError(f"steps is {request.steps}, expected at most {MAX_STEPS}")
    if request.sigmas is not None and len(request.sigmas) > MAX_STEPS + 1:
        raise UserError(f"got {len(request.sigmas)} sigmas, expected at most {MAX_STEPS + 1}, for {MAX_STEPS} steps")
    sides = [*(request.size or ()), request.resolution]
    if request.resolution == 0:
        start = [] if request.init_image is None else [request.init_image]
        sides += [side for picture in (*request.references, *start) for side in picture.size]
    if max(sides) > MAX_SIDE:
        raise UserError(f"sizes and resolution are at most {MAX_SIDE} pixels a side; choose smaller ones")
    for cfg in (request.cfg, *(r.cfg for r in request.cfg_ranges)):
        if not math.isfinite(cfg):
            raise UserError(f"CFG is {cfg}, expected a finite number such as 4.0")
    require_seed(request.seed)
    check_count(len(request.references))
    if request.mask is not None and request.init_image is None:
        raise UserError("a mask says which part of a picture may change; give that picture with --init-image")
    if request.denoise != 1 and request.init_image is None:
        raise UserError(f"denoise {request.denoise:g} keeps part of a picture; give that picture with --init-image")
    if 0 < request.denoise < MIN_DENOISE:
        raise UserError(f"denoise is {request.denoise:g}, expected at least {MIN_DENOISE:g}")
    if request.shift is not None and request.sigmas is None:
        raise UserError(f"a shift of {request.shift} is for a grid of your own; give that grid with --sigmas")
    if isinstance(request.shift, str) and request.shift != DYNAMIC:
        raise UserError(f"shift is {request.shift!r}, expected a number or {DYNAMIC}")
    if request.sigmas is not None and (request.steps is not None or request.denoise != 1):
        raise UserError("a grid of sigmas already says steps and denoise; leave --steps and --denoise out")


def require_seed(seed: int) -> None:
    if not 0 <= seed < SEEDS:
        raise UserError(f"seed is {seed}, expected 0 to {SEEDS - 1}")


def _canvas(request: Request, warnings: list[str]) -> Size:
    """(width, height) of the output: the requested size, or that of a reference or of the init image."""
    start = [] if request.init_image is None else [request.init_image]
    sizes = [picture.size for picture in request.references or start]
    canvas = canvas_size(sizes, request.size or request.canvas, request.resolution)
    if canvas.warning:
        warnings.append(canvas.warning)
    return canvas.width, canvas.height


def _stretched(request: Request, size: Size) -> list[str]:
    """A warning for each of the init image and its mask whose aspect ratio the resizing changes."""
    start, mask, lines = request.init_image, request.mask, []
    if start is not None and _differ(start.size, size):
        lines.append(f"--init-image is stretched from {_by(start.size)} to {_by(size)}; choose a --size of its shape")
    if mask is not None and _differ(mask.size, start.size):
        lines.append(f"--mask is stretched from {_by(mask.size)} to {_by(start.size)}, the shape of --init-image")
    return lines


def _differ(size: Size, other: Size) -> bool:
    """Whether the aspect ratios of two sizes differ by more than the factor `MAX_ASPECT_CHANGE`."""
    a, b = size[0] * other[1], size[1] * other[0]
    return max(a, b) > MAX_ASPECT_CHANGE * min(a, b)


def _by(size: Size) -> str:
    return f"{size[0]}x{size[1]}"


def _schedule(request: Request, files: ModelFiles, tokens: int, distilled: Distilled | None) -> Schedule:
    if request.sigmas is not None:
        return custom_schedule(request.sigmas, tokens, request.shift, files.schedule)
    kind = request.schedule
    if kind == "auto":
        if distilled and request.steps in (None, distilled.few.steps(files.schedule)):
            return distilled_schedule(distilled, tokens, files.schedule, request.denoise)
        kind = "turbo" if files.turbo else "base"
    return make_schedule(kind, tokens, steps=request.steps, denoise=request.denoise, config=files.schedule)

"""What to paint, as callers ask for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from PIL import Image

from ..errors import UserError
from ..inputs.images import open_any
from ..inputs.references import check_count
from ..sampling.euler import GuidanceRange
from .options import read_options


@dataclass(frozen=True)
class Request:
    """What to paint. Sizes are in pixels; `size` overrides `canvas`, `sigmas` overrides `schedule`. Without `size` and
    references the output has the shape of `init_image`.

    `prompts` is one prompt for the whole batch, or one per picture. Each picture of a batch with different prompts
    equals the one that its prompt gives alone. Pictures are RGBA images, as `inputs.images.open_image` opens them.
    """

    prompts: str | tuple[str, ...]
    negative: str | None = None
    references: tuple[Image.Image, ...] = ()
    cfg: float = 1.0
    cfg_ranges: tuple[GuidanceRange, ...] = ()
    steps: int | None = None
    schedule: str = "auto"
    sigmas: tuple[float, ...] | None = None
    shift: float | str | None = None  # time shift of `sigmas`: mu, or dynamic
    seed: int = 0
    size: tuple[int, int] | None = None
    resolution: int | None = None  # 0: each picture's own size; None: what the model was trained on
    canvas: str = "last"
    batch: int = 1
    edit_noise: str = "decorrelated"
    init_image: Image.Image | None = None
    mask: Image.Image | None = None
    denoise: float = 1.0
    prefix_cache: bool = True

    @property
    def prompt_list(self) -> list[str]:
        return [self.prompts] * self.batch if isinstance(self.prompts, str) else list(self.prompts)

    @property
    def encodes(self) -> bool:
        """Whether pictures go into the VAE."""
        return bool(self.references) or self.init_image is not None

    @classmethod
    def from_dict(cls, options: Mapping[str, Any], opened: Callable[[Any], Any] = open_any) -> Request:
        """A request from plain values, such as a job of a session or the body of an HTTP request.

        Keys are the command line's flags, with dashes or underscores: prompt (one, or a list of one per picture),
        negative, image (a list), cfg, cfg-range, steps, schedule, sigmas, shift, seed, size, resolution, canvas, batch,
        edit-noise, init-image, mask, denoise, prefix-cache. Pictures are paths, bytes of a file or PIL images; `opened`
        turns each into what the request holds. None means not given. Raises `UserError` that names the key, what was
        got and what was expected.
        """
        read = read_options(options)
        if "prompt" not in read:
            raise UserError("prompt is missing; give what to paint or to change")
        pictures = read.pop("image", ())
        check_count(len(pictures))
        for name in ("init_image", "mask"):
            if name in read:
                read[name] = opened(read[name])
        prompts = read.pop("prompt")
        ranges = read.pop("cfg_range", ())
        return cls(prompts, references=tuple(opened(each) for each in pictures), cfg_ranges=ranges, **read)

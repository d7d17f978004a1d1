"""Latents of this model, raw in ComfyUI and normalised inside, and the conversion of other models' empty latents."""

from __future__ import annotations

import inspect
from typing import Any

import comfy.latent_formats
import comfy.sample
import torch
from torch import Tensor

from ...qwen21.config.networks import LATENT_PIXELS, LATENTS_MEAN, LATENTS_STD, SIZE_MULTIPLE
from ...qwen21.errors import UserError
from ..common import require_pictures
from ..notices import tell
from ..titles import EMPTY_LATENT, ENCODE_PROMPT, LOAD_VAE

NOTES = "qwen21_notes"  # key in a LATENT: notes about rounding and cropping, for the sampler's report
EIGHTH = 8  # pixels of a latent cell in other models that do not say it


def warn(note: str) -> str:
    """Log `note`, and return it."""
    tell([note])
    return note


def noted(samples: Tensor, notes: list[str]) -> Tensor:
    """Return `samples` with notes on the tensor, because core's VAE Encode builds the LATENT's dictionary itself."""
    if notes:
        setattr(samples, NOTES, notes)
    return samples


def empty_latent(width: int, height: int, batch: int) -> dict[str, Any]:
    """A LATENT of zeros. Sizes are rounded down to multiples of 32 pixels, with a note."""
    w, h = (max(1, side // SIZE_MULTIPLE) * SIZE_MULTIPLE for side in (width, height))
    latent = {
        "samples": torch.zeros(batch, 64, h // LATENT_PIXELS, w // LATENT_PIXELS),
        "downscale_ratio_spacial": LATENT_PIXELS,
    }
    if (w, h) == (width, height):
        return latent
    return latent | {NOTES: [warn(f"{width}x{height} became {w}x{h}: sizes are multiples of {SIZE_MULTIPLE} pixels")]}


def canvas(latent: dict[str, Any]) -> tuple[Tensor, list[str]]:
    """The latent [B, 64, h, w] to start from, and notes about how it was made.

    A single frame with a frame axis is a picture. An empty latent of another model becomes ours for the same picture
    size; without a ratio, a cell counts as 8 pixels.
    """
    samples = latent["samples"]
    require_pictures(samples)
    notes = [*latent.get(NOTES, ()), *getattr(samples, NOTES, ())]
    samples = samples[:, :, 0] if samples.ndim == 5 else samples
    if samples.shape[1] == 64:
        return samples, notes
    if samples.shape[1] not in (4, 16) or bool(torch.count_nonzero(samples)):
        raise UserError(
            f"the latent has {samples.shape[1]} channels, Qwen-Image 2.1 has 64; encode the picture with the VAE of "
            f"'{LOAD_VAE}', or make an empty one with '{EMPTY_LATENT}'"
        )
    height, width = (side * latent.get("downscale_ratio_spacial", EIGHTH) for side in samples.shape[-2:])
    ours = empty_latent(width, height, samples.shape[0])
    return ours["samples"], [*notes, *ours.get(NOTES, ())]


def mask_of(latent: dict[str, Any], samples: Tensor) -> Tensor | None:
    """The noise mask of a LATENT with the pictures `samples`, centre-cropped as the VAE cropped their pixels."""
    mask = latent.get("noise_mask")
    if mask is None:
        return None
    height, width = mask.shape[-2:]
    mask = mask.reshape(-1, 1, height, width)
    if len(mask) > len(samples):
        pictures = f"{len(samples)} picture{'s' * (len(samples) > 1)}"
        raise UserError(
            f"the latent has {len(mask)} masks for {pictures}, expected one mask, or one for each; take one of the "
            "masks, or repeat the latent (Repeat Latent Batch)"
        )
    h, w = samples.shape[-2:]
    if (height // LATENT_PIXELS, width // LATENT_PIXELS) != (h, w):
        return mask
    top, left = (height % LATENT_PIXELS) // 2, (width % LATENT_PIXELS) // 2
    return mask[..., top : top + h * LATENT_PIXELS, left : left + w * LATENT_PIXELS]


class _Channels(int):
    """The number 64, which notices when core compares it with the channels of another model's empty latent.

    Core repeats a latent of 4 or 16 channels to 64 and takes its cells for 16 pixels instead of 8, which silently
    doubles the picture. Newer versions resize it where its node stated a ratio; otherwise `Qwen21LatentFormat` does.
    ComfyUI 0.3.64 knows no ratio and has no hook for resizing, so there the latent is refused.
    """

    owner: Qwen21LatentFormat

    def __ne__(self, other: object) -> bool:
        if other != 64:
            ratios = "downscale_ratio_spacial" in inspect.signature(comfy.sample.fix_empty_latent_channels).parameters
            if other not in (4, 16) or not ratios:
                raise UserError(
                    f"the latent has {other} channels, Qwen-Image 2.1 has 64; make it with the node '{EMPTY_LATENT}', "
                    f"or take the latent of '{ENCODE_PROMPT}'"
                )
            self.owner.unscaled = True
        return int(self) != other

    __hash__ = int.__hash__


class Qwen21LatentFormat(comfy.latent_formats.LatentFormat):
    """Raw latents in ComfyUI, normalised ones for the transformer."""

    latent_dimensions = 2

    def __init__(self) -> None:
        self.latent_channels = _Channels(64)
        self.latent_channels.owner = self
        self.unscaled = False  # set between core's comparison of channels and its reading of the ratio
        self.mean = torch.tensor(LATENTS_MEAN).view(1, -1, 1, 1)
        self.std = torch.tensor(LATENTS_STD).view(1, -1, 1, 1)
        # No released factors exist. Each colour is the mean of a third of the channels, which is enough to see shapes.
        third = [[0.06 * (channel % 3 == colour) for colour in range(3)] for channel in range(64)]
        self.latent_rgb_factors = third

    @property
    def spacial_downscale_ratio(self) -> int:
        """Pixels of a latent cell. Core only asks where a node stated its latent's ratio, and then resizes itself."""
        self.unscaled = False
        return LATENT_PIXELS

    def fix_empty_latent(self, latent: Tensor) -> Tensor:
        """Resize another model's empty latent without a ratio, whose cells count as 8 pixels."""
        if not self.unscaled:
            return latent
        self.unscaled = False
        height, width = (side * EIGHTH for side in latent.shape[-2:])
        if height % LATENT_PIXELS or width % LATENT_PIXELS:
            warn(f"the empty latent of {width}x{height} pixels is rounded up to multiples of {LATENT_PIXELS}")
        return latent[..., ::2, ::2]

    def process_in(self, latent: Tensor) -> Tensor:
        if latent.shape[1] != 64:
            raise UserError(
                f"the latent has {latent.shape[1]} channels, Qwen-Image 2.1 has 64; encode the picture with the VAE of "
                f"'{LOAD_VAE}'"
            )
        mean, std = self._moments(latent)
        return (latent - mean) / std

    def process_out(self, latent: Tensor) -> Tensor:
        mean, std = self._moments(latent)
        return latent * std + mean

    def _moments(self, latent: Tensor) -> list[Tensor]:
        """Mean and deviation of each channel, shaped for latents [B, 64, h, w], or with a frame axis."""
        shape = (1, -1, *[1] * (latent.ndim - 2))
        return [moment.to(latent).view(shape) for moment in (self.mean, self.std)]

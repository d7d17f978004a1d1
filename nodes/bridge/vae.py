"""The VAE as ComfyUI's nodes use one: decode to IMAGE and encode from it, whole or tiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.ops
import torch
from torch import Tensor

from ...qwen21.checkpoint.load import fill, find_vae, has_encoder
from ...qwen21.checkpoint.model_index import trained_sizes
from ...qwen21.config.networks import LATENT_PIXELS
from ...qwen21.encode_cache import LRUCache
from ...qwen21.errors import UserError
from ...qwen21.inputs.images import is_opaque, to_vae_pixels
from ...qwen21.inputs.references import Reference
from ...qwen21.models import vae_tiling
from ...qwen21.models.vae import VAE
from .asked import Asked
from .host import check_cancel, free_bytes, vae_dtype
from .latents import noted, warn
from .quantized import patcher_class

KEPT_LATENTS = 16  # reference latents cached by the content of their pixels


class ComfyVAE(Asked, VAE):
    """The library's VAE, where core's nodes look inside one."""

    what = "VAE"


class Qwen21VAE(Asked):
    """A `VAE` for ComfyUI: raw latents [B, 64, h, w] and pictures [B, H, W, 3 or 4] in [0, 1]."""

    what = "VAE"

    latent_channels = 64
    latent_dim = 2
    output_channels = 4
    downscale_ratio = LATENT_PIXELS
    upscale_ratio = LATENT_PIXELS
    not_video = True

    def __init__(
        self, patcher: Any, dtype: torch.dtype, alpha: str, name: str, trained_sizes: tuple[int, int] | None = None
    ) -> None:
        self.patcher = patcher
        self.first_stage_model = patcher.model
        self.vae_dtype = dtype
        self.device = patcher.load_device
        self.output_device = comfy.model_management.intermediate_device()
        self.alpha = alpha
        self.name = name
        self.trained_sizes = trained_sizes  # smallest and largest side in pixels, where the model says it
        self._latents: LRUCache[Tensor] = LRUCache(KEPT_LATENTS)

    @property
    def identity(self) -> str:
        """What its latents depend on besides their pixels. Core's SelectVAEDevice gives a copy another device."""
        return f"{self.first_stage_model.made_of} {self.vae_dtype} {self.device}"

    def decode(self, samples: Tensor, vae_options: dict | None = None, **_: Any) -> Tensor:
        """Decode raw latents to pictures, RGB or RGBA as the loader's `alpha` says."""
        budget = self._load(samples, decode=True)
        return self._picture(lambda z: vae_tiling.decode(self._vae, z, budget, check_cancel=check_cancel), samples)

    def decode_tiled(self, samples: Tensor, tile_x: int = 64, tile_y: int = 64, **_: Any) -> Tensor:
        """Decode in tiles of the smaller of both sizes, in latent cells. Exact, so no overlap is needed."""
        tile = max(1, min(tile_x, tile_y))
        self._load(samples, decode=True, tile=tile)
        return self._picture(lambda z: vae_tiling.decode_tiled(self._vae, z, tile, check_cancel), samples)

    def encode(self, pixel_samples: Tensor, **_: Any) -> Tensor:
        """Encode pictures [B, H, W, C] to raw latents. Without alpha they are opaque. Sides are cropped to 16s."""
        pixels, notes = self._pixels(pixel_samples)
        budget = self._load(pixels, decode=False)
        latents = self._latent(lambda x: vae_tiling.encode(self._vae, x, budget, check_cancel=check_cancel), pixels)
        return noted(latents, notes)

    def encode_tiled(self, pixel_samples: Tensor, tile_x: int = 512, tile_y: int = 512, **_: Any) -> Tensor:
        """Encode in tiles, with sizes in pixels."""
        pixels, notes = self._pixels(pixel_samples)
        tile = max(1, min(tile_x, tile_y) // LATENT_PIXELS)
        self._load(pixels, decode=False, tile=tile)
        latents = self._latent(lambda x: vae_tiling.encode_tiled(self._vae, x, tile, check_cancel), pixels)
        return noted(latents, notes)

    def encode_reference(self, reference: Reference) -> Tensor:
        """Raw latent [1, 64, h, w] of a reference; the last few are cached by their pixels."""
        key = reference.digest, self.identity
        if key not in self._latents:
            pixels = to_vae_pixels(reference.image)
            budget = self._load(pixels, decode=False)
            latent = self._latent(lambda x: vae_tiling.encode(self._vae, x, budget, check_cancel=check_cancel), pixels)
            self._latents[key] = latent
        return self._latents[key].clone()  # another node may change it in place

    def spacial_compression_decode(self) -> int:
        return LATENT_PIXELS

    def spacial_compression_encode(self) -> int:
        return LATENT_PIXELS

    def temporal_compression_decode(self) -> None:
        return None

    def is_dynamic(self) -> bool:
        dynamic = getattr(self.patcher, "is_dynamic", None)
        return bool(dynamic and dynamic())

    def throw_exception_if_invalid(self) -> None:
        """Do nothing. Core calls this on its own VAEs; ours was checked when it was loaded."""

    def get_sd(self) -> dict[str, Tensor]:
        return self.first_stage_model.state_dict()

    @property
    def _vae(self) -> Any:
        return self.first_stage_model

    def _load(self, x: Tensor, decode: bool, tile: int | None = None) -> int:
        """Load the weights to the device; return the bytes free for activations."""
        height, width = (side * (LATENT_PIXELS if decode else 1) for side in x.shape[-2:])
        peak = vae_tiling.peak_bytes(self._vae.config, width, height, self.vae_dtype, decode=decode, tile=tile)
        comfy.model_management.load_models_gpu([self.patcher], memory_required=int(peak * vae_tiling.WORKSPACE))
        return free_bytes(self.patcher, self.device)

    def _picture(self, run: Callable[[Tensor], Tensor], samples: Tensor) -> Tensor:
        if samples.ndim == 5 and samples.shape[2] == 1:
            samples = samples[:, :, 0]
        height, width = (side * LATENT_PIXELS for side in samples.shape[-2:])
        pictures = torch.empty(len(samples), height, width, 4, device=self.output_device)
        for row, picture in zip(samples.split(1), pictures, strict=True):  # one picture on the device at a time
            picture.copy_(run(row.to(self.device, torch.float32))[0].mul_(0.5).add_(0.5).movedim(0, -1))
        return _with_alpha(pictures, self.alpha)

    def _latent(self, run: Callable[[Tensor], Tensor], pixels: Tensor) -> Tensor:
        rows = [run(row.to(self.device, torch.float32)).float() for row in pixels.split(1)]
        return torch.cat(rows).to(self.output_device)

    def _pixels(self, pictures: Tensor) -> tuple[Tensor, list[str]]:
        """Convert [B, H, W, C] in [0, 1] to [B, 4, H, W] in [-1, 1], and return notes about the cropping.

        Pictures are cropped about the centre to multiples of 16.
        """
        if pictures.ndim == 5:
            pictures = pictures.flatten(0, 1)
        height, width, channels = pictures.shape[1:]
        if channels not in (3, 4) or min(height, width) < LATENT_PIXELS:
            raise UserError(
                f"the VAE got pictures of shape {list(pictures.shape)}, expected [B, height, width, 3 or 4] with sides "
                f"of at least {LATENT_PIXELS}"
            )
        top, left = (height % LATENT_PIXELS) // 2, (width % LATENT_PIXELS) // 2
        h, w = height // LATENT_PIXELS * LATENT_PIXELS, width // LATENT_PIXELS * LATENT_PIXELS
        pixels = pictures[:, top : top + h, left : left + w].movedim(-1, 1).float()
        if channels == 3:
            pixels = torch.cat([pixels, torch.ones_like(pixels[:, :1])], dim=1)
        if (h, w) == (height, width):
            return pixels * 2 - 1, []
        sizes = f"a picture of {width}x{height} was cut to {w}x{h}"
        return pixels * 2 - 1, [warn(f"{sizes}: the VAE takes multiples of {LATENT_PIXELS} pixels")]


def _with_alpha(pictures: Tensor, alpha: str) -> Tensor:
    """Return RGBA pictures [B, H, W, 4] in the form that the loader's `alpha` asks for.

    auto drops the alpha of opaque pictures, because nodes for three channels fail on a fourth.
    """
    if alpha == "keep":
        return pictures
    colour, opacity = pictures[..., :3], pictures[..., 3:]
    if alpha == "over white":
        return colour * opacity + (1 - opacity)
    return colour.contiguous() if is_opaque(opacity) else pictures


def load_vae(path: str, dtype: str = "default", alpha: str = "auto", disable_dynamic: bool = False) -> Qwen21VAE:
    """Load the VAE of a file or component folder.

    What overflows in fp16, which holds 65504 at most, is computed again in fp32; `default` never chooses fp16.
    """
    part = find_vae(Path(path))
    load_device = comfy.model_management.vae_device()
    weights = vae_dtype(dtype)
    built = {"operations": comfy.ops.manual_cast, "dtype": weights, "device": "meta"}
    module = ComfyVAE(part.config, encoder=has_encoder(part), **built)
    offload_device = comfy.model_management.vae_offload_device()
    fill(module, part, weights, offload_device)
    module.compute_dtype = weights
    patcher = patcher_class(module, disable_dynamic)(module, load_device=load_device, offload_device=offload_device)
    patcher.cached_patcher_init = (_vae_patcher, (path, dtype, alpha))
    path = part.checkpoint.path
    return Qwen21VAE(patcher, weights, alpha, path.name, trained_sizes(part))


def _vae_patcher(path: str, dtype: str, alpha: str, disable_dynamic: bool = False) -> Any:
    return load_vae(path, dtype, alpha, disable_dynamic).patcher

"""What a run should give, computed by the library alone: no ComfyUI, its stack or its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from qwen21.checkpoint.load import find_dit, load
from qwen21.config.networks import LATENTS_MEAN, LATENTS_STD
from qwen21.sampling.euler import Start, draw_noise, sample
from qwen21.sampling.schedule import base_sigmas

MEAN, STD = (torch.tensor(values).view(1, -1, 1, 1) for values in (LATENTS_MEAN, LATENTS_STD))
Side = tuple[Tensor, Sequence[Tensor], Sequence[int]]  # states [T, W], raw latents [1, 64, h, w], slots


class Oracle:
    def __init__(self, dit_file: Path) -> None:
        self.dit = load(find_dit(dit_file), torch.float32)

    @torch.inference_mode()
    def latent(
        self,
        positive: Side,
        negative: Side | None = None,
        *,
        cfg: Sequence[float] = (),
        steps: int = 3,
        batch: int = 1,
        seed: int = 5,
        grid: tuple[int, int] = (4, 6),
        start: Tensor | None = None,
        mask: Tensor | None = None,
        sigmas: Tensor | None = None,
    ) -> Tensor:
        """Raw latents [B, 64, h, w]; `start` is a raw latent too."""
        return (
            sample(
                self._velocity(positive),
                draw_noise((batch, 64, *grid), seed),
                base_sigmas(steps, grid[0] * grid[1]) if sigmas is None else sigmas,
                negative=negative and self._velocity(negative),
                cfg=list(cfg) or None,
                start=None if start is None else Start((start - MEAN) / STD, mask),
            )
            * STD
            + MEAN
        )

    def _velocity(self, side: Side):
        states, latents, slots = side
        prefix = self.dit.prefill(states, [((latent - MEAN) / STD)[0] for latent in latents], slots)
        return lambda x, sigma: self.dit.denoise(x, sigma, prefix)

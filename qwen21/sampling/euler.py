"""The denoising loop: noise, Euler steps, classifier-free guidance, inpainting. Latents are normalised and fp32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..choices import EDIT_NOISES
from ..errors import UserError

# An edit that starts from the noise from which its own reference was generated becomes a haloed copy that ignores the
# instruction. So edits use another seed: seed + EDIT_SEED_OFFSET * (1 + references), modulo 2^64. The CPU generator
# uses the low 32 bits only, in which the offset is odd, so no number of references gives the same seed.
EDIT_SEED_OFFSET = 0x9E3779B97F4A7C15

WILD_CFG = 1e4  # above, guidance itself overflows

Velocity = Callable[[Tensor, float], Tensor]  # x [B, C, h, w], sigma -> v [B, C, h, w]


@dataclass(frozen=True)
class GuidanceRange:
    """The CFG value of the steps `first` to `last`, counted from 1, both included."""

    first: int
    last: int
    cfg: float


@dataclass(frozen=True)
class Start:
    """The init image of a run: its latent, and a mask of what may change (1) and what stays (0).

    latent [B, C, h, w] or [1, C, h, w], normalised; mask [1, 1, h, w] within [0, 1], or None for everything.
    """

    latent: Tensor
    mask: Tensor | None = None


def noise_seed(seed: int, references: int, edit_noise: str = "decorrelated") -> int:
    """The seed of the noise: `seed`, shifted for edits unless `edit_noise` is released."""
    if edit_noise not in EDIT_NOISES:
        raise UserError(f"edit noise is {edit_noise!r}, expected one of {', '.join(EDIT_NOISES)}")
    if not references or edit_noise == "released":
        return seed
    return (seed + EDIT_SEED_OFFSET * (1 + references)) % 2**64


def draw_noise(shape: tuple[int, int, int, int], seed: int) -> Tensor:
    """Standard normal noise [B, C, h, w], fp32, from the CPU generator that diffusers and ComfyUI use."""
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float32)


def guidance(steps: int, cfg: float, ranges: Sequence[GuidanceRange] = ()) -> list[float]:
    """The CFG value of every step: `cfg`, replaced within each of `ranges`; later ranges override earlier ones."""
    values = [cfg] * steps
    for r in ranges:
        if not 1 <= r.first <= r.last <= steps:
            raise UserError(f"CFG range {r.first}:{r.last} must lie within the {steps} steps, counted from 1")
        values[r.first - 1 : r.last] = [r.cfg] * (r.last - r.first + 1)
    return values


def guides(cfg: float) -> bool:
    """Whether a CFG value needs the negative branch: only above 1, as in diffusers."""
    return cfg > 1


def sample(
    positive: Velocity,
    noise: Tensor,
    sigmas: Tensor,
    *,
    negative: Velocity | None = None,
    cfg: Sequence[float] | None = None,
    start: Start | None = None,
    check_cancel: Callable[[], None] = lambda: None,
    on_step: Callable[[int, int, Tensor], None] = lambda i, n, latent: None,
) -> Tensor:
    """Run Euler steps from noise [B, C, h, w] along sigmas [n + 1]; returns the normalised latent, fp32.

    `cfg` holds a value per step; v = v_neg + cfg (v_pos - v_neg) where that value is above 1 and `negative` is given.
    `on_step` is called with (steps done, steps, latent) after each step. Raises `UserError` for the first non-finite
    latent, on a GPU one step later.
    """
    levels = sigmas.tolist()
    steps = len(levels) - 1
    finite: list[Tensor] = []  # per step; read after the next step is launched, so that the GPU never waits

    def blame(done: int) -> str:
        if cfg is not None and max(map(abs, cfg[: done + 1])) > WILD_CFG:
            return "the CFG is far too high; 1 to 10 is usual"
        return (
            "the transformer's file holds NaN or infinite weights, or they overflow in this dtype; check the file, or "
            "try another dtype"
        )

    def check(done: int) -> None:
        if not bool(finite[done]):
            raise UserError(
                f"the latent is not finite after step {done + 1} of {steps} (sigma {levels[done]:g}): {blame(done)}"
            )

    x = noise if start is None else levels[0] * noise + (1 - levels[0]) * start.latent
    for i in range(steps):
        check_cancel()
        sigma, following = sigmas[i], sigmas[i + 1]
        v = positive(x, levels[i]).float()
        if negative is not None and cfg is not None and guides(cfg[i]):
            v_negative = negative(x, levels[i]).float()
            v = v_negative + cfg[i] * (v - v_negative)
        x = x + (following - sigma).item() * v
        if start is not None and start.mask is not None:
            kept = levels[i + 1] * noise + (1 - levels[i + 1]) * start.latent
            x = start.mask * x + (1 - start.mask) * kept
        finite.append(torch.isfinite(x).all())
        if x.device.type == "cpu":
            check(i)
        elif i:
            check(i - 1)
        on_step(i + 1, steps, x)
    check(steps - 1)
    return x

"""Sigma grids: the base schedule with its shift by size, Turbo's fixed grid, custom grids, and parts of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..config.networks import ScheduleConfig
from ..config.validate import require_falling, short
from ..errors import UserError

DYNAMIC = "dynamic"  # name of the released shift, which depends on the size


@dataclass(frozen=True)
class Schedule:
    """Falling sigmas [steps + 1], fp32; `kind` is base, turbo or custom; `warnings` say what was not as requested."""

    sigmas: Tensor
    kind: str
    warnings: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        return len(self.sigmas) - 1


def base_sigmas(steps: int, tokens: int, config: ScheduleConfig = ScheduleConfig()) -> Tensor:
    """Sigmas [steps + 1] for a target of `tokens` latent tokens, bit-equal to diffusers' scheduler.

    The grid gets the exponential time shift of its size, then is stretched so that the last sigma before 0 is the
    terminal one. The order of float32 operations matters. One step gives [1, 0], where diffusers divides by zero.
    """
    if steps < 1:
        raise UserError(f"steps is {steps}, expected at least 1; the base model is made for {config.steps}")
    if steps == 1:
        return torch.tensor([1.0, 0.0])
    s = np.linspace(1.0, 1 / steps, steps).astype(np.float32)
    e = math.exp(min(shift(tokens, config), 80.0))  # far above the shift of any size; exp overflows at 710
    s = e / (e + (1 / s - 1))
    one_minus = 1 - s
    with np.errstate(invalid="ignore", divide="ignore"):  # 0 / 0 where the shift exceeds fp32
        s = 1 - one_minus / (one_minus[-1] / (1 - config.shift_terminal))
    if not np.isfinite(s).all():
        raise UserError(
            f"the schedule's shift {shift(tokens, config):g} at {tokens} tokens is too large; take a smaller size, or "
            "correct base_shift and max_shift in scheduler_config.json"
        )
    return torch.cat([torch.from_numpy(s.astype(np.float32)), torch.zeros(1)])


def shift(tokens: int, config: ScheduleConfig = ScheduleConfig()) -> float:
    """The exponential time shift mu, linear in the number of target tokens."""
    slope = (config.max_shift - config.base_shift) / (config.max_image_seq_len - config.base_image_seq_len)
    return tokens * slope + (config.base_shift - slope * config.base_image_seq_len)


def turbo_sigmas(config: ScheduleConfig = ScheduleConfig()) -> Tensor:
    """Turbo's fixed sigmas and the final 0, the same at every size."""
    return torch.tensor([*config.turbo_sigmas, 0.0], dtype=torch.float32)


def custom_schedule(
    values: Sequence[float], tokens: int, mu: float | str | None = None, config: ScheduleConfig = ScheduleConfig()
) -> Schedule:
    """The schedule of custom sigmas `values` for a target of `tokens` latent tokens, shifted where `mu` is given.

    `mu` is the exponential time shift, or `dynamic` for the released one of this size; nothing is stretched to a
    terminal sigma. The schedule warns if the grid ends above 0.
    """
    sigmas = custom_sigmas(values)
    if mu is not None:
        sigmas = shifted(sigmas, shift(tokens, config) if mu == DYNAMIC else float(mu))
    return Schedule(sigmas, "custom", unfinished(sigmas))


def shifted(sigmas: Tensor, mu: float) -> Tensor:
    """`sigmas` with the exponential time shift `mu`, bit-equal to diffusers' scheduler; 1 and 0 stay unchanged."""
    s, e = sigmas.numpy(), math.exp(min(max(mu, -80.0), 80.0))  # far above any useful shift; exp overflows at 710
    with np.errstate(divide="ignore"):  # 1 / 0, whose shifted sigma is 0
        result = e / (e + (1 / s - 1))
    require_falling(result.tolist(), f"sigmas shifted by {mu:g}")
    return torch.from_numpy(result)


def unfinished(sigmas: Tensor) -> tuple[str, ...]:
    """A warning where `sigmas` end above 0."""
    end = float(sigmas[-1])
    if end <= 0:
        return ()
    return (f"the sigmas end at {end:.4g}, not at 0, so that much noise stays in the picture: end them with 0",)


def custom_sigmas(values: Sequence[float]) -> Tensor:
    """Custom sigmas `values` as a tensor: strictly falling within [0, 1]; the last need not be 0."""
    shown = short([float(f"{value:g}") if isinstance(value, float) else value for value in values])
    if len(values) < 2:
        raise UserError(f"got {len(values)} sigmas {shown}, expected at least two, such as 1,0.5,0")
    require_falling(values, f"sigmas {shown}")
    return torch.tensor(values, dtype=torch.float32)


def make_schedule(
    kind: str,
    tokens: int,
    *,
    steps: int | None = None,
    denoise: float = 1.0,
    config: ScheduleConfig = ScheduleConfig(),
) -> Schedule:
    """The schedule of `kind` base or turbo for a target of `tokens` latent tokens.

    A `denoise` below 1 keeps the end of a longer grid, as ComfyUI's KSampler does: for base the last steps + 1 sigmas
    of the grid of int(steps / denoise) steps, for Turbo the last round(8 denoise) steps.
    """
    if not 0 < denoise <= 1:
        raise UserError(f"denoise is {denoise:g}, expected above 0 and at most 1")
    if kind == "base":
        steps = config.steps if steps is None else steps
        grid = base_sigmas(steps if denoise == 1 else max(int(steps / denoise), steps), tokens, config)
        return Schedule(grid[-(steps + 1) :], kind)
    if kind != "turbo":
        raise UserError(f"schedule is {kind!r}, expected base or turbo")
    if steps is not None and steps < 1:
        raise UserError(f"steps is {steps}, expected at least 1; Turbo runs {len(config.turbo_sigmas)}")
    full = len(config.turbo_sigmas)
    kept = full if denoise == 1 else max(round(full * denoise), 1)
    warnings = ()
    if steps not in (None, full):
        warnings = (f"Turbo has {full} fixed steps: {kept} run, not {steps}; give a grid of your own with sigmas",)
    return Schedule(turbo_sigmas(config)[-(kept + 1) :], kind, warnings)


def is_run_of(grid: Tensor, sigmas: Tensor) -> bool:
    """Whether `sigmas` are consecutive sigmas of `grid`, such as its last few."""
    n, given = len(sigmas), sigmas.cpu().float()
    return any(torch.allclose(grid[i : i + n], given, atol=1e-6) for i in range(len(grid) - n + 1))


def official_grid(
    sigmas: Tensor,
    table: Tensor,
    tokens: int,
    *,
    fixed: Tensor | None = None,
    config: ScheduleConfig = ScheduleConfig(),
) -> tuple[Tensor, int] | None:
    """The released grid that replaces ComfyUI's `simple` grid `sigmas`, and the number of steps of the whole grid.

    `sigmas` is what a sampler was given, `table` the model sampling's sigmas, rising. `simple` takes every
    len(table) / steps-th sigma of the table, whatever the model. Whole grids and runs of their steps (partial denoise,
    KSamplerAdvanced) are recognised; of several matches the one of fewest steps counts. `fixed` are the sigmas of a
    distilled model, such as Turbo. None for any other grid, and where `fixed` has another number of steps.
    """
    n = len(sigmas) - 1
    given, table = sigmas.cpu().float(), table.cpu().float()
    if n < 1 or not bool(torch.isin(given[:-1], table).all()):
        return None
    for steps in range(n, len(table) + 1):
        indices = [-(1 + int(x * len(table) / steps)) for x in range(steps)]
        grid = torch.cat([table[indices], torch.zeros(1)])
        first = int((grid - given[0]).abs().argmin())
        part = grid[first : first + n + 1].clone()
        if len(part) == n + 1 and given[-1] == 0:
            part[-1] = 0  # KSamplerAdvanced may end early and set the last sigma to 0
        if len(part) == n + 1 and torch.equal(part, given):
            break
    else:
        return None
    if fixed is not None and steps != len(fixed) - 1:
        return None
    whole = base_sigmas(steps, tokens, config) if fixed is None else fixed
    result = whole[first : first + n + 1].clone()
    if given[-1] == 0:
        result[-1] = 0
    return result.to(sigmas), steps

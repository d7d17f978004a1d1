"""Translate parsed arguments to what the library takes: requests, inputs, FP8 storage, budgets."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..system_memory import GIB

if TYPE_CHECKING:
    from ..checkpoint.fp8_policy import Fp8
    from ..request import Request

LARGEST_GIB = 2**20


def request_of(a: argparse.Namespace) -> Request:
    """Build the request that the arguments describe, without the pictures that they name."""
    from ..request import Request

    return Request(
        prompts=a.prompt or "",
        negative=a.negative,
        cfg=a.cfg,
        cfg_ranges=tuple(a.cfg_range),
        steps=a.steps,
        schedule=a.schedule,
        sigmas=a.sigmas,
        shift=a.shift,
        seed=a.seed,
        size=a.size,
        resolution=a.resolution,
        canvas=a.canvas,
        batch=a.batch,
        edit_noise=a.edit_noise,
        denoise=a.denoise,
        prefix_cache=a.prefix_cache == "on",
    )


def opened_request(a: argparse.Namespace, opened: Callable[[Path], Any] | None = None) -> Request:
    """Build the request that the arguments describe, with their pictures as `opened` returns them for a path."""
    from ..inputs.images import open_image
    from ..inputs.references import check_count

    opened = opened or open_image
    check_count(len(a.image))
    return replace(
        request_of(a),
        references=tuple(opened(path) for path in a.image),
        init_image=opened(a.init_image) if a.init_image else None,
        mask=opened(a.mask) if a.mask else None,
    )


def inputs_of(a: argparse.Namespace) -> list[Path]:
    """Files that the arguments name as inputs, except the model's own."""
    return [*pictures_of(a), *(path for path, _ in a.lora)]


def pictures_of(a: argparse.Namespace) -> list[Path]:
    """Picture files that the arguments name."""
    return [*a.image, *(path for path in (a.init_image, a.mask) if path)]


def fp8_of(a: argparse.Namespace) -> Fp8 | None:
    """FP8 storage according to the flags --dtype and --keep; None without it."""
    from ..checkpoint.fp8_policy import Fp8

    if a.dtype == "fp8":
        return Fp8(tuple(a.keep))
    if a.keep:
        raise UserError(f"--keep {a.keep[0]} says what fp8 leaves alone, but --dtype is {a.dtype}; add --dtype fp8")
    return None


def budget_of(a: argparse.Namespace) -> int | None:
    """Bytes that --kv-budget allows; None where the flag is not given."""
    if a.kv_budget is None:
        return None
    if not 0 <= a.kv_budget < LARGEST_GIB:
        raise UserError(f"--kv-budget is {a.kv_budget:g}, expected GiB from 0 up, such as 8")
    return int(a.kv_budget * GIB)

"""Timing two functions beside each other: interleaved pairs and the median of their ratios.

Single timings on a shared machine vary several-fold; a pair runs within the same second, and the order alternates.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Row:
    """One line of a table: medians in milliseconds, and how many times faster ours is."""

    name: str
    theirs_ms: float
    ours_ms: float
    ratio: float

    def __str__(self) -> str:
        return f"| {self.name} | {self.theirs_ms:.1f} | {self.ours_ms:.1f} | {self.ratio:.2f} |"


HEADER = "| | diffusers, ms | qwen21, ms | times faster |\n|---|---|---|---|"


def compare(name: str, theirs: Callable[[], object], ours: Callable[[], object], pairs: int = 15) -> Row:
    """Median milliseconds of both and the median of the pairs' ratios; one warm-up each."""
    theirs(), ours()
    times: list[tuple[float, float]] = []
    for i in range(pairs):
        order = (theirs, ours) if i % 2 else (ours, theirs)
        first, second = (_seconds(function) for function in order)
        times.append((first, second) if i % 2 else (second, first))
    return Row(
        name,
        1000 * statistics.median(t for t, _ in times),
        1000 * statistics.median(o for _, o in times),
        statistics.median(t / o for t, o in times),
    )


def _seconds(function: Callable[[], object]) -> float:
    _synchronise()
    start = time.perf_counter()
    function()
    _synchronise()
    return time.perf_counter() - start


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()

"""What a LoRA loses where it is merged into a weight, and where it runs beside it.

    python -m tests.bench.lora    # a few seconds on the CPU

A weight W [out, in] as checkpoints hold it (bf16, or int8 with one scale per row) and a low-rank delta of a given
size. Merging stores round(W + delta) on the weight's own grid, so what really changes is round(W + delta) - W; beside
the weight it is up @ down, both rounded to bf16. Each cell: the share of the delta that arrives (its projection on the
wanted one), and the error, both relative to the delta's norm. 100% error is as bad as no LoRA at all; int8 exceeds it
where a row's largest value changes and moves its scale. A layer's outputs are rounded either way, which is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

SIZES = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2)  # norm of the delta over the norm of the weight


def to_bf16(weight: Tensor) -> Tensor:
    return weight.bfloat16().double()


def to_int8(weight: Tensor) -> Tensor:
    """One scale per row, from its largest value; a rotation of the input axis spreads values and changes no grid."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round().clamp(-127, 127) * scale


def merged(weight: Tensor, delta: Tensor, to_grid: Callable[[Tensor], Tensor]) -> Tensor:
    """What of a delta arrives in a weight that is stored on a grid before and after."""
    stored = to_grid(weight)
    return to_grid(stored + delta) - stored


def measure(arrived: Tensor, delta: Tensor) -> tuple[float, float]:
    """(share of the delta that arrives, error), both over the delta's norm."""
    square = delta.square().sum()
    return (float((arrived * delta).sum() / square), float((arrived - delta).square().sum().div(square).sqrt()))


def rows(out: int, columns: int, rank: int, seed: int = 0) -> list[tuple[float, list[tuple[float, float]]]]:
    """Per size: (share, error) of a merge into bf16, of a merge into int8, and beside either."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, columns, generator=generator, dtype=torch.float64) * 0.02
    down = torch.randn(rank, columns, generator=generator, dtype=torch.float64) * columns**-0.5
    up = torch.randn(out, rank, generator=generator, dtype=torch.float64)
    results = []
    for size in SIZES:
        scaled = up * (size * weight.norm() / (up @ down).norm())
        delta = scaled @ down
        arrived = (merged(weight, delta, to_bf16), merged(weight, delta, to_int8), to_bf16(scaled) @ to_bf16(down))
        results.append((size, [measure(part, delta) for part in arrived]))
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=int, default=2048)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--rank", type=int, default=16)
    a = parser.parse_args()
    print(f"a weight [{a.out}, {a.columns}], rank {a.rank}; share that arrives / error\n")
    print("| delta / weight | merged into bf16 | merged into int8 | beside, in bf16 |\n|---|---|---|---|")
    for size, cells in rows(a.out, a.columns, a.rank):
        shown = " | ".join(f"{100 * share:.1f}% / {100 * error:.1f}%" for share, error in cells)
        print(f"| {size:g} | {shown} |")


if __name__ == "__main__":
    main()

"""Steps of small latents as a CUDA graph beside the same steps launched kernel by kernel.

python -m tests.bench.graph             # the released size in bf16, random weights; needs CUDA
python -m tests.bench.graph --small     # a small transformer, to see that it runs

`on the host` is the part of a plain step's time that launching takes: a graph is recorded from 0.8 on. `same` says
whether replays give the same bits.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from qwen21.config.networks import DiTConfig
from qwen21.models.dit import DiT, fuse
from qwen21.ops.pointwise import EAGER, CompiledKernels, Kernels
from qwen21.prefix import ContiguousKV
from qwen21.sampling.cuda_graph import LAUNCH_BOUND_RATIO, Step, StepGraph
from tests.support import tiny

from .pairs import compare

SIDES = (8, 16, 32, 64)  # latent cells: pictures of 128, 256, 512 and 1024 pixels
TEXT = 64
HEADER = (
    "| latent | kernels | plain, ms | on the host | replayed, ms | times faster | same |\n|---|---|---|---|---|---|---|"
)


def host_share(step: Step, target: torch.Tensor) -> float:
    """Of a step's time, what the host takes to launch it."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    step(target, 0.5)
    launched = time.perf_counter() - started
    torch.cuda.synchronize()
    return launched / (time.perf_counter() - started)


@torch.inference_mode()
def rows(config: DiTConfig, dtype: torch.dtype, pairs: int, kernels: tuple[Kernels, ...]) -> Iterator[str]:
    where = {"device": "cuda", "dtype": dtype}
    dit = tiny.randomise(DiT(config, **where), seed=1).requires_grad_(False)
    fuse(dit)
    prefix = dit.prefill(torch.randn(TEXT, config.text_width, **where))
    for dit.kernels in kernels:
        for side in SIDES:
            target = torch.randn(1, config.in_channels, side, side, **where)
            contiguous = ContiguousKV(prefix, side * side, config.layers, target.device, dtype)
            step = partial(dit.denoise, prefix=prefix, contiguous=contiguous)
            for _ in range(2):
                step(target, 0.5)
            recorded, share = StepGraph(step, target), host_share(step, target)
            same = all(torch.equal(recorded(target, sigma), step(target, sigma)) for sigma in (1.0, 0.5))
            row = compare("", partial(step, target, 0.5), partial(recorded, target, 0.5), pairs)
            yield (
                f"| {side}x{side} | {dit.kernels.name} | {row.theirs_ms:.2f} | "
                f"{share:.2f}{' *' * (share > LAUNCH_BOUND_RATIO)} | "
                f"{row.ours_ms:.2f} | {row.ratio:.2f} | {'yes' if same else 'no'} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="two blocks of four heads, not compiled")
    parser.add_argument("--pairs", type=int, default=15, help="interleaved pairs a row")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("CUDA graphs need CUDA")
    config, kernels = DiTConfig(), (EAGER, CompiledKernels())
    if arguments.small:
        config, kernels = replace(config, layers=2, heads=4, text_width=512), (EAGER,)
    else:
        kernels[1].prepare(config, torch.bfloat16, torch.device("cuda"))
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}\n\n{HEADER}")
    for row in rows(config, torch.bfloat16, arguments.pairs, kernels):
        print(row, flush=True)


if __name__ == "__main__":
    main()

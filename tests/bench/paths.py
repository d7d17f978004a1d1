"""Every fast path beside diffusers in one run: time, error against fp32, memory at the peak.

    python -m tests.bench.paths --small --pairs 2     # CPU: small random weights, six minutes
    python -m tests.bench.paths --pairs 7             # the released size in bf16, needs CUDA; not run yet
    python -m tests.bench.paths                       # 15 pairs, what a claim needs

Rows are what is timed, for each path: a text-to-image step, a step over four references, their prefill, and an edit of
eight steps over them that is run again with a new seed. `times faster` is the median over interleaved pairs, and
`error` the relative distance of the velocity from the same weights in fp32; diffusers has its own line.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen21 import __version__
from qwen21.models.dit import DiT, fuse
from qwen21.models.flex_prefill import FlexPrefill
from qwen21.ops.attention_backends import Shape, choose_attention
from qwen21.ops.pointwise import EAGER, CompiledKernels
from qwen21.ops.pointwise_kitchen import KitchenKernels
from tests.support import tiny

from .dit import Inputs, Pair, Size, add_size, rerun_row, size_of
from .pairs import Row, compare

REFERENCES = 4
SIGMA = 0.5
HEADER = "| | path | diffusers, ms | qwen21, ms | times faster | error | peak, MiB |\n|---|---|---|---|---|---|---|"


@dataclass(frozen=True)
class Path:
    """One way to run the transformer, as changes of the plain one."""

    name: str
    compiled: bool = False
    kitchen: bool = False
    fused: bool = False
    chosen_attention: bool = False
    fp8: bool = False
    one_pass: bool = False


PATHS = (
    Path("eager"),
    Path("comfy-kitchen, fused", kitchen=True, fused=True),
    Path("compiled", compiled=True),
    Path("compiled, fused", compiled=True, fused=True),
    Path("compiled, fused, chosen attention", compiled=True, fused=True, chosen_attention=True),
    Path("compiled, prefix in one pass", compiled=True, one_pass=True),
    Path("and fp8", compiled=True, fused=True, chosen_attention=True, fp8=True),
)


def built(path: Path, pair: Pair, kernels: CompiledKernels) -> DiT:
    """The transformer of a path, over diffusers' weights as far as it can share them."""
    size = pair.size
    dit = DiT(size.config, dtype=size.dtype, device="meta").eval().requires_grad_(False)
    dit.load_state_dict(pair.theirs.state_dict(), assign=True)
    if path.fp8:
        tiny.in_fp8(dit)
    if path.fused:
        fuse(dit)
    if path.chosen_attention:
        tokens = size.target[0] * size.target[1]
        shape = Shape(tokens, tokens, size.config.heads, size.config.head_dim)
        name, dit.attend = choose_attention(
            "auto", shape, size.dtype, torch.device(size.device), may_compile=path.compiled
        )
        print(f"attention chosen: {name}")
    dit.kernels = kernels if path.compiled else KitchenKernels() if path.kitchen else EAGER
    if not dit.kernels.ready:
        dit.kernels.prepare(size.config, size.dtype, torch.device(size.device))
        print(f"kernels: {dit.kernels.name}")
    return dit


def exact(pair: Pair, case: Inputs) -> Tensor:
    """Velocity of a step by the same weights in fp32."""
    dit = DiT(pair.size.config, device="meta").eval().requires_grad_(False)
    dit.load_state_dict({k: v.float() for k, v in pair.theirs.state_dict().items()}, assign=True)
    prefix = dit.prefill(case.text.float(), [r.float() for r in case.references], case.slots)
    return dit.denoise(case.target.float(), SIGMA, prefix)


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.float() - wanted).norm() / wanted.norm())


def their_step(case: Inputs) -> Callable[[], Tensor]:
    """diffusers' step over a filled cache; the velocity [B, C, h, w]."""
    x, cache = case.packed_target, case.new_cache()
    case.theirs(x, 1.0, cache, "extract")
    return lambda: case.theirs(x, SIGMA, cache, "cached").transpose(1, 2).unflatten(2, case.pair.size.target)


def our_step(case: Inputs) -> Callable[[], Tensor]:
    dit, prefix = case.pair.ours, case.prefill()
    contiguous = case.contiguous(prefix)
    return lambda: dit.denoise(case.target, SIGMA, prefix, contiguous=contiguous)


def their_first(case: Inputs) -> Callable[[], Tensor]:
    """The first step, which fills the cache on its way."""
    x = case.packed_target
    return lambda: case.theirs(x, 1.0, case.new_cache(), "extract")


def our_first(case: Inputs) -> Callable[[], Tensor]:
    dit = case.pair.ours
    return lambda: dit.denoise(case.target, 1.0, case.prefill())


def peak(run: Callable[[], object], device: str) -> str:
    """MiB on the GPU beyond what lay there before."""
    if device != "cuda":
        return ""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return f"{(torch.cuda.max_memory_allocated() - before) / 2**20:.0f}"


@torch.inference_mode()
def rows(size: Size, pairs: int) -> Iterator[str]:
    pair = Pair(size, pairs)
    kernels = CompiledKernels()
    kernels.prepare(size.config, size.dtype, torch.device(size.device), fp8=size.device == "cuda")
    yield f"compiled in {kernels.seconds:.1f} s\n\n{HEADER}"
    cases = {"text-to-image step": pair.inputs(0), f"step, {REFERENCES} references": pair.inputs(REFERENCES)}
    wanted = {name: exact(pair, case) for name, case in cases.items()}
    for name, case in cases.items():
        step = their_step(case)
        yield f"| {name} | diffusers | | | | {error(step(), wanted[name]):.1e} | {peak(step, size.device)} |"
    for path in PATHS:
        pair.ours = built(path, pair, kernels)
        pair.prefill = FlexPrefill(pair.ours).prefill if path.one_pass else None
        for name, case in cases.items():
            ours = our_step(case)
            row = compare(name, their_step(case), ours, pairs)
            yield line(path, row, f"{error(ours(), wanted[name]):.1e}", peak(ours, size.device))
        case = cases[f"step, {REFERENCES} references"]
        ours = our_first(case)
        row = compare(f"prefill and first step, {REFERENCES} references", their_first(case), ours, pairs)
        yield line(path, row, "", peak(ours, size.device))
        yield line(path, rerun_row(pair, REFERENCES))


def line(path: Path, row: Row, off: str = "", mib: str = "") -> str:
    return f"| {row.name} | {path.name} | {row.theirs_ms:.1f} | {row.ours_ms:.1f} | {row.ratio:.2f} | {off} | {mib} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_size(parser)
    size, pairs = size_of(parser, parser.parse_args())
    device = torch.cuda.get_device_name() if size.device == "cuda" else platform.processor() or platform.machine()
    print(f"{device}, PyTorch {torch.__version__}, qwen21 {__version__}, {time.strftime('%Y-%m-%d')}")
    for text in rows(size, pairs):
        print(text, flush=True)


if __name__ == "__main__":
    main()

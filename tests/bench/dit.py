"""The transformer beside diffusers', same weights, one process: steps, prefill, a whole 8-step edit.

python -m tests.bench.dit --small --compile               # CPU, five pairs a row, two minutes
python -m tests.bench.dit --small --compile --pairs 15    # what a claim needs, five minutes
python -m tests.bench.dit                       # the released size in bf16, needs CUDA
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from diffusers import QwenImage21Transformer2DModel
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache

from qwen21.config.networks import DiTConfig
from qwen21.models.dit import DiT
from qwen21.ops.attention_backends import Shape, choose_attention
from qwen21.ops.pointwise import CompiledKernels
from qwen21.prefix import ContiguousKV, Prefix
from qwen21.sampling.euler import sample
from qwen21.sampling.schedule import turbo_sigmas

from .pairs import HEADER, Row, compare


@dataclass(frozen=True)
class Size:
    config: DiTConfig
    target: tuple[int, int]
    reference: tuple[int, int]
    text: int
    dtype: torch.dtype
    device: str


# References as large as the target, as edits at the default resolution have them.
SMALL = Size(DiTConfig(layers=4, heads=4, text_width=512), (32, 32), (32, 32), 64, torch.float32, "cpu")
FULL = Size(DiTConfig(), (64, 64), (64, 64), 128, torch.bfloat16, "cuda")


class Pair:
    """Both models over one set of weights, and one set of inputs for `references` references."""

    def __init__(self, size: Size, pairs: int) -> None:
        self.size, self.pairs = size, pairs
        c = size.config
        torch.manual_seed(0)
        with torch.device(size.device):
            self.theirs = QwenImage21Transformer2DModel(
                num_layers=c.layers, num_attention_heads=c.heads, context_in_dim=c.text_width
            ).to(size.dtype)
        self.theirs.eval().requires_grad_(False)
        self.prefill: Callable[..., Prefix] | None = None  # another way than by units
        self.ours = DiT(c, dtype=size.dtype, device="meta").eval().requires_grad_(False)
        self.ours.load_state_dict(self.theirs.state_dict(), assign=True)

    def inputs(self, references: int) -> Inputs:
        return Inputs(self, references)


class Inputs:
    def __init__(self, pair: Pair, references: int) -> None:
        size, self.pair = pair.size, pair
        kw = {"device": size.device, "dtype": size.dtype}
        generator = torch.Generator(size.device).manual_seed(1)
        h, w = size.reference
        self.text = torch.randn(size.text, size.config.text_width, generator=generator, **kw)
        self.references = [torch.randn(64, h, w, generator=generator, **kw) for _ in range(references)]
        self.target = torch.randn(1, 64, *size.target, generator=generator, **kw)
        self.slots = [4 + 5 * i for i in range(references)]
        pads: list[bool] = []
        for i, slot in enumerate(self.slots):
            pads += [False] * (slot - (self.slots[i - 1] if i else 0)) + [True] * (h * w // 4)
        pads += [False] * (size.text - (self.slots[-1] if references else 0))
        self.states = torch.zeros(1, len(pads), size.config.text_width, **kw)
        self.states[0, ~torch.tensor(pads, dtype=torch.bool)] = self.text
        slots = [*pads, *[True] * (size.target[0] * size.target[1] // 4)]
        self.mask = torch.tensor(slots, device=size.device)[None]
        self.shapes = [[(1, h, w)] * references + [(1, *size.target)]]
        self.packed = [r.flatten(1).T[None] for r in self.references]

    def theirs(self, x: torch.Tensor, sigma: float, cache: QwenImage21KVCache, mode: str) -> torch.Tensor:
        """One call of diffusers' transformer on packed x [1, N, 64], as its pipeline makes it."""
        t = torch.tensor([sigma], device=x.device) * 1000
        return self.pair.theirs(
            hidden_states=torch.cat([*self.packed, x], dim=1),
            encoder_hidden_states=self.states,
            timestep=t.to(x.dtype) / 1000,
            img_shapes=self.shapes,
            img_mask=self.mask,
            kv_cache=cache,
            kv_cache_mode=mode,
            return_dict=False,
        )[0][:, -x.shape[1] :]

    def new_cache(self) -> QwenImage21KVCache:
        return QwenImage21KVCache(self.pair.size.config.layers)

    @property
    def packed_target(self) -> torch.Tensor:
        return self.target.flatten(2).transpose(1, 2).contiguous()

    def prefill(self) -> Prefix:
        make = self.pair.prefill or self.pair.ours.prefill
        return make(self.text, self.references, self.slots)

    def contiguous(self, prefix: Prefix) -> ContiguousKV:
        """The prefix laid out for a run's steps, as a run with free memory has it."""
        tokens, device = self.target.shape[-2] * self.target.shape[-1], self.target.device
        return ContiguousKV(prefix, tokens, self.pair.size.config.layers, device, self.target.dtype)


def step_row(pair: Pair, references: int) -> Row:
    """A denoising step over a cached prefix."""
    case = pair.inputs(references)
    x, cache, prefix = case.packed_target, case.new_cache(), case.prefill()
    contiguous = case.contiguous(prefix)
    case.theirs(x, 1.0, cache, "extract")
    name = f"edit step, {references} reference{'s' * (references > 1)}" if references else "text-to-image step"
    return compare(
        name,
        lambda: case.theirs(x, 0.5, cache, "cached"),
        lambda: pair.ours.denoise(case.target, 0.5, prefix, contiguous=contiguous),
        pair.pairs,
    )


def prefill_row(pair: Pair, references: int) -> Row:
    """The first step of an edit: prefill and one step, which diffusers runs as one pass."""
    case = pair.inputs(references)
    x = case.packed_target
    return compare(
        f"prefill and first step, {references} references",
        lambda: case.theirs(x, 1.0, case.new_cache(), "extract"),
        lambda: pair.ours.denoise(case.target, 1.0, case.prefill()),
        pair.pairs,
    )


def their_edit(case: Inputs) -> torch.Tensor:
    """diffusers' edit at Turbo's eight sigmas, [B, C, h, w]."""
    levels = turbo_sigmas().tolist()
    x, cache = case.packed_target, case.new_cache()
    for i in range(len(levels) - 1):
        v = case.theirs(x, levels[i], cache, "cached" if i else "extract")
        x = x + (levels[i + 1] - levels[i]) * v
    return x.transpose(1, 2).unflatten(2, case.pair.size.target)


def our_edit(case: Inputs, prefix: Prefix) -> torch.Tensor:
    """The same by us behind a prefix, fp32."""
    contiguous, dtype, dit = case.contiguous(prefix), case.target.dtype, case.pair.ours
    return sample(
        lambda x, sigma: dit.denoise(x.to(dtype), sigma, prefix, contiguous=contiguous),
        case.target.float(),
        turbo_sigmas(),
    )


def edit_row(pair: Pair, references: int) -> Row:
    """A whole edit at Turbo's eight sigmas."""
    case = pair.inputs(references)

    def theirs() -> torch.Tensor:
        return their_edit(case)

    def ours() -> torch.Tensor:
        return our_edit(case, case.prefill())

    difference = (theirs().float() - ours()).abs().max()
    assert pair.size.dtype != torch.float32 or difference < 1e-3, f"the two disagree by {difference}"
    return compare(f"8-step edit, {references} references", theirs, ours, pair.pairs)


def rerun_row(pair: Pair, references: int) -> Row:
    """A whole edit whose prefix an earlier run with another seed has left in the store."""
    from .prefix import Session

    case = pair.inputs(references)
    session = Session(case)
    session.edit(case.text, "miss")
    name = f"8-step edit, {references} references, new seed"
    return compare(name, lambda: their_edit(case), lambda: session.edit(case.text, "hit"), pair.pairs)


@torch.inference_mode()
def rows(size: Size, pairs: int, compiled: bool = False) -> Iterator[Row]:
    pair = Pair(size, pairs)
    if compiled:
        kernels = CompiledKernels()
        kernels.prepare(size.config, size.dtype, torch.device(size.device))
        pair.ours.kernels = kernels
        tokens = size.target[0] * size.target[1]
        shape = Shape(tokens, 5 * tokens, size.config.heads, size.config.head_dim)  # as behind four references
        name, pair.ours.attend = choose_attention(
            "auto", shape, size.dtype, torch.device(size.device), may_compile=True
        )
        print(f"| compiled in {kernels.seconds:.1f} s; attention: {name} | | | |")
    for references in (0, 1, 2, 4):
        yield step_row(pair, references)
    yield prefill_row(pair, 2)
    yield edit_row(pair, 2)
    yield rerun_row(pair, 4)


def add_size(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--small", action="store_true", help="4 blocks of 4 heads x 128 in fp32 on the CPU")
    parser.add_argument("--pairs", type=int, help="interleaved pairs a row (small: 5, else 15)")


def size_of(parser: argparse.ArgumentParser, arguments: argparse.Namespace, small: Size = SMALL) -> tuple[Size, int]:
    """The size that was asked for, and the number of pairs."""
    size = small if arguments.small else FULL
    if size.device == "cuda" and not torch.cuda.is_available():
        parser.error("the full size needs CUDA; use --small on a CPU")
    return size, arguments.pairs or (5 if arguments.small else 15)


def main() -> None:
    parser = argparse.ArgumentParser()
    add_size(parser)
    parser.add_argument("--compile", action="store_true", help="ours with compiled kernels, and the fastest attention")
    arguments = parser.parse_args()
    print(HEADER)
    for row in rows(*size_of(parser, arguments), arguments.compile):
        print(row, flush=True)


if __name__ == "__main__":
    main()

"""What each K/V codec costs in accuracy, bytes and time: `python -m tests.bench.codecs`, a few seconds on the CPU.

The first table is the attention output's SNR in dB against float64 attention to exact keys and values, with only the
half packed that the row names; 30 dB is an error of 3%, 40 dB of 1%, and 3 dB halve the error's power. The keys and
values are made up, not the released model's. Figures waver by 0.3 dB with the seed, most in the wide rows.

Which codec: `native` while it fits, it is exact. Else `int8`: the bytes of `fp8`, 12 dB better on ordinary keys and
values and better in every row, no slower to unpack on a CPU. `fp8_v` keeps the keys exact, for a model whose keys
round badly; in no row here do int8's keys and values together lose as much as its values alone. `fp8` unpacks without
a matrix product, its one advantage.

What was kept: both halves centred; in int8 both rotated too. Rotating fp8 costs 2 dB on wide channels, since fp8
rounds each value by its own size, and a wide channel's error is then spread over all. Centring stores the mean that
leaves no mean error, which is worth 2 dB on values (far more where attention is diffuse) and nothing on keys, whose
mean error cancels in the softmax.

Why no int4: with everything that helps (centred, rotated, a scale per 32 channels) it gives 17 dB with both halves
packed, an error of 14% in every attention output, to save 40% of int8's bytes. A picture shows that.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from qwen21.ops.rope import apply_rope, rotation
from qwen21.prefix.codecs import CENTRED_FROM, CODECS, FP8, Codec, KVPacking, _hadamard
from qwen21.sequence import ImageSegment, TextSegment

HEADS, HEAD_DIM, KEYS, QUERIES, BESIDE, SEEDS = 4, 128, 512, 128, 64, 3
ODD_CHANNELS = 4  # of each head: biased, wide
RELEASED = {"heads": 32, "head_dim": 128, "dtype": torch.bfloat16}
LAYERS = 32
FORMS = {
    "plain": KVPacking(),
    "centred": KVPacking(centred=True),
    "rotated": KVPacking(rotated=True),
    "both": KVPacking(centred=True, rotated=True),
}


@dataclass(frozen=True)
class Case:
    """Queries over one KV block of k, v [1, H, n, D] and, for very small KV blocks, exact tokens beside it."""

    name: str  # "keys ..." or "values ...": the half that is packed
    q: Tensor
    k: Tensor
    v: Tensor
    beside: tuple[Tensor, Tensor] | None = None

    @property
    def half(self) -> str:
        return self.name.split()[0]

    @cached_property
    def exact(self) -> Tensor:
        return self._attend(self.k, self.v)

    def snr(self, codec: Codec, dtype: torch.dtype = torch.float32) -> float:
        """dB of the attention output with k and v packed by `codec`."""
        keys, values = codec.encode(self.k, self.v)
        return self.snr_of(codec.decode_keys(keys, dtype), codec.decode_values(values, dtype))

    def snr_of(self, k: Tensor, v: Tensor) -> float:
        error = self._attend(k, v) - self.exact
        return 10 * torch.log10(self.exact.pow(2).sum() / error.pow(2).sum()).item()

    def snr_of_half(self, packing: KVPacking) -> float:
        """dB with only the named half packed."""
        keys, values = (packing, KVPacking()) if self.half == "keys" else (KVPacking(), packing)
        return self.snr(Codec("", keys, values))

    def _attend(self, k: Tensor, v: Tensor) -> Tensor:
        if self.beside:
            k, v = (torch.cat([part, more], dim=2) for part, more in zip((k, v), self.beside, strict=True))
        q, k, v = (x.double() for x in (self.q, k, v))
        return (q @ k.mT * HEAD_DIM**-0.5).softmax(-1) @ v


class Draw:
    """Random keys, values and channels of one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, tokens: int = KEYS) -> Tensor:
        return torch.randn(1, HEADS, tokens, HEAD_DIM, generator=self.generator)

    def odd(self, value: float, others: float) -> Tensor:
        """[1, H, 1, D]: `value` in a few channels of each head, `others` in the rest."""
        order = torch.rand(1, HEADS, 1, HEAD_DIM, generator=self.generator).argsort(-1)
        return torch.where(order < ODD_CHANNELS, value, others)

    def bias(self) -> Tensor:
        signs = torch.randint(0, 2, (1, HEADS, 1, HEAD_DIM), generator=self.generator) * 2 - 1
        return self.odd(8.0, 0.0) * signs


def cases(seed: int = 0) -> Iterator[Case]:
    draw = Draw(seed)
    q, k, v = draw.normal(QUERIES), draw.normal(), draw.normal()
    bias, wide = draw.bias(), draw.odd(8.0, 1.0)
    yield Case("keys Gaussian", q, k, v)
    yield Case("keys biased channels", q, k + bias, v)
    yield Case("keys wide channels", q, k * wide, v)
    yield Case("keys biased and wide", q, k * wide + bias, v)
    yield Case("keys biased, normed, RoPE", q, *_positioned(_normed(k + bias), v))
    yield Case("keys normed, biased, RoPE", q, *_positioned(_normed(k) + bias, v))
    yield Case("keys times 1e4", q / 1e4, k * 1e4, v)  # the queries compensate: this is about number formats alone
    yield Case("keys times 1e-6", q * 1e6, k * 1e-6, v)
    yield Case("values Gaussian", q, k, v)
    yield Case("values biased channels", q, k, v + bias)
    yield Case("values wide channels", q, k, v * wide)
    yield Case("values times 1e4", q, k, v * 1e4)
    yield Case("values times 1e-6", q, k, v * 1e-6)
    for tokens in (1, 5):
        small = Case(
            f"keys of {tokens}, biased", q, (k + bias)[:, :, :tokens], v[:, :, :tokens], _beside(draw, bias, tokens)
        )
        yield small
        yield replace(small, name=f"values of {tokens}")


def _normed(k: Tensor) -> Tensor:
    return k * k.pow(2).mean(-1, keepdim=True).rsqrt()


def _positioned(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys as the transformer stores them, after RoPE: 32 tokens of text, then an image of 16 x 16."""
    kv_block = TextSegment(0, 0, 0, 32), ImageSegment(32, 32, 0, 16, 16)
    rope = torch.cat([rotation(segment, (16, 56, 56), 10000) for segment in kv_block])
    k, v = k[:, :, : len(rope)], v[:, :, : len(rope)]
    return apply_rope(k.transpose(1, 2), rope).transpose(1, 2), v


def _beside(draw: Draw, bias: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    return draw.normal(BESIDE - tokens) + bias, draw.normal(BESIDE - tokens)


def int4(x: Tensor) -> Tensor:
    """x as a 4-bit codec would return it: centred where int8 is, rotated, one scale per 32 channels."""
    mean = x.mean(2, keepdim=True) if x.shape[2] >= CENTRED_FROM else torch.zeros(1)
    qk_norm_rope = _hadamard(x - mean).unflatten(-1, (-1, 32))
    scale = qk_norm_rope.abs().amax(-1, keepdim=True) / 7
    return _hadamard(((qk_norm_rope / scale).round() * scale).flatten(-2)) / HEAD_DIM + mean


def int4_of_half(case: Case) -> float:
    return case.snr_of(int4(case.k), case.v) if case.half == "keys" else case.snr_of(case.k, int4(case.v))


def variants() -> dict[str, Callable[[Case], float]]:
    """Columns of the first table."""

    def column(code: torch.dtype, form: KVPacking) -> Callable[[Case], float]:
        return lambda case: case.snr_of_half(replace(form, code=code))

    codes = {"fp8": FP8, "int8": torch.int8}
    columns = {f"{name} {form}": column(code, FORMS[form]) for name, code in codes.items() for form in FORMS}
    return {**columns, "int4 both": int4_of_half}


def as_shipped() -> dict[str, Callable[[Case], float]]:
    """Columns of the second table."""
    names = [name for name, codec in CODECS.items() if not codec.lossless]
    columns = {name: (lambda case, codec=CODECS[name]: case.snr(codec)) for name in names}
    return {**columns, "int4": lambda case: case.snr_of(int4(case.k), int4(case.v))}


def print_table(title: str, columns: dict[str, Callable[[Case], float]], drawn: list[list[Case]]) -> None:
    print(f"{title}\n\n| dB | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for same in zip(*drawn, strict=True):
        means = [statistics.mean(measure(case) for case in same) for measure in columns.values()]
        print(f"| {same[0].name} | {' | '.join(f'{mean:.1f}' for mean in means)} |")
    print()


def milliseconds(function: Callable[[], object], times: int = 7) -> float:
    function()
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start)
    return 1000 * statistics.median(taken)


def print_costs() -> None:
    tokens = 4096  # a reference of 1024 x 1024
    print("| codec | KiB per token | GiB per 1024x1024 reference | encode, ms | decode, ms |\n|---|---|---|---|---|")
    k, v = Draw(0).normal(1024).bfloat16(), Draw(1).normal(1024).bfloat16()
    for name, codec in CODECS.items():
        total = LAYERS * codec.nbytes(tokens, **RELEASED)
        keys, values = codec.encode(k, v)
        encode = milliseconds(lambda codec=codec: codec.encode(k, v))
        decode = milliseconds(
            lambda codec=codec, keys=keys, values=values: (
                codec.decode_keys(keys, k.dtype),
                codec.decode_values(values, v.dtype),
            )
        )
        print(f"| {name} | {total / tokens / 2**10:.1f} | {total / 2**30:.2f} | {encode:.1f} | {decode:.1f} |")


def main() -> None:
    torch.set_num_threads(1)
    drawn = [list(cases(seed)) for seed in range(SEEDS)]
    print_table("Only the half packed that the row names:", variants(), drawn)
    print_table("Keys and values packed, as the codecs do it:", as_shipped(), drawn)
    print_costs()


if __name__ == "__main__":
    main()

"""How the keys and values of one KV block of a prefix are kept: as they are, or packed into 8 bits until attention.

A KV block is a run of n tokens; one layer of it has rotated keys k and values v, each [1, H, n, D]. Packing is per
token and head: 8-bit codes and one fp32 scale, the row's largest magnitude over the largest code. Two things come
before the rounding, each where it was measured to win (tests/bench/codecs.py):

- centring: the mean of each head and channel over the KV block's tokens is subtracted, and added back in decoding. A
  channel with a bias, as keys have them, then no longer sets the scale of the others.
- rotation (int8 alone): an orthonormal Hadamard transform of the head dimension spreads a wide channel over all. fp8
  has its own exponent per value, so a wide channel costs the others nothing, and spread its error does more harm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config.networks import DiTConfig
from ..errors import UserError

Parts = tuple[Tensor, ...]

FP8 = torch.float8_e4m3fn
FP32, INT64 = torch.float32.itemsize, torch.int64.itemsize
LARGEST = {FP8: 448.0, torch.int8: 127.0}  # of the codes
CENTRED_FROM = 8  # tokens: here the mean costs half of what the codes do, below 5 a KV block would outgrow bf16


@dataclass(frozen=True)
class KVPacking:
    """How one tensor [1, H, n, D] is packed: `code` is the codes' dtype, None for as it is.

    Packed parts are codes [1, H, n, D], scales [1, H, n, 1] fp32 and, where the KV block is centred, its means [1, H,
    1, D] fp32. A NaN or an infinity is not hidden: its row, if centred its whole head, comes back with NaN.
    """

    code: torch.dtype | None = None
    centred: bool = False
    rotated: bool = False

    def encode(self, x: Tensor) -> Parts:
        if self.code is None:
            return (x,)
        x = x.detach().contiguous()  # sums round by memory order: one order, whatever the strides
        if not self._centres(x.shape[2]):
            return self._quantize(x.to(torch.float32, copy=True))
        codes, scales = self._quantize(x - x.mean(2, keepdim=True, dtype=torch.float32))
        # The mean that leaves the KV block without a mean error: attention to many tokens averages the rest away.
        return codes, scales, self._dequantize(codes, scales).sub_(x).mean(2, keepdim=True).neg_()

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        if self.code is None:
            return parts[0].to(dtype)
        x = self._dequantize(*parts)
        if dtype == torch.float16:  # rounding may lift a value of the input's above the largest finite one
            x.clamp_(torch.finfo(dtype).min, torch.finfo(dtype).max)
        return x.to(dtype)

    def nbytes(self, tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of the packed form of [1, heads, tokens, head_dim] of `dtype`."""
        if self.code is None:
            return heads * tokens * head_dim * dtype.itemsize
        means = torch.float32.itemsize * head_dim if self._centres(tokens) else 0
        return heads * (tokens * (head_dim * self.code.itemsize + torch.float32.itemsize) + means)

    @property
    def keeps_tensor(self) -> bool:
        """Whether the packed form is the tensor itself, and decoding gives a view of it."""
        return self.code is None

    def decode_peak(self, tokens: int, heads: int, head_dim: int) -> int:
        """Peak bytes while [1, heads, tokens, head_dim] is decoded to fp32, the result among them: copies
        before and after the scales and, where rotated, the table of the Hadamard transform."""
        if self.keeps_tensor:
            return 0
        copy = heads * tokens * head_dim * FP32
        if not self.rotated:
            return 2 * copy
        entries = (head_dim & -head_dim) ** 2
        return max(2 * copy + (INT64 + FP32) * entries, copy + 3 * INT64 * entries)

    def encode_peak(self, tokens: int, heads: int, head_dim: int) -> int:
        """Peak bytes while [1, heads, tokens, head_dim] is packed: the codes, and copies as in decoding them."""
        if self.keeps_tensor:
            return 0
        values = heads * tokens * head_dim
        copies = self.decode_peak(tokens, heads, head_dim) if self.rotated else values * FP32
        return copies + values * self.code.itemsize

    def _centres(self, tokens: int) -> bool:
        return self.centred and tokens >= CENTRED_FROM

    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """fp32 x [1, H, n, D], which is overwritten -> codes [1, H, n, D] and scales [1, H, n, 1]."""
        if self.rotated:
            x = _hadamard(x)
        scales = torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True).div_(LARGEST[self.code])
        scales.clamp_min_(torch.finfo(torch.float32).tiny)  # rows of zeros; clamping keeps NaN
        x.div_(scales)
        codes = (x if self.code.is_floating_point else x.round_()).to(self.code)
        return codes, scales.div_(_block(x)) if self.rotated else scales

    def _dequantize(self, codes: Tensor, scales: Tensor, means: Tensor | None = None) -> Tensor:
        """fp32 [1, H, n, D]."""
        x = codes.to(torch.float32)
        if self.rotated:
            x = _hadamard(x)  # sums of small integers: exact, with TF32 too
        return x.mul_(scales) if means is None else torch.addcmul(means, x, scales)


def _block(x: Tensor) -> int:
    """Size of the Hadamard blocks of a head dimension: the largest power of two that divides it."""
    return x.shape[-1] & -x.shape[-1]


def _hadamard(x: Tensor) -> Tensor:
    """x [..., D] times the Sylvester matrix of ones and minus ones, whose square is its size times the identity.

    The matrix is made anew each time, in a dozen small kernels: one kept per device would be a cache nobody empties.
    """
    size = _block(x)
    index = torch.arange(size, device=x.device)
    bits = index[:, None] & index
    for shift in (8, 4, 2, 1):
        bits = bits ^ (bits >> shift)  # folds the parity of the bits into the lowest
    signs = (bits & 1).to(torch.float32).mul_(-2).add_(1)
    return (x.unflatten(-1, (-1, size)) @ signs).flatten(-2)


@dataclass(frozen=True)
class Codec:
    """One way of keeping a KV block. Equal k and v give equal bytes; no KV block's decoding depends on another.

    `native` neither copies nor casts; it returns the tensors given, views too. int8 keeps the attention output to
    about 1%, fp8 to 3 to 5%, at the same bytes.
    """

    name: str
    keys: KVPacking
    values: KVPacking

    @property
    def halves(self) -> tuple[KVPacking, KVPacking]:
        """How keys and how values are packed, in the order in which they are."""
        return self.keys, self.values

    @property
    def lossless(self) -> bool:
        return self.keys.code is None and self.values.code is None

    def encode(self, k: Tensor, v: Tensor) -> tuple[Parts, Parts]:
        """k and v [1, H, n, D] of fp32, bf16 or fp16, left unchanged -> the packed tensors of each."""
        return self.keys.encode(k), self.values.encode(v)

    def decode_keys(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """Packed keys -> [1, H, n, D]."""
        return self.keys.decode(parts, dtype)

    def decode_values(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """Packed values -> [1, H, n, D]."""
        return self.values.decode(parts, dtype)

    def encode_peak(self, tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Peak bytes while one layer of a KV block is packed, keys before values, the packed tensors among them."""
        peak = packed = 0
        for half in self.halves:
            if not half.keeps_tensor:
                peak = max(peak, packed + half.encode_peak(tokens, heads, head_dim))
                packed += half.nbytes(tokens, heads, head_dim, dtype)
        return peak

    def nbytes(self, tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of all packed tensors of one layer of one KV block whose k and v are of `dtype`."""
        return sum(half.nbytes(tokens, heads, head_dim, dtype) for half in (self.keys, self.values))


_NATIVE = KVPacking()
_FP8 = KVPacking(FP8, centred=True)
_INT8 = KVPacking(torch.int8, centred=True, rotated=True)

CODECS: Mapping[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec("native", _NATIVE, _NATIVE),
        Codec("fp8", _FP8, _FP8),
        Codec("fp8_v", _NATIVE, _FP8),
        Codec("int8", _INT8, _INT8),
    )
}
NATIVE = CODECS["native"]
FIDELITY = ("native", "int8", "fp8_v", "fp8")  # the most faithful first; source: tests/bench/codecs.py


def kv_block_bytes(config: DiTConfig, tokens: int, dtype: torch.dtype, codec: Codec = NATIVE) -> int:
    """K and V of one KV block, all layers. Native: 2 GiB for a reference of 1024 x 1024 pixels (4096 tokens) in
    bf16."""
    return config.layers * codec.nbytes(tokens, config.heads, config.head_dim, dtype)


def by_preference(places: Sequence[str], names: Sequence[str] = FIDELITY) -> list[tuple[str, str]]:
    """Pairs of a place and a codec's name, the preferred first: the first of `names` in every one of `places`, then the
    others place by place. The one rule of `auto`."""
    return [(place, name) for part in (names[:1], names[1:]) for place in places for name in part]


def fitting_codec(sizes: Mapping[str, int], device: int | None, ram: int) -> str:
    """The codec for a prefix of these bytes by codec, beside `device` bytes of room (None: RAM is all there is).

    Native wherever it fits, the device or half of the available RAM; else the most faithful that does; else the
    smallest.
    """
    rooms = {"device": device, "ram": ram // 2}
    for place, name in by_preference([place for place, room in rooms.items() if room is not None]):
        if sizes[name] <= rooms[place]:
            return name
    return min(FIDELITY, key=lambda name: sizes[name])


def codec_named(name: str) -> Codec:
    """The codec of that name; `UserError` if there is none."""
    if name not in CODECS:
        raise UserError(f"there is no K/V codec {name!r}; choose one of {', '.join(CODECS)}")
    return CODECS[name]

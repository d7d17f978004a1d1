"""Codecs of K and V: a KV block is stored unchanged, or packed into 8 bits until attention reads it.

A KV block covers n tokens; for each layer it stores keys k (after RoPE) and values v, both [1, H, n, D] with H heads of
size D. Packing is per token and head: 8-bit codes and one fp32 scale, the row's largest magnitude divided by the
largest code. Two transforms precede the rounding, each used where it was measured to help (tests/bench/codecs.py):

- centring: the mean of each head and channel over the KV block's tokens is subtracted, and added back in decoding, so
  that a channel with a bias, as keys have them, does not set the scale of the others.
- Hadamard rotation (int8 only): an orthonormal transform of the head dimension spreads a channel of large values over
  all channels. fp8 has an exponent per value, so such a channel costs the others nothing; spreading it adds error.
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
LARGEST = {FP8: 448.0, torch.int8: 127.0}  # largest code of each dtype
CENTRED_FROM = 8  # tokens: the mean then takes half the bytes of the codes; below 5 tokens it would exceed bf16


@dataclass(frozen=True)
class KVPacking:
    """How one tensor [1, H, n, D] is packed: `code` is the codes' dtype, None keeps the tensor unchanged.

    Packed parts are codes [1, H, n, D], scales [1, H, n, 1] fp32 and, where the KV block is centred, its means [1, H,
    1, D] fp32. NaN and infinity stay visible: their row, or their whole head if centred, decodes to NaN.
    """

    code: torch.dtype | None = None
    centred: bool = False
    rotated: bool = False

    def encode(self, x: Tensor) -> Parts:
        if self.code is None:
            return (x,)
        x = x.detach().contiguous()  # sums round by memory order, which must not depend on strides
        if not self._centres(x.shape[2]):
            return self._quantize(x.to(torch.float32, copy=True))
        codes, scales = self._quantize(x - x.mean(2, keepdim=True, dtype=torch.float32))
        # The stored mean cancels the mean error: attention to many tokens averages out the rest.
        return codes, scales, self._dequantize(codes, scales).sub_(x).mean(2, keepdim=True).neg_()

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        if self.code is None:
            return parts[0].to(dtype)
        x = self._dequantize(*parts)
        if dtype == torch.float16:  # rounding may lift a value above the largest finite fp16
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
        """Whether the packed form is the tensor itself, so that decoding returns a view of it."""
        return self.code is None

    def decode_peak(self, tokens: int, heads: int, head_dim: int) -> int:
        """Peak bytes while [1, heads, tokens, head_dim] is decoded to fp32, including the result: copies before and
        after the scales are applied and, where rotated, the matrix of the Hadamard transform."""
        if self.keeps_tensor:
            return 0
        copy = heads * tokens * head_dim * FP32
        if not self.rotated:
            return 2 * copy
        entries = (head_dim & -head_dim) ** 2
        return max(2 * copy + (INT64 + FP32) * entries, copy + 3 * INT64 * entries)

    def encode_peak(self, tokens: int, heads: int, head_dim: int) -> int:
        """Peak bytes while [1, heads, tokens, head_dim] is packed: the codes, and copies as in `decode_peak`."""
        if self.keeps_tensor:
            return 0
        values = heads * tokens * head_dim
        copies = self.decode_peak(tokens, heads, head_dim) if self.rotated else values * FP32
        return copies + values * self.code.itemsize

    def _centres(self, tokens: int) -> bool:
        return self.centred and tokens >= CENTRED_FROM

    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Codes [1, H, n, D] and scales [1, H, n, 1] of fp32 x [1, H, n, D], which is overwritten."""
        if self.rotated:
            x = _hadamard(x)
        scales = torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True).div_(LARGEST[self.code])
        scales.clamp_min_(torch.finfo(torch.float32).tiny)  # no division by zero in rows of zeros; clamping keeps NaN
        x.div_(scales)
        codes = (x if self.code.is_floating_point else x.round_()).to(self.code)
        return codes, scales.div_(_block(x)) if self.rotated else scales

    def _dequantize(self, codes: Tensor, scales: Tensor, means: Tensor | None = None) -> Tensor:
        """fp32 values [1, H, n, D] of the packed parts."""
        x = codes.to(torch.float32)
        if self.rotated:
            x = _hadamard(x)  # sums of small integers are exact, in TF32 too
        return x.mul_(scales) if means is None else torch.addcmul(means, x, scales)


def _block(x: Tensor) -> int:
    """Size of the Hadamard blocks of a head dimension: the largest power of two that divides it."""
    return x.shape[-1] & -x.shape[-1]


def _hadamard(x: Tensor) -> Tensor:
    """x [..., D] times the Sylvester matrix of ones and minus ones, whose square is its size times the identity.

    The matrix is rebuilt at each call by a dozen small kernels, because a copy per device would be a global cache.
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
    """A way to store a KV block. Equal k and v give equal bytes; decoding one KV block depends on no other.

    `native` neither copies nor casts: it returns the given tensors, views included. At the same bytes, int8 changes
    the attention output by about 1%, fp8 by 3 to 5%.
    """

    name: str
    keys: KVPacking
    values: KVPacking

    @property
    def halves(self) -> tuple[KVPacking, KVPacking]:
        """The packing of keys and that of values, in the order in which they are packed."""
        return self.keys, self.values

    @property
    def lossless(self) -> bool:
        return self.keys.code is None and self.values.code is None

    def encode(self, k: Tensor, v: Tensor) -> tuple[Parts, Parts]:
        """The packed tensors of k and of v [1, H, n, D] (fp32, bf16 or fp16), which are left unchanged."""
        return self.keys.encode(k), self.values.encode(v)

    def decode_keys(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """Keys [1, H, n, D] in `dtype` from their packed parts."""
        return self.keys.decode(parts, dtype)

    def decode_values(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """Values [1, H, n, D] in `dtype` from their packed parts."""
        return self.values.decode(parts, dtype)

    def encode_peak(self, tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Peak bytes while one layer of a KV block is packed, keys before values, including the packed tensors."""
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
FIDELITY = ("native", "int8", "fp8_v", "fp8")  # smallest error first; source: tests/bench/codecs.py


def kv_block_bytes(config: DiTConfig, tokens: int, dtype: torch.dtype, codec: Codec = NATIVE) -> int:
    """Bytes of one KV block, all layers: native in bf16, 2 GiB for a reference of 1024 x 1024 pixels (4096 tokens)."""
    return config.layers * codec.nbytes(tokens, config.heads, config.head_dim, dtype)


def by_preference(places: Sequence[str], names: Sequence[str] = FIDELITY) -> list[tuple[str, str]]:
    """Pairs of a place and a codec's name, the preferred first: `names[0]` in each of `places`, then the other names,
    place by place. `auto` always means this order."""
    return [(place, name) for part in (names[:1], names[1:]) for place in places for name in part]


def fitting_codec(sizes: Mapping[str, int], device: int | None, ram: int) -> str:
    """The name of the codec for a prefix that takes `sizes` bytes by codec, with `device` bytes of room on the device
    (None: only RAM counts) and `ram` bytes of available RAM, of which it may take half.

    Native if it fits anywhere; else the codec of the smallest error that fits; else the smallest.
    """
    rooms = {"device": device, "ram": ram // 2}
    for place, name in by_preference([place for place, room in rooms.items() if room is not None]):
        if sizes[name] <= rooms[place]:
            return name
    return min(FIDELITY, key=lambda name: sizes[name])


def codec_named(name: str) -> Codec:
    """The codec `name`; `UserError` if there is none."""
    if name not in CODECS:
        raise UserError(f"there is no K/V codec {name!r}; choose one of {', '.join(CODECS)}")
    return CODECS[name]

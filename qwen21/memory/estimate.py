"""Bytes that a run needs, from sizes alone: exact for weights and prefixes, within a few percent for activations.

Activations are the bytes of live tensors at the fullest moment, beyond inputs, weights and stored prefixes. Each
formula names the moments that can be the fullest, as they follow from the code it describes; the tests compare them
with the tensors alive in real calls. What kernels and the allocator take on top is `ALLOWANCE`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..checkpoint.fp8_policy import Fp8
from ..checkpoint.load import Component
from ..checkpoint.quant_formats import FLOATS
from ..checkpoint.safetensors_file import DTYPE_BYTES
from ..config.networks import DiTConfig, EncoderConfig
from ..models import dit
from ..prefix import NATIVE, Codec, kv_block_bytes
from ..sequence import PrefixLayout
from ..system_memory import available_ram as available_ram
from ..system_memory import total_ram

ALLOWANCE = 1.1  # on activations of the encoder and the transformer; the VAE's is `tiling.WORKSPACE`
FP32 = torch.float32.itemsize


# --- weights and prefixes: exact -----------------------------------------------------------------------------------


def weight_bytes(part: Component, dtype: torch.dtype | None = None, fp8: Fp8 | None = None) -> int:
    """Bytes of a network's weights once loaded in `dtype` (None: as the file has them), block linears by `fp8`."""
    total = 0
    for name, source in part.identity.sources.items():
        layer = name.rpartition(".")[0]
        if layer.endswith("time_conv"):  # in VAE files, for videos; never loaded
            continue
        stored = part.checkpoint.tensors[source.key].dtype
        packing = part.identity.packings.get(source.key)
        if packing is not None:
            total += math.prod(source.shape) * DTYPE_BYTES[stored]
            total += FP32 * (source.shape[0] if packing.per_row else packing.scale is not None)
        elif fp8 is not None and len(source.shape) == 2 and fp8.takes(layer):
            total += math.prod(source.shape) + FP32 * source.shape[0]
        else:
            cast = dtype is not None and stored in FLOATS  # packed ones stay as they are
            total += math.prod(source.shape) * (dtype.itemsize if cast else DTYPE_BYTES[stored])
    return total


def rebuilt_bytes(part: Component, dtype: torch.dtype, fp8: Fp8 | None = None) -> int:
    """Bytes of the largest weight that is rebuilt in `dtype` at each use, because it stays quantized."""
    return max(
        (
            math.prod(source.shape) * dtype.itemsize
            for name, source in part.identity.sources.items()
            if source.key in part.identity.packings
            or (fp8 is not None and len(source.shape) == 2 and fp8.takes(name.rpartition(".")[0]))
        ),
        default=0,
    )


@dataclass(frozen=True)
class Chain:
    """One prefix as it is made: tokens of the KV blocks that an earlier prefix left, and of those that are new."""

    known: tuple[int, ...]
    new: tuple[int, ...]

    @property
    def kv_blocks(self) -> tuple[int, ...]:
        return (*self.known, *self.new)


def chains(layouts: Sequence[PrefixLayout], shared: bool = True) -> list[Chain]:
    """The prefixes of a run in order, such as positive and negative. Equal references at the head are `shared`."""
    made: list[Chain] = []
    for layout in layouts:
        head = max((_common_head(layout, other) for other in layouts[: len(made)]), default=0) if shared else 0
        tokens = layout.kv_block_tokens
        made.append(Chain(tokens[:head], tokens[head:]))
    return made


def _common_head(layout: PrefixLayout, other: PrefixLayout) -> int:
    """KV blocks that two prefixes begin with alike. The last text differs, whatever its length."""
    pairs = zip(layout.kv_blocks[: layout.references], other.kv_blocks[: other.references], strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(layout.references, other.references))


def prefix_bytes(config: DiTConfig, made: Sequence[Chain], dtype: torch.dtype, codec: Codec = NATIVE) -> int:
    """K and V of all prefixes of a run."""
    return sum(kv_block_bytes(config, tokens, dtype, codec) for chain in made for tokens in chain.new)


# --- the transformer's activations ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Reading:
    """One layer of stored KV blocks on its way into attention, in bytes: while it is decoded, then beside what is
    stored as long as it is read, its keys alone, and the next layer, already brought where KV blocks lie in RAM
    (`offloaded`)."""

    peak: int
    left: int
    keys: int
    ahead: int

    @classmethod
    def of(
        cls, config: DiTConfig, kv_blocks: Sequence[int], dtype: torch.dtype, codec: Codec, offloaded: bool
    ) -> _Reading:
        peak = left = keys = brought = 0
        for tokens in kv_blocks:
            decoded = tokens * config.width * dtype.itemsize
            for number, half in enumerate(codec.halves):
                if not half.keeps_tensor:
                    peak = max(peak, left + half.decode_peak(tokens, config.heads, config.head_dim))
                    brought += half.nbytes(tokens, config.heads, config.head_dim, dtype)
                if not half.keeps_tensor or offloaded:  # else a view
                    left += decoded
                    keys += decoded if number == 0 else 0
        layer = sum(codec.nbytes(tokens, config.heads, config.head_dim, dtype) for tokens in kv_blocks)
        return cls(max(peak, left) + (brought if offloaded else 0), left, keys, layer if offloaded else 0)


def _rotating(config: DiTConfig, dtype: torch.dtype) -> int:
    """Bytes per token of a rotation: the product in fp32, and for half dtypes the fp32 copy and the result."""
    product = config.width * FP32
    return product if dtype == torch.float32 else 2 * product + config.width * dtype.itemsize


def _constant(config: DiTConfig, tokens: int, dtype: torch.dtype) -> int:
    """The rotation of `tokens` positions, complex64, and the modulation."""
    return tokens * config.head_dim * FP32 + 5 * config.width * dtype.itemsize


def step_activations(
    config: DiTConfig,
    batch: int,
    tokens: int,
    kv_blocks: Sequence[int],
    dtype: torch.dtype,
    codec: Codec = NATIVE,
    offloaded: bool = False,
    fused: bool = False,
) -> int:
    """Peak of `DiT.denoise` for `batch` targets of `tokens` each, behind a prefix of `kv_blocks` (tokens of each).

    `offloaded`: the prefix lies in RAM beside the device that computes. `fused`: products are, see `fused.py`.
    """
    wide, rows = config.width * dtype.itemsize, batch * tokens
    reading = _Reading.of(config, kv_blocks, dtype, codec, offloaded)
    contiguous = 2 * (sum(kv_blocks) + tokens) * wide if kv_blocks else 0
    moments = (
        # x, its norm, q k v plain (and v alone), rotated q, normed k, and the rotation of k
        rows * ((7 + fused) * wide + _rotating(config, dtype)),
        rows * 4 * wide + reading.peak,  # x, q k v
        # and what each row attended to; several rows are joined in the end
        rows * (5 if batch == 1 else 6) * wide + reading.left + contiguous,
        # x before and after attention, what was attended to, the norm, gate and value (and the output)
        rows * (4 + fused + 2 * config.mlp_ratio) * wide,
    )
    return max(moments) + reading.ahead + _constant(config, tokens, dtype)


def prefill_activations(
    config: DiTConfig,
    made: Sequence[Chain],
    dtype: torch.dtype,
    codec: Codec = NATIVE,
    offloaded: bool = False,
    fused: bool = False,
) -> int:
    """Peak of `DiT.prefill` over all prefixes of a run, beyond what they keep in the end on the device."""
    stored = peak = 0
    for chain in made:
        for i, tokens in enumerate(chain.new):
            kv_block = 0 if offloaded else kv_block_bytes(config, tokens, dtype, codec)
            earlier = (*chain.known, *chain.new[:i])
            full = _kv_block_activations(config, earlier, tokens, dtype, codec, offloaded, fused)
            # the fullest moments come before the last layer is stored
            peak = max(peak, stored + kv_block - kv_block // config.layers + full)
            stored += kv_block
    return max(0, peak - stored)


def _kv_block_activations(
    config: DiTConfig,
    earlier: Sequence[int],
    tokens: int,
    dtype: torch.dtype,
    codec: Codec,
    offloaded: bool,
    fused: bool,
) -> int:
    """Peak of one KV block's prefill behind `earlier` ones, beyond what is stored at that moment."""
    wide = config.width * dtype.itemsize
    chunk = -(-tokens // -(-tokens // dit.PREFILL_CHUNK))  # the last one, which is a largest one
    reading = _Reading.of(config, earlier, dtype, codec, offloaded)
    everything = 2 * (sum(earlier) + tokens) * wide  # keys and values of a layer, joined
    # The first KV block's are what a native codec stores.
    halves = sum(offloaded or not half.keeps_tensor for half in codec.halves)
    unstored = everything if earlier else halves * tokens * wide
    inputs = 2 * tokens * wide  # x, and q of all chunks
    packing = codec.encode_peak(tokens, config.heads, config.head_dim, dtype)
    moments = (
        # the last chunk's projection, beside x and what the other chunks have made
        inputs + (2 * tokens - 3 * chunk) * wide + chunk * ((6 + fused) * wide + _rotating(config, dtype)),
        # x, own queries, keys and values, while those before are decoded, and joined
        2 * inputs + reading.peak,
        2 * inputs + reading.left + everything // 2,  # the keys joined
        inputs + tokens * wide + reading.left - reading.keys + everything,  # and the values, when the keys' pieces left
        inputs + everything + (inputs if earlier else 0) + packing,
        # the last chunk's MLP: what was attended to, x after it, the norm, gate and value (and the output)
        inputs + chunk * (3 + fused + 2 * config.mlp_ratio) * wide + unstored,
    )
    return max(moments) + reading.ahead + _constant(config, tokens, dtype)


def working_bytes(
    config: DiTConfig, batch: int, tokens: int, kv_blocks: Sequence[int], dtype: torch.dtype, fused: bool = False
) -> int:
    """What prefilling a native prefix of `kv_blocks` and stepping behind it need beside weights and prefix, for `batch`
    targets of `tokens` each, with what kernels and the allocator take on top."""
    step = step_activations(config, batch, tokens, kv_blocks, dtype, fused=fused)
    prefill = prefill_activations(config, [Chain((), tuple(kv_blocks))], dtype, fused=fused)
    return int(ALLOWANCE * max(step, prefill))


def store_budget() -> int:
    """Bytes that prefixes may keep between runs: a quarter of the machine's RAM."""
    return total_ram() // 4


# --- the text encoder's activations --------------------------------------------------------------------------------


def reading_activations(config: EncoderConfig, patches: Sequence[int], tokens: int, dtype: torch.dtype) -> int:
    """Peak of `TextEncoder.encode` for `tokens` of input, with `patches` of each reference among them."""
    text, vision, size = config.text, config.vision, dtype.itemsize
    pixels = 3 * vision.patch**2 * FP32  # of a patch, which are repeated for every frame
    kept = (text.width + 2 * text.layers * text.kv_heads * text.head_dim) * size  # of a token of a reference
    features = peak = read = 0
    for count in patches:
        cutting, here = (1 + vision.temporal_patch) * pixels * count, count // vision.merge**2
        peak = max(peak, read * kept + features + max(cutting, count * _vision_values(config, dtype)))
        features += here * (1 + len(vision.deepstack)) * text.width * size
        peak = max(peak, features + (read + here) * kept + _span_values(config, read, here, dtype))
        read += here
    return max(peak, features + read * kept + _span_values(config, read, tokens - read, dtype))


def _span_values(config: EncoderConfig, before: int, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of the language model's activations for some tokens that attend to themselves and to those before them."""
    text, size = config.text, dtype.itemsize
    queries, keys = text.heads * text.head_dim, text.kv_heads * text.head_dim
    attention = tokens * (2 * text.width + 4 * queries + 2 * keys)
    if before:  # keys and values are joined, and repeated for every head
        contiguous = (before + tokens) * (2 * keys + 2 * queries)
        attention = max(attention, tokens * (2 * text.width + queries) + contiguous)
    mlp = tokens * (3 * text.width + 3 * text.mlp_width)
    rope = 2 * text.head_dim * (FP32 + (size if size < FP32 else 0))
    return max(attention, mlp) * size + tokens * rope


def _vision_values(config: EncoderConfig, dtype: torch.dtype) -> int:
    """Bytes per patch of the vision tower."""
    vision, size = config.vision, dtype.itemsize
    pixels = 3 * vision.temporal_patch * vision.patch**2 * (FP32 + (size if size < FP32 else 0))
    mlp = (3 * vision.width + 2 * vision.mlp_width) * size
    attention = 6 * vision.width * size + (6 if size < FP32 else 3) * vision.width * FP32
    rope = 2 * vision.width // vision.heads * FP32
    return pixels + max(mlp, attention) + rope

"""Bytes that a run needs, from sizes alone: exact for weights and prefixes, within a few percent for activations.

Activations are the peak bytes of live tensors besides inputs, weights and stored prefixes. Each formula lists the
moments at which the code it describes can reach its peak; the tests compare it with the tensors alive in real calls.
`ALLOWANCE` covers what kernels and the allocator add.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..checkpoint.container import bytes_of
from ..checkpoint.fp8_policy import Fp8
from ..checkpoint.load import Component, own_dtype
from ..checkpoint.quant_formats import EMBEDDING, FLOATS, stays_packed
from ..config.networks import DiTConfig, EncoderConfig
from ..models import dit
from ..prefix import NATIVE, Codec, kv_block_bytes
from ..sequence import PrefixLayout
from ..system_memory import available_ram as available_ram
from ..system_memory import total_ram

ALLOWANCE = 1.1  # factor on activations of the encoder and the transformer; the VAE's is `vae_tiling.WORKSPACE`
FP32 = torch.float32.itemsize


# --- weights and prefixes: exact -----------------------------------------------------------------------------------


def weight_bytes(part: Component, dtype: torch.dtype | None = None, fp8: Fp8 | None = None) -> int:
    """Bytes of a network's weights loaded in `dtype` (None: the file's), linear layers of blocks as `fp8` says."""
    total = 0
    for name, source in part.identity.sources.items():
        layer = name.rpartition(".")[0]
        if layer.endswith("time_conv"):  # in VAE files, used for videos only; never loaded
            continue
        stored = part.checkpoint.tensors[source.key].dtype
        packing = part.identity.packings.get(source.key)
        if packing is not None and stays_packed(packing, name):
            total += packing.nbytes(source.shape[0] if source.shape else 1)
        elif fp8 is not None and len(source.shape) == 2 and fp8.takes(layer):
            total += math.prod(source.shape) + FP32 * source.shape[0]
        else:
            loaded = own_dtype(part) if dtype is None and packing is not None else dtype  # dequantized while loading
            cast = loaded is not None and (packing is not None or stored in FLOATS)  # other dtypes are not cast
            count = math.prod(source.shape)
            total += count * loaded.itemsize if cast else bytes_of(stored, count)
    return total


def rebuilt_bytes(part: Component, dtype: torch.dtype, fp8: Fp8 | None = None) -> int:
    """Bytes in `dtype` of the largest quantized weight of a linear layer, which each use dequantizes."""
    packings, largest = part.identity.packings, 0
    for name, source in part.identity.sources.items():
        packing = packings.get(source.key)
        stays = packing is not None and stays_packed(packing, name) and not name.endswith(EMBEDDING)
        if stays or (fp8 is not None and len(source.shape) == 2 and fp8.takes(name.rpartition(".")[0])):
            largest = max(largest, math.prod(source.shape) * dtype.itemsize)
    return largest


@dataclass(frozen=True)
class Chain:
    """The KV blocks of one prefix in tokens: those `known` from an earlier prefix, and those that are `new`."""

    known: tuple[int, ...]
    new: tuple[int, ...]

    @property
    def kv_blocks(self) -> tuple[int, ...]:
        return (*self.known, *self.new)


def chains(layouts: Sequence[PrefixLayout], shared: bool = True) -> list[Chain]:
    """A chain for each prefix of a run, in order, such as positive and negative. If `shared`, a prefix reuses the KV
    blocks of equal references at its beginning."""
    made: list[Chain] = []
    for layout in layouts:
        known = max((_common_blocks(layout, other) for other in layouts[: len(made)]), default=0) if shared else 0
        tokens = layout.kv_block_tokens
        made.append(Chain(tokens[:known], tokens[known:]))
    return made


def _common_blocks(layout: PrefixLayout, other: PrefixLayout) -> int:
    """The number of equal KV blocks at the beginning of two prefixes. The text at the end counts as different."""
    pairs = zip(layout.kv_blocks[: layout.references], other.kv_blocks[: other.references], strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(layout.references, other.references))


def prefix_bytes(config: DiTConfig, made: Sequence[Chain], dtype: torch.dtype, codec: Codec = NATIVE) -> int:
    """Bytes of K and V of all prefixes of a run."""
    return sum(kv_block_bytes(config, tokens, dtype, codec) for chain in made for tokens in chain.new)


# --- the transformer's activations ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Reading:
    """Bytes of one layer of stored KV blocks that attention reads: `peak` while it is decoded, `left` afterwards
    besides what is stored, `keys` of that for keys, and `ahead` for the next layer, fetched early if offloaded."""

    peak: int
    left: int
    keys: int
    ahead: int

    @classmethod
    def of(
        cls, config: DiTConfig, kv_blocks: Sequence[int], dtype: torch.dtype, codec: Codec, offloaded: bool
    ) -> _Reading:
        peak = left = keys = packed = 0
        for tokens in kv_blocks:
            decoded = tokens * config.width * dtype.itemsize
            for number, half in enumerate(codec.halves):
                if not half.keeps_tensor:
                    peak = max(peak, left + half.decode_peak(tokens, config.heads, config.head_dim))
                    packed += half.nbytes(tokens, config.heads, config.head_dim, dtype)
                if not half.keeps_tensor or offloaded:  # else a view of what is stored
                    left += decoded
                    keys += decoded if number == 0 else 0
        layer = sum(codec.nbytes(tokens, config.heads, config.head_dim, dtype) for tokens in kv_blocks)
        return cls(max(peak, left) + (packed if offloaded else 0), left, keys, layer if offloaded else 0)


def _rotating(config: DiTConfig, dtype: torch.dtype) -> int:
    """Bytes per token of applying RoPE: the product in fp32, and for half dtypes the fp32 copy and the result."""
    product = config.width * FP32
    return product if dtype == torch.float32 else 2 * product + config.width * dtype.itemsize


def _constant(config: DiTConfig, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of RoPE for `tokens` positions, complex64, and of the modulation."""
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
    """Peak bytes of `DiT.denoise` for `batch` targets of `tokens` each, behind a prefix of `kv_blocks` (in tokens).

    `offloaded`: the prefix is in RAM while a GPU computes. `fused`: linear layers are fused, see `ops/fused_linear.py`.
    """
    wide, rows = config.width * dtype.itemsize, batch * tokens
    reading = _Reading.of(config, kv_blocks, dtype, codec, offloaded)
    contiguous = 2 * (sum(kv_blocks) + tokens) * wide if kv_blocks else 0
    moments = (
        # x, its norm, q k v without RoPE (and a copy of v if fused), q with RoPE, normed k, and RoPE of k
        rows * ((7 + fused) * wide + _rotating(config, dtype)),
        rows * 4 * wide + reading.peak,  # x, q k v
        # x, q k v, and each row's attention result; the results of several rows are concatenated in the end
        rows * (5 if batch == 1 else 6) * wide + reading.left + contiguous,
        # x before and after attention, the attention result, the norm, gate and value (and their fused output)
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
    """Peak bytes of `DiT.prefill` over all prefixes of a run, beyond what they finally store on the device."""
    stored = peak = 0
    for chain in made:
        for i, tokens in enumerate(chain.new):
            kv_block = 0 if offloaded else kv_block_bytes(config, tokens, dtype, codec)
            earlier = (*chain.known, *chain.new[:i])
            full = _kv_block_activations(config, earlier, tokens, dtype, codec, offloaded, fused)
            # the peak comes before the last layer is stored
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
    """Peak bytes of prefilling one KV block of `tokens` behind `earlier` ones, beyond what is stored at that moment."""
    wide = config.width * dtype.itemsize
    chunk = -(-tokens // -(-tokens // dit.PREFILL_CHUNK))  # the last chunk, which is one of the largest
    reading = _Reading.of(config, earlier, dtype, codec, offloaded)
    everything = 2 * (sum(earlier) + tokens) * wide  # keys and values of a layer, concatenated
    # A native codec stores the first KV block's keys and values themselves.
    halves = sum(offloaded or not half.keeps_tensor for half in codec.halves)
    unstored = everything if earlier else halves * tokens * wide
    inputs = 2 * tokens * wide  # x, and q of all chunks
    packing = codec.encode_peak(tokens, config.heads, config.head_dim, dtype)
    moments = (
        # the last chunk's q, k and v, beside x and the results of the other chunks
        inputs + (2 * tokens - 3 * chunk) * wide + chunk * ((6 + fused) * wide + _rotating(config, dtype)),
        # x, the block's own q, k and v, while those of earlier blocks are decoded and concatenated
        2 * inputs + reading.peak,
        2 * inputs + reading.left + everything // 2,  # the keys concatenated
        inputs + tokens * wide + reading.left - reading.keys + everything,  # the values too, the keys' parts freed
        inputs + everything + (inputs if earlier else 0) + packing,
        # the last chunk's MLP: the attention result, x after it, the norm, gate and value (and their fused output)
        inputs + chunk * (3 + fused + 2 * config.mlp_ratio) * wide + unstored,
    )
    return max(moments) + reading.ahead + _constant(config, tokens, dtype)


def working_bytes(
    config: DiTConfig, batch: int, tokens: int, kv_blocks: Sequence[int], dtype: torch.dtype, fused: bool = False
) -> int:
    """Bytes that prefill and denoising need beside weights and prefix, with a native prefix of `kv_blocks` and `batch`
    targets of `tokens` each, including what kernels and the allocator add."""
    step = step_activations(config, batch, tokens, kv_blocks, dtype, fused=fused)
    prefill = prefill_activations(config, [Chain((), tuple(kv_blocks))], dtype, fused=fused)
    return int(ALLOWANCE * max(step, prefill))


def store_budget() -> int:
    """Bytes that stored prefixes may take between runs: a quarter of the machine's RAM."""
    return total_ram() // 4


# --- the text encoder's activations --------------------------------------------------------------------------------


def reading_activations(config: EncoderConfig, patches: Sequence[int], tokens: int, dtype: torch.dtype) -> int:
    """Peak bytes of `TextEncoder.encode` for an input of `tokens`; `patches`: vision patches of each reference."""
    text, vision, size = config.text, config.vision, dtype.itemsize
    pixels = 3 * vision.patch**2 * FP32  # bytes of a patch before it is repeated for every frame
    kept = (
        text.width + 2 * text.layers * text.kv_heads * text.head_dim
    ) * size  # kept bytes of each token of a reference
    features = peak = read = 0
    for count in patches:
        cutting, here = (1 + vision.temporal_patch) * pixels * count, count // vision.merge**2
        peak = max(peak, read * kept + features + max(cutting, count * _vision_values(config, dtype)))
        features += here * (1 + len(vision.deepstack)) * text.width * size
        peak = max(peak, features + (read + here) * kept + _span_values(config, read, here, dtype))
        read += here
    return max(peak, features + read * kept + _span_values(config, read, tokens - read, dtype))


def _span_values(config: EncoderConfig, before: int, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of the language model's activations for `tokens` that attend to themselves and to `before` earlier ones."""
    text, size = config.text, dtype.itemsize
    queries, keys = text.heads * text.head_dim, text.kv_heads * text.head_dim
    attention = tokens * (2 * text.width + 4 * queries + 2 * keys)
    if before:  # keys and values are concatenated, and repeated for every head
        contiguous = (before + tokens) * (2 * keys + 2 * queries)
        attention = max(attention, tokens * (2 * text.width + queries) + contiguous)
    mlp = tokens * (3 * text.width + 3 * text.mlp_width)
    rope = 2 * text.head_dim * (FP32 + (size if size < FP32 else 0))
    return max(attention, mlp) * size + tokens * rope


def _vision_values(config: EncoderConfig, dtype: torch.dtype) -> int:
    """Bytes of the vision tower's activations per patch."""
    vision, size = config.vision, dtype.itemsize
    pixels = 3 * vision.temporal_patch * vision.patch**2 * (FP32 + (size if size < FP32 else 0))
    mlp = (3 * vision.width + 2 * vision.mlp_width) * size
    attention = 6 * vision.width * size + (6 if size < FP32 else 3) * vision.width * FP32
    rope = 2 * vision.width // vision.heads * FP32
    return pixels + max(mlp, attention) + rope

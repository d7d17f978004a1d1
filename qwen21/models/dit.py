"""The diffusion transformer: `prefill` for text and references at t = 0, `denoise` for the target at every step.

No state of the prefix depends on sigma or on the target, so prefix and target never run in one pass. Parameter names
are those of the released diffusers checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config.networks import DiTConfig
from ..errors import UserError
from ..ops import backend, linear
from ..ops.attention import AttentionFunction, prefixed_attention, segment_attention
from ..ops.fused_linear import fused
from ..ops.pointwise import Kernels
from ..ops.rope import rotation
from ..prefix import NATIVE, Codec, ContiguousKV, KVBlock, LayerReader, Prefix
from ..sequence import PrefixLayout, Segment, TextSegment, prefix_layout
from .dit_block import Block, Modulation

TIME_FREQUENCIES = 128
# Prefix tokens whose activations are alive at once. A reference of 1024 x 1024 pixels (4096 tokens) and its text fit
# into one chunk, which takes as much memory as the denoising step of a picture of that size.
PREFILL_CHUNK = 4608

Control = Callable[[int, Tensor], Tensor]  # layer index and output [B, N, width] -> input of the next layer


class ZeroCentredRMSNorm(nn.Module):
    """RMS norm in fp32 whose stored weight is the scale minus one. Its weight, the only parameter outside the injected
    layers, is cast at each use."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype | None, device: torch.device | str | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, dtype=dtype, device=device))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.to(x.device, torch.float32) + 1
        return F.rms_norm(x.float(), scale.shape, scale, self.eps).to(x.dtype)


class TextProjection(nn.Module):
    def __init__(self, config: DiTConfig, operations: ModuleType, **kw) -> None:
        super().__init__()
        self.text_norm = ZeroCentredRMSNorm(config.text_width, config.eps, **kw)
        self.in_layer = operations.Linear(config.text_width, config.width, bias=False, **kw)
        self.out_layer = operations.Linear(config.width, config.width, bias=False, **kw)

    def forward(self, states: Tensor) -> Tensor:
        return self.out_layer(F.gelu(self.in_layer(self.text_norm(states)), approximate="tanh"))


class TimestepEmbedder(nn.Module):
    def __init__(self, width: int, operations: ModuleType, **kw) -> None:
        super().__init__()
        self.linear_1 = operations.Linear(2 * TIME_FREQUENCIES, width, bias=False, **kw)
        self.linear_2 = operations.Linear(width, width, bias=False, **kw)

    def forward(self, sigma: Tensor, dtype: torch.dtype) -> Tensor:
        """Embedding [1, width] of sigma [], or [n, width] of sigma [n].

        t is rounded to the compute dtype and back exactly as in the released pipeline: one ulp of sigma changes
        latents by 1e-4.
        """
        t = ((sigma.float() * 1000).to(dtype) / 1000).float()
        steps = torch.arange(TIME_FREQUENCIES, dtype=torch.float32, device=sigma.device)
        frequencies = torch.exp(-math.log(10000) * steps / TIME_FREQUENCIES)
        angles = (1000.0 * t).view(-1, 1) * frequencies
        waves = torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)
        return self.linear_2(F.silu(self.linear_1(waves)))


class DiT(nn.Module):
    """Qwen-Image 2.1's transformer. Computes in the dtype of its inputs.

    `operations` is the namespace of the layers' classes (`Linear`, `RMSNorm`), `attend` the attention function, and
    `kernels` compute what lies between the matrix products. The last two are those of `default_backend` unless given.
    """

    def __init__(
        self,
        config: DiTConfig = DiTConfig(),
        *,
        operations: ModuleType = linear,
        attend: AttentionFunction | None = None,
        kernels: Kernels | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        kw = {"dtype": dtype, "device": device}
        self.config = config
        default = backend.default_backend()
        self.attend = attend or default.attend
        self.kernels = kernels or default.kernels
        self.img_in = operations.Linear(config.in_channels, config.width, bias=False, **kw)
        self.txt_in = TextProjection(config, operations, **kw)
        self.time_text_embed = nn.ModuleDict({"timestep_embedder": TimestepEmbedder(config.width, operations, **kw)})
        self.modulation = nn.Sequential(nn.SiLU(), operations.Linear(config.width, 4 * config.width, bias=False, **kw))
        self.transformer_blocks = nn.ModuleList([Block(config, operations, **kw) for _ in range(config.layers)])
        self.norm_out = nn.ModuleDict({"linear": operations.Linear(config.width, config.width, bias=False, **kw)})
        self.proj_out = operations.Linear(config.width, config.out_channels, bias=False, **kw)

    def prefill(
        self,
        text: Tensor,
        references: Sequence[Tensor] = (),
        slots: Sequence[int] = (),
        *,
        cached: Sequence[KVBlock] = (),
        codec: Codec = NATIVE,
        storage: torch.device | str | None = None,
        attend: AttentionFunction | None = None,
        check_cancel: Callable[[], None] = lambda: None,
    ) -> Prefix:
        """K and V of a prefix at t = 0, packed by `codec` on the device `storage` (default: that of the text states).

        text [T, text_width] are the encoder's states, references [C, h, w] normalised latents, and slots the number of
        text tokens before each reference. The layout's KV blocks run one after another, all layers of one before the
        next: none depends on what follows it, and each reads the earlier ones as they are stored. So `cached`, the
        first KV blocks from an earlier prefill of the same inputs, are reused, and the result is bit-equal either way.
        Raises `UserError` where widths, channels or slots do not match.
        """
        layout = self.layout_of(text, references, slots)
        storage = text.device if storage is None else torch.device(storage)
        prefix = Prefix(layout, cached)
        missing = layout.kv_blocks[len(cached) :]
        if not missing:
            return prefix
        _, modulation = self.modulate(torch.zeros((), device=text.device), text.dtype)
        for segments in missing:
            started = seconds(text.device)
            x = torch.cat([self.embed(segment, text, references) for segment in segments], dim=1)  # [1, S, width]
            kv_block = KVBlock(x.shape[1], codec)
            before = LayerReader(prefix.kv_blocks, x.device, x.dtype)
            self._prefill_kv_block(
                kv_block, before, segments, x, modulation, storage, attend or self.attend, check_cancel
            )
            kv_block.synchronize()
            kv_block.seconds = seconds(text.device) - started
            prefix.kv_blocks.append(kv_block)
        return prefix

    def denoise(
        self,
        target: Tensor,
        sigma: Tensor | float,
        prefix: Prefix,
        *,
        contiguous: ContiguousKV | None = None,
        control: Control | None = None,
        attend: AttentionFunction | None = None,
    ) -> Tensor:
        """Velocity [B, C, h, w] of target [B, C, h, w] (normalised latents) at noise level `sigma`, behind `prefix`;
        `contiguous` is that prefix laid out for targets of this size.

        `control` is called after each block with its index and output [B, N, width] and returns the next block's
        input: a control network adds its residuals there.
        """
        attend = attend or self.attend
        grid = target.shape[-2:]
        segment = prefix.layout.target(tuple(grid))
        rope = self.rotation(segment, target.device)
        sigma = torch.as_tensor(sigma, dtype=torch.float32, device=target.device)
        embedding, modulation = self.modulate(sigma, target.dtype)
        read = LayerReader(prefix.kv_blocks, target.device, target.dtype) if contiguous is None else None
        x = self.img_in(target.flatten(2).transpose(1, 2))  # [B, C, h, w] -> [B, N, width]
        for layer, block in enumerate(self.transformer_blocks):
            q, k, v = block.qkv(x, modulation, rope, self.kernels)  # each [B, H, N, D]
            attended = prefixed_attention(
                q, k, v, read(layer) if read else (), contiguous and contiguous[layer], attend
            )
            del q, k, v  # freed before the MLP allocates its activations
            x = block.attn_out_mlp(x, attended, modulation, self.kernels)
            del attended
            if control is not None:
                x = control(layer, x)
        scale = 1 + self.norm_out["linear"](F.silu(embedding))[0]
        velocity = self.proj_out(self.kernels.norm(x, scale, self.config.eps))
        return velocity.transpose(1, 2).unflatten(2, grid)  # [B, N, C] -> [B, C, h, w]

    def _prefill_kv_block(
        self,
        kv_block: KVBlock,
        before: LayerReader,
        segments: Sequence[Segment],
        x: Tensor,
        modulation: Modulation,
        storage: torch.device,
        attend: AttentionFunction,
        check_cancel: Callable[[], None],
    ) -> None:
        """Run every layer on x [1, S, width], the tokens of one KV block, and store K and V in `kv_block`. Linear
        layers run chunk by chunk, attention segment by segment; `before` reads the earlier KV blocks."""
        rope = torch.cat([self.rotation(segment, x.device) for segment in segments])  # [S, ...]
        start, last = segments[0].offset, len(self.transformer_blocks) - 1
        chunks = _even_spans(x.shape[1], PREFILL_CHUNK)
        for layer, block in enumerate(self.transformer_blocks):
            check_cancel()
            # K and V of everything up to this KV block's end: what earlier blocks stored, then this block's own.
            earlier = before(layer) if start else []
            keys = [k for k, _ in earlier]  # each [1, H, n, D]
            values = [v for _, v in earlier]
            queries = []
            for chunk in chunks:
                q, k, v = block.qkv(x[:, chunk], modulation, rope[chunk], self.kernels)  # each [1, H, chunk, D]
                queries.append(q)
                keys.append(k)
                values.append(v)
            del earlier, q, k, v
            keys = torch.cat(keys, dim=2)  # [1, H, start + S, D]
            values = torch.cat(values, dim=2)
            kv_block.append(_own(keys, start), _own(values, start), storage, last + 1)
            if layer == last:  # nothing reads the last block's output: a prefix consists of keys and values only
                return
            for chunk, q in zip(chunks, queries, strict=True):
                attended = []
                for first, stop, seen, causal in _pieces(segments, chunk, start):
                    rows = slice(first - start - chunk.start, stop - start - chunk.start)  # of this chunk
                    seen_keys, seen_values = keys[:, :, :seen], values[:, :, :seen]
                    attended.append(
                        segment_attention(q[:, :, rows], seen_keys, seen_values, causal=causal, attend=attend)
                    )
                attended = torch.cat(attended, dim=2)  # [1, H, chunk, D]
                x[:, chunk] = block.attn_out_mlp(x[:, chunk], attended, modulation, self.kernels)
            # Freed before the next layer allocates its K and V.
            del queries, keys, values, q, attended, seen_keys, seen_values

    def embed(self, segment: Segment, text: Tensor, references: Sequence[Tensor]) -> Tensor:
        """Embedded tokens [1, n, width] of a prefix segment."""
        if isinstance(segment, TextSegment):
            return self.txt_in(text[None, segment.states])
        return self.img_in(references[segment.index].to(text).flatten(1).T[None])

    def rotation(self, segment: Segment, device: torch.device) -> Tensor:
        """RoPE of a segment's S tokens, [S, ...] in the form that the kernels take."""
        return self.kernels.rotation(rotation(segment, self.config.rope_axes, self.config.rope_base, device))

    def modulate(self, sigma: Tensor, dtype: torch.dtype) -> tuple[Tensor, Modulation]:
        """Time embedding [1, width] and modulation of all blocks at sigma []."""
        embedding = self.time_text_embed["timestep_embedder"](sigma, dtype)
        scale1, gate1, scale2, gate2 = self.modulation(embedding)[0].chunk(4)
        return embedding, Modulation(1 + scale1, gate1.tanh(), 1 + scale2, gate2.tanh())

    @property
    def multiplies_fp8(self) -> bool:
        """Whether linear layers of blocks take their input in FP8."""
        parts = (part for block in self.transformer_blocks for part in (block.attn, block.img_mlp))
        return any(part.takes_fp8 or part.fused_out is not None for part in parts)

    def layout_of(self, text: Tensor, references: Sequence[Tensor], slots: Sequence[int]) -> PrefixLayout:
        """The layout of a prefix; see `prefill`. Raises `UserError` where widths, channels or slots do not match."""
        if text.ndim != 2 or text.shape[1] != self.config.text_width:
            raise UserError(
                f"the text states have shape {list(text.shape)}, this transformer reads [tokens, "
                f"{self.config.text_width}]; use the encoder that belongs to it (Qwen3-VL-8B for the released model)"
            )
        for i, reference in enumerate(references, 1):
            if reference.ndim != 3 or reference.shape[0] != self.config.in_channels:
                raise UserError(
                    f"reference {i} has latent shape {list(reference.shape)}, expected "
                    f"[{self.config.in_channels}, height, width]; encode it with the Qwen-Image 2.1 VAE"
                )
        return prefix_layout(len(text), slots, [tuple(reference.shape[-2:]) for reference in references])


def fuse(dit: DiT, fp8: bool | None = None) -> int:
    """Fuse linear layers of every block that read the same input; returns the number of fused products.

    Weights must not be moved or cast afterwards: the layers' weights would no longer be views of the fused ones. LoRAs
    must be applied before; their layers are left alone. `fp8` says whether the device multiplies in FP8; None tries it.
    """
    fused_layers = 0
    for block in dit.transformer_blocks:
        attention, mlp = block.attn, block.img_mlp
        dtype = attention.norm_q.weight.dtype
        attention.fused = fused([attention.to_q, attention.to_k, attention.to_v], dtype, fp8)
        mlp.fused = fused([mlp.gate_layer, mlp.proj], dtype, fp8)
        fused_layers += sum(part.fused is not None for part in (attention, mlp))
        for part, layer in ((attention, attention.to_out[0]), (mlp, mlp.out)):
            fused_out = fused([layer], dtype, fp8)
            part.fused_out = fused_out if fused_out is not None and fused_out.fp8 else None
    return fused_layers


def _even_spans(tokens: int, limit: int) -> list[slice]:
    """The fewest spans of at most `limit` tokens, of nearly equal size: they depend on the number of tokens only."""
    count = -(-tokens // limit)
    return [slice(tokens * i // count, tokens * (i + 1) // count) for i in range(count)]


def _pieces(segments: Sequence[Segment], chunk: slice, offset: int) -> Iterator[tuple[int, int, int, bool]]:
    """The parts of `segments` within `chunk`: start and stop token, the number of keys seen, and whether it is causal.

    Tokens are counted from the start of the sequence, `chunk` from `offset`.
    """
    for segment in segments:
        first, stop = max(segment.offset, offset + chunk.start), min(segment.stop, offset + chunk.stop)
        if first < stop:
            causal = isinstance(segment, TextSegment)
            yield first, stop, stop if causal else segment.stop, causal


def _own(concatenated: Tensor, start: int) -> Tensor:
    """The tokens of `concatenated` from `start`, copied: a view would keep those before them in memory."""
    return concatenated[:, :, start:].clone() if start else concatenated


def seconds(device: torch.device) -> float:
    """The time in seconds, once the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()

"""Pointwise kernels: what the transformer's blocks compute between matrix products, ideally in one pass over memory.

`Kernels` runs PyTorch's own operations one after another. `CompiledKernels` compiles each kernel once, for all blocks,
sizes, prompts and seeds. They hold no weight of a linear layer, so they also work with patched, quantized and offloaded
weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config.networks import DiTConfig
from ..errors import UserError, first_line
from .formats.fp8 import Fp8Rows, quantize_activations, quantize_rows
from .rope import apply_rope

FP16_MAX = 65504
FEWEST_ROWS = 2  # a kernel compiled for a dynamic number of rows does not support a single row


class Kernels:
    """Kernels of PyTorch's own operations. With `fp8`, a kernel's result is quantized by token."""

    name = "eager"
    ready = True

    def prepare(self, config: DiTConfig, dtype: torch.dtype, device: torch.device, *, fp8: bool = False) -> None:
        """Do once what must precede a transformer of these sizes; `fp8` says whether its products are in FP8."""

    def quantized(self, x: Tensor) -> Fp8Rows:
        """x [..., width] quantized to E4M3 by token."""
        return Fp8Rows(*quantize_activations(x.reshape(-1, x.shape[-1])), x.shape, x.dtype)

    def norm(self, x: Tensor, scale: Tensor, eps: float, *, fp8: bool = False) -> Tensor | Fp8Rows:
        """LayerNorm of x [..., width] without a bias, times scale [width]."""
        normed = F.layer_norm(x, x.shape[-1:], scale, eps=eps)
        return self.quantized(normed) if fp8 else normed

    def residual(self, x: Tensor, gate: Tensor, update: Tensor) -> Tensor:
        """x + gate * update, clipped to the finite range in fp16."""
        x = torch.addcmul(x, gate, update)
        return x.clip(-FP16_MAX, FP16_MAX) if x.dtype == torch.float16 else x

    def residual_norm(
        self, x: Tensor, gate: Tensor, update: Tensor, scale: Tensor, eps: float, *, fp8: bool = False
    ) -> tuple[Tensor, Tensor | Fp8Rows]:
        """The result of `residual`, and the `norm` of that result."""
        x = self.residual(x, gate, update)
        return x, self.norm(x, scale, eps, fp8=fp8)

    def silu_mul(self, gate: Tensor, value: Tensor, *, fp8: bool = False) -> Tensor | Fp8Rows:
        """silu(gate) * value, written to `gate` unless it needs a gradient."""
        copies = needs_gradient(gate)  # else in place, because these are the largest activations
        silu_mul = F.silu(gate) * value if copies else F.silu(gate, inplace=True).mul_(value)
        return self.quantized(silu_mul) if fp8 else silu_mul

    def rotation(self, rope: Tensor) -> Tensor:
        """`rope` [S, D / 2] (unit complex numbers) in the form that `qk_norm_rope` takes, one row per token."""
        return rope

    def qk_norm_rope(self, x: Tensor, norm: Callable[[Tensor], Tensor], rope: Tensor) -> Tensor:
        """RMS norm of x [B, S, H, D] by head, then RoPE by `rope`, which `rotation` returned."""
        return apply_rope(norm(x), rope)


EAGER = Kernels()


class CompiledKernels(Kernels):
    """Compiled kernels. Each is compiled once, by `prepare` or at its first use, and serves all sizes.

    On a CPU RoPE stays PyTorch's, whose complex product is several times faster than compiled real pairs.
    """

    name = "compiled"

    def __init__(self) -> None:
        self._norm = _compiled(EAGER.norm)
        self._residual = _compiled(EAGER.residual)
        self._residual_norm = _compiled(EAGER.residual_norm)
        self._silu_mul = _compiled(_silu_mul)
        self._quantized = _compiled(quantize_rows)
        self._norm_fp8 = _compiled(_norm_fp8)
        self._residual_norm_fp8 = _compiled(_residual_norm_fp8)
        self._silu_mul_fp8 = _compiled(_silu_mul_fp8)
        self._norm_rope = _compiled(_norm_rope)
        self._rope_pairs = _compiled(_rope_pairs)
        self.seconds: float | None = None  # time that compiling took

    @property
    def ready(self) -> bool:
        return self.seconds is not None

    def prepare(self, config: DiTConfig, dtype: torch.dtype, device: torch.device, *, fp8: bool = False) -> None:
        """Compile all kernels. Raises `UserError` where `torch.compile` does not work."""
        started = time.perf_counter()
        kw = {"dtype": dtype, "device": device}
        x, scale = torch.zeros(1, 16, config.width, **kw), torch.ones(config.width, **kw)
        gate = torch.zeros(1, 16, config.mlp_width, **kw)
        heads = x.unflatten(-1, (-1, config.head_dim))
        rope = torch.ones(16, config.head_dim // 2, dtype=torch.complex64, device=device)
        try:
            for quantizes in (False, True) if fp8 else (False,):
                self.norm(x, scale, config.eps, fp8=quantizes)
                self.residual_norm(x, scale, x, scale, config.eps, fp8=quantizes)
                self.silu_mul(gate, gate.clone(), fp8=quantizes)
            if fp8:
                self.quantized(x)
            self.residual(x, scale, x)
            norm = nn.RMSNorm(config.head_dim, eps=config.eps, **kw)
            self.qk_norm_rope(heads, norm, rope)
            self.qk_norm_rope(heads, norm.forward, rope)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # compilers fail in many ways
            raise UserError(
                f"torch.compile does not work here ({first_line(error)}); run without it, or install a C++ compiler "
                "(on Debian g++) and for a GPU Triton"
            ) from error
        self.seconds = time.perf_counter() - started

    def quantized(self, x: Tensor) -> Fp8Rows:
        if _plain(x):
            return super().quantized(x)
        return Fp8Rows(*self._quantized(_rows(x)), x.shape, x.dtype)

    def norm(self, x: Tensor, scale: Tensor, eps: float, *, fp8: bool = False) -> Tensor | Fp8Rows:
        if _plain(x):
            return super().norm(x, scale, eps, fp8=fp8)
        if fp8:
            return Fp8Rows(*self._norm_fp8(_rows(x), scale, eps), x.shape, x.dtype)
        return self._norm(_rows(x), scale, eps).view(x.shape)

    def residual(self, x: Tensor, gate: Tensor, update: Tensor) -> Tensor:
        if _plain(x):
            return super().residual(x, gate, update)
        return self._residual(_rows(x), gate, _rows(update)).view(x.shape)

    def residual_norm(
        self, x: Tensor, gate: Tensor, update: Tensor, scale: Tensor, eps: float, *, fp8: bool = False
    ) -> tuple[Tensor, Tensor | Fp8Rows]:
        if _plain(x):
            return super().residual_norm(x, gate, update, scale, eps, fp8=fp8)
        given = (_rows(x), gate, _rows(update), scale, eps)
        if fp8:
            after, codes, scales = self._residual_norm_fp8(*given)
            return after.view(x.shape), Fp8Rows(codes, scales, x.shape, x.dtype)
        after, normed = self._residual_norm(*given)
        return after.view(x.shape), normed.view(x.shape)

    def silu_mul(self, gate: Tensor, value: Tensor, *, fp8: bool = False) -> Tensor | Fp8Rows:
        if _plain(gate):
            return super().silu_mul(gate, value, fp8=fp8)
        rows = _rows(gate)
        if fp8:
            return Fp8Rows(*self._silu_mul_fp8(rows, _rows(value)), gate.shape, gate.dtype)
        self._silu_mul(rows, _rows(value))
        return rows.view(gate.shape)

    def qk_norm_rope(self, x: Tensor, norm: Callable[[Tensor], Tensor], rope: Tensor) -> Tensor:
        return (
            super().qk_norm_rope(x, norm, rope) if x.device.type == "cpu" or _plain(x) else self.in_pairs(x, norm, rope)
        )

    def in_pairs(self, x: Tensor, norm: Callable[[Tensor], Tensor], rope: Tensor) -> Tensor:
        """`qk_norm_rope` in real numbers. PyTorch's own norm is part of the compiled kernel; a host's norm, whose
        weight may be elsewhere, is called before it."""
        pairs = _any_rows(torch.view_as_real(rope).repeat(len(x), 1, 1))
        if type(norm) is nn.RMSNorm:
            qk_norm_rope = self._norm_rope(_any_rows(x.flatten(0, 1)), norm.weight, pairs, norm.eps)
        else:
            qk_norm_rope = self._rope_pairs(_any_rows(norm(x).flatten(0, 1)), pairs)
        return qk_norm_rope.view(x.shape)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled, without `fullgraph`: a process that uses more widths and dtypes than PyTorch keeps compiled
    versions of then runs uncompiled, where `fullgraph` would raise an error."""
    return torch.compile(function)


def _plain(x: Tensor) -> bool:
    """Whether x must be left to PyTorch's own operations: too few rows, or a gradient is needed."""
    return x.shape[:-1].numel() < FEWEST_ROWS or needs_gradient(x)


def needs_gradient(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


def _rows(x: Tensor) -> Tensor:
    """x [..., width] as [rows, width], any number of rows to the compiler."""
    return _any_rows(x.reshape(-1, x.shape[-1]))


def _any_rows(x: Tensor) -> Tensor:
    """x, its first axis marked as of dynamic length for the compiler."""
    torch._dynamo.mark_dynamic(x, 0)
    return x


def _silu_mul(gate: Tensor, value: Tensor) -> None:
    gate.copy_(F.silu(gate) * value)


def _norm_fp8(x: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return quantize_rows(EAGER.norm(x, scale, eps))


def _residual_norm_fp8(
    x: Tensor, gate: Tensor, update: Tensor, scale: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    x, normed = EAGER.residual_norm(x, gate, update, scale, eps)
    return x, *quantize_rows(normed)


def _silu_mul_fp8(gate: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return quantize_rows(F.silu(gate) * value)


def _norm_rope(x: Tensor, weight: Tensor, pairs: Tensor, eps: float) -> Tensor:
    """RMS norm of x [rows, H, D] by head, then RoPE by `pairs` [rows, D / 2, 2] of cosine and sine."""
    return _rope_pairs(F.rms_norm(x.float(), weight.shape, weight.float(), eps), pairs).to(x.dtype)


def _rope_pairs(x: Tensor, pairs: Tensor) -> Tensor:
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = pairs[:, None].unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).to(x.dtype)

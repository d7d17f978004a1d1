"""What the transformer's blocks do between their matrix products, each ideally one pass over memory.

`Kernels` runs PyTorch's own operations one after another. `CompiledKernels` has each compiled once, for all blocks,
sizes, prompts and seeds: no weight of a linear layer is part of them, so they serve patched, quantized and offloaded
weights as well.
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
from .quantized import Fp8Rows, quantize_activations, quantize_rows
from .rope import apply_rope

FP16_MAX = 65504
FEWEST_ROWS = 2  # a compiled kernel for any number of rows is none for a single one


class Kernels:
    """PyTorch's own operations. With `fp8`, results are quantized by token on the way."""

    name = "eager"
    ready = True

    def prepare(self, config: DiTConfig, dtype: torch.dtype, device: torch.device, *, fp8: bool = False) -> None:
        """What must be done once, before a transformer of these widths runs; `fp8` if its products are in FP8."""

    def quantized(self, x: Tensor) -> Fp8Rows:
        """x [..., width] in E4M3."""
        return Fp8Rows(*quantize_activations(x.reshape(-1, x.shape[-1])), x.shape, x.dtype)

    def norm(self, x: Tensor, scale: Tensor, eps: float, *, fp8: bool = False) -> Tensor | Fp8Rows:
        """LayerNorm of x [..., width] without a bias, times scale [width]."""
        normed = F.layer_norm(x, x.shape[-1:], scale, eps=eps)
        return self.quantized(normed) if fp8 else normed

    def residual(self, x: Tensor, gate: Tensor, update: Tensor) -> Tensor:
        """x + gate * update; fp16 stays finite."""
        x = torch.addcmul(x, gate, update)
        return x.clip(-FP16_MAX, FP16_MAX) if x.dtype == torch.float16 else x

    def residual_norm(
        self, x: Tensor, gate: Tensor, update: Tensor, scale: Tensor, eps: float, *, fp8: bool = False
    ) -> tuple[Tensor, Tensor | Fp8Rows]:
        """`residual`, and `norm` of it."""
        x = self.residual(x, gate, update)
        return x, self.norm(x, scale, eps, fp8=fp8)

    def silu_mul(self, gate: Tensor, value: Tensor, *, fp8: bool = False) -> Tensor | Fp8Rows:
        """silu(gate) * value, in the place of the gate unless a gradient needs it."""
        own = needs_gradient(gate)  # the largest activations: no second copy of them elsewhere
        silu_mul = F.silu(gate) * value if own else F.silu(gate, inplace=True).mul_(value)
        return self.quantized(silu_mul) if fp8 else silu_mul

    def rotation(self, rope: Tensor) -> Tensor:
        """The rotation [S, D / 2], made once for all layers, in the form that `qk_norm_rope` takes: a token a row."""
        return rope

    def qk_norm_rope(self, x: Tensor, norm: Callable[[Tensor], Tensor], rope: Tensor) -> Tensor:
        """RMS norm of x [B, S, H, D] by head, then its rotation by rope, as `rotation` gives it."""
        return apply_rope(norm(x), rope)


EAGER = Kernels()


class CompiledKernels(Kernels):
    """Each compiled once, by `prepare` or at its first use, and not again for other sizes.

    On a CPU the rotation stays PyTorch's: its complex product is several times faster than compiled pairs.
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
        self.seconds: float | None = None  # that compiling took

    @property
    def ready(self) -> bool:
        return self.seconds is not None

    def prepare(self, config: DiTConfig, dtype: torch.dtype, device: torch.device, *, fp8: bool = False) -> None:
        """Compile. Raises `UserError` where nothing can be compiled here."""
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
        except Exception as error:  # of any kind: compilers fail in many ways
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
        """`qk_norm_rope` in real numbers, with the norm where it is PyTorch's own; a host's may keep its weight
        elsewhere."""
        pairs = _any_rows(torch.view_as_real(rope).repeat(len(x), 1, 1))
        if type(norm) is nn.RMSNorm:
            qk_norm_rope = self._norm_rope(_any_rows(x.flatten(0, 1)), norm.weight, pairs, norm.eps)
        else:
            qk_norm_rope = self._rope_pairs(_any_rows(norm(x).flatten(0, 1)), pairs)
        return qk_norm_rope.view(x.shape)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Not `fullgraph`: a process that has run more widths and dtypes than PyTorch keeps kernels for goes on without
    them, where that would be an error."""
    return torch.compile(function)


def _plain(x: Tensor) -> bool:
    """Whether this goes to PyTorch's own operations."""
    return x.shape[:-1].numel() < FEWEST_ROWS or needs_gradient(x)


def needs_gradient(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


def _rows(x: Tensor) -> Tensor:
    """x [..., width] as [rows, width]."""
    return _any_rows(x.reshape(-1, x.shape[-1]))


def _any_rows(x: Tensor) -> Tensor:
    """x, whose first axis may have any length to the compiler."""
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
    """x [rows, H, D], normed by head and rotated by pairs [rows, D / 2, 2] of cosine and sine."""
    return _rope_pairs(F.rms_norm(x.float(), weight.shape, weight.float(), eps), pairs).to(x.dtype)


def _rope_pairs(x: Tensor, pairs: Tensor) -> Tensor:
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = pairs[:, None].unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).to(x.dtype)

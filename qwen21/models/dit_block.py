"""A block of the diffusion transformer: norm, attention, norm, gated MLP. All blocks share their scales and gates."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..config.networks import DiTConfig
from ..ops.pointwise import EAGER, Kernels

if TYPE_CHECKING:
    from ..ops.formats.fp8 import Fp8Rows
    from ..ops.fused_linear import FusedLinear


@dataclass(frozen=True)
class Modulation:
    """Scales (1 already added) and gates (tanh already applied), each [width], of all blocks at one noise level."""

    scale1: Tensor
    gate1: Tensor
    scale2: Tensor
    gate2: Tensor


class _Fusible(nn.Module):
    """A part of a block whose linear layers `models.dit.fuse` may fuse: `fused` computes all layers that read the input
    in one product, `fused_out` replaces the last layer where its input is already quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.fused: FusedLinear | None = None
        self.fused_out: FusedLinear | None = None

    @property
    def takes_fp8(self) -> bool:
        """Whether the input must be quantized to FP8."""
        return self.fused is not None and self.fused.fp8


class Attention(_Fusible):
    def __init__(self, config: DiTConfig, operations: ModuleType, **kw) -> None:
        super().__init__()
        width = config.width
        self.head_dim = config.head_dim
        self.to_q = operations.Linear(width, width, bias=False, **kw)
        self.to_k = operations.Linear(width, width, bias=False, **kw)
        self.to_v = operations.Linear(width, width, bias=False, **kw)
        self.to_out = nn.ModuleList([operations.Linear(width, width, bias=False, **kw)])
        self.norm_q = operations.RMSNorm(config.head_dim, eps=config.eps, **kw)
        self.norm_k = operations.RMSNorm(config.head_dim, eps=config.eps, **kw)

    def qkv(self, x: Tensor | Fp8Rows, rope: Tensor, kernels: Kernels = EAGER) -> tuple[Tensor, Tensor, Tensor]:
        """q and k with RoPE applied, and v, each [B, H, S, D], of x [B, S, width]."""
        if self.fused is None:
            projected = (layer(x) for layer in (self.to_q, self.to_k, self.to_v))
        else:
            q, k, v = self.fused(x).chunk(3, dim=-1)
            projected = (q, k, v.contiguous())  # a copy, so that the fused output is freed before v
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in projected)
        q, k = kernels.qk_norm_rope(q, self.norm_q, rope), kernels.qk_norm_rope(k, self.norm_k, rope)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def output(self, attended: Tensor, kernels: Kernels = EAGER) -> Tensor:
        """The output projection [B, S, width] of `attended` [B, H, S, D]."""
        x = attended.transpose(1, 2).flatten(2)
        return self.to_out[0](x) if self.fused_out is None else self.fused_out(kernels.quantized(x))


class GatedMLP(_Fusible):
    def __init__(self, config: DiTConfig, operations: ModuleType, **kw) -> None:
        super().__init__()
        self.gate_layer = operations.Linear(config.width, config.mlp_width, bias=False, **kw)
        self.proj = operations.Linear(config.width, config.mlp_width, bias=False, **kw)
        self.out = operations.Linear(config.mlp_width, config.width, bias=False, **kw)

    def forward(self, x: Tensor | Fp8Rows, kernels: Kernels = EAGER) -> Tensor:
        if self.fused_out is not None:
            return self.fused_out(self._silu_mul(x, kernels, fp8=True))
        return self.out(self._silu_mul(x, kernels))

    def _silu_mul(self, x: Tensor | Fp8Rows, kernels: Kernels, *, fp8: bool = False) -> Tensor | Fp8Rows:
        gate, value = (self.gate_layer(x), self.proj(x)) if self.fused is None else self.fused(x).chunk(2, dim=-1)
        return kernels.silu_mul(gate, value, fp8=fp8)


class Block(nn.Module):
    """One transformer block, in two parts around its attention, because prefill and denoise attend to other keys."""

    def __init__(self, config: DiTConfig, operations: ModuleType, **kw) -> None:
        super().__init__()
        self.eps = config.eps
        self.attn = Attention(config, operations, **kw)
        self.img_mlp = GatedMLP(config, operations, **kw)

    def qkv(
        self, x: Tensor, modulation: Modulation, rope: Tensor, kernels: Kernels = EAGER
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v [B, H, S, D] of the block's input x [B, S, width]."""
        hidden = kernels.norm(x, modulation.scale1, self.eps, fp8=self.attn.takes_fp8)
        return self.attn.qkv(hidden, rope, kernels)

    def attn_out_mlp(self, x: Tensor, attended: Tensor, modulation: Modulation, kernels: Kernels = EAGER) -> Tensor:
        """The block's output [B, S, width] from its input x and the attention result `attended` [B, H, S, D]."""
        # The attention's output has no name of its own, so that it is freed before the MLP runs.
        x, hidden = kernels.residual_norm(
            x,
            modulation.gate1,
            self.attn.output(attended, kernels),
            modulation.scale2,
            self.eps,
            fp8=self.img_mlp.takes_fp8,
        )
        return kernels.residual(x, modulation.gate2, self.img_mlp(hidden, kernels))

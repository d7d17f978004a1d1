"""The transformer's block: norm, attention, norm, gated MLP, with scales and gates that all blocks share."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..config.networks import DiTConfig
from ..ops.pointwise import EAGER, Kernels

if TYPE_CHECKING:
    from ..ops.fused_linear import FusedLinear
    from ..ops.quantized import Fp8Rows


@dataclass(frozen=True)
class Modulation:
    """Scales and gates shared by all blocks at one noise level, each [width]; 1 and tanh already applied."""

    scale1: Tensor
    gate1: Tensor
    scale2: Tensor
    gate2: Tensor


class _Fusible(nn.Module):
    """What `fused.fuse` may change: `fused` is the layers that read the input in one product, `fused_out` stands for
    the last layer where its input is quantized already."""

    def __init__(self) -> None:
        super().__init__()
        self.fused: FusedLinear | None = None
        self.fused_out: FusedLinear | None = None

    @property
    def takes_fp8(self) -> bool:
        """Whether it takes its input quantized."""
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
        """x [B, S, width] -> rotated q, rotated k and v, each [B, H, S, D]."""
        if self.fused is None:
            projected = (layer(x) for layer in (self.to_q, self.to_k, self.to_v))
        else:
            q, k, v = self.fused(x).chunk(3, dim=-1)
            projected = (q, k, v.contiguous())  # lest the whole product lives as long as v
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in projected)
        q, k = kernels.qk_norm_rope(q, self.norm_q, rope), kernels.qk_norm_rope(k, self.norm_k, rope)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def output(self, attended: Tensor, kernels: Kernels = EAGER) -> Tensor:
        """[B, H, S, D] -> [B, S, width]."""
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
    """One transformer block, cut at its attention so that prefill and denoise put their own keys in between."""

    def __init__(self, config: DiTConfig, operations: ModuleType, **kw) -> None:
        super().__init__()
        self.eps = config.eps
        self.attn = Attention(config, operations, **kw)
        self.img_mlp = GatedMLP(config, operations, **kw)

    def qkv(
        self, x: Tensor, modulation: Modulation, rope: Tensor, kernels: Kernels = EAGER
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, S, width] -> q, k, v [B, H, S, D]."""
        hidden = kernels.norm(x, modulation.scale1, self.eps, fp8=self.attn.takes_fp8)
        return self.attn.qkv(hidden, rope, kernels)

    def attn_out_mlp(self, x: Tensor, attended: Tensor, modulation: Modulation, kernels: Kernels = EAGER) -> Tensor:
        """x and what its tokens attended to [B, H, S, D] -> the block's output [B, S, width]."""
        # The update in no name of its own: it would live as long as the MLP runs.
        x, hidden = kernels.residual_norm(
            x,
            modulation.gate1,
            self.attn.output(attended, kernels),
            modulation.scale2,
            self.eps,
            fp8=self.img_mlp.takes_fp8,
        )
        return kernels.residual(x, modulation.gate2, self.img_mlp(hidden, kernels))

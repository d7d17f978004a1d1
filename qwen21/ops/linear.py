"""The layers that networks use by default: PyTorch's, with linear layers that are faster on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Conv2d, Conv3d, Embedding, LayerNorm, RMSNorm = nn.Conv2d, nn.Conv3d, nn.Embedding, nn.LayerNorm, nn.RMSNorm

# oneDNN's product, which PyTorch itself uses in compiled graphs. Otherwise PyTorch uses MKL, which is a quarter slower
# on AMD's processors.
_ONEDNN = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product [..., out] of x [..., in] and the transposed weight [out, in], plus bias [out]."""
    if _ONEDNN is not None and _is_plain(x) and _is_plain(weight):
        return _ONEDNN(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def _is_plain(x: Tensor) -> bool:
    """Whether oneDNN can use `x`: fp32 on the CPU, not empty, and needing no gradient."""
    wants_grad = torch.is_grad_enabled() and x.requires_grad
    return x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() > 0 and not wants_grad

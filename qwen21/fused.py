"""Linear layers that read the same input as one product: q, k and v; gate and value of the MLP.

Their weights become one tensor, and the layers' own weights views of it: nothing is held twice, and whoever looks at a
layer finds it as it was. What is quantized in fp8 has its input quantized once instead of two or three times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from .checkpoint.quant import E4M3, Packed, QuantLinear, packed_linear
from .dit import DiT
from .layers import linear

Product = Callable[[Tensor], Tensor]


def fuse(dit: DiT) -> int:
    """Fuse what can be in every block; returns how many products are fused now.

    For weights that stay where they are: moved or cast afterwards, views and whole part. LoRAs must be in force before,
    their layers are left alone.
    """
    for block in dit.transformer_blocks:
        attention, mlp = block.attn, block.img_mlp
        attention.fused = fused([attention.to_q, attention.to_k, attention.to_v])
        mlp.fused = fused([mlp.gate_layer, mlp.proj])
    return sum(part.fused is not None for block in dit.transformer_blocks for part in (block.attn, block.img_mlp))


@torch.no_grad()
def fused(layers: Sequence[nn.Module]) -> Product | None:
    """x [..., in] -> the layers' outputs beside each other [..., sum of out]; None where there is no such product."""
    if any(layer._forward_hooks or layer.bias is not None for layer in layers):
        return None
    if all(isinstance(layer, nn.Linear) and not isinstance(layer, QuantLinear) for layer in layers):
        weight = _joined(layers, "weight")
        return lambda x: linear(x, weight)
    if all(isinstance(layer, QuantLinear) and layer.weight.dtype == E4M3 for layer in layers):
        for layer in layers:
            if layer.weight_scale is None:
                layer.weight_scale = torch.ones(1, 1, device=layer.weight.device)
            layer.weight_scale = layer.weight_scale.expand(len(layer.weight), 1)
        packed = Packed(_joined(layers, "weight"), _joined(layers, "weight_scale"))
        return lambda x: packed_linear(x, packed)
    return None


def _joined(layers: Sequence[nn.Module], name: str) -> Tensor:
    """The layers' tensors of that name as one, of which theirs become views."""
    parts = [getattr(layer, name) for layer in layers]
    whole = torch.cat([part.detach() for part in parts])
    for layer, part, view in zip(layers, parts, whole.split([len(part) for part in parts]), strict=True):
        setattr(layer, name, nn.Parameter(view, requires_grad=False) if isinstance(part, nn.Parameter) else view)
    return whole

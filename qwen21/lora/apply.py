"""Apply LoRAs to a network beside its weights. Nothing is merged, so quantized layers work and removal is exact.

A merge rounds the sum to the grid of the weight's dtype, which loses most of a small difference: `tests/bench/lora.py`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..errors import UserError
from ..ops.quantized import QuantLinear
from .read import Adapter, Lora

LARGEST_STRENGTH = 100.0


@dataclass(frozen=True)
class Applied:
    """LoRAs that are active on a network until `remove` is called."""

    loras: tuple[tuple[Lora, float], ...]
    handles: tuple[RemovableHandle, ...]

    @property
    def identity(self) -> str:
        """A name of the change they make, the same in whatever order they were given; '' where they change nothing."""
        parts = sorted(f"{lora.digest}:{strength.hex()}" for lora, strength in self.loras if strength)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16] if parts else ""

    @property
    def report(self) -> list[dict[str, object]]:
        """Facts of each LoRA: file name, digest, strength, patched layers by kind, and names that matched nothing."""
        return [lora_facts(lora, strength) | {"unmatched": list(lora.unmatched)} for lora, strength in self.loras]

    def remove(self) -> None:
        """Remove the LoRAs. The network then computes bit for bit what it did before."""
        for handle in self.handles:
            handle.remove()


@dataclass(frozen=True)
class Part:
    """One adapter at one strength on one layer. `gain` [out], fp32, is DoRA's factor of each row; None without DoRA."""

    adapter: Adapter
    strength: float
    gain: Tensor | None


class LoraHook:
    """A forward hook that adds the output of all LoRAs of one layer, by one product of their stacked ranks.

    With W' = gain * (W + delta) for DoRA, a strength s moves the layer from W to W + s (W' - W). Every LoRA refers to
    the plain W, so their order does not matter.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self._built: tuple[Tensor, Tensor, Tensor | None] | None = None

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Map the inputs [..., in] and the layer's own output [..., out] to the output with the LoRAs [..., out]."""
        down, up, gain = self._stacked(inputs[0])
        hidden = F.linear(inputs[0], down).flatten(0, -2)  # [N, ranks]
        rows = output.reshape(-1, output.shape[-1])
        if torch.is_grad_enabled():
            return torch.addmm(rows if gain is None else (rows * gain).to(rows.dtype), hidden, up.T).view(output.shape)
        if gain is not None:
            rows.mul_(gain)
        return rows.addmm_(hidden, up.T).view(output.shape)  # in place: no second copy of the largest activations

    def _stacked(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Stack down [ranks, in] and up [out, ranks], scales and strengths in up, in x's dtype; gain [out] in fp32."""
        if self._built is None or self._built[0].dtype != x.dtype or self._built[0].device != x.device:
            with torch.inference_mode(False), torch.no_grad():  # they outlive this call, maybe in inference mode
                down = torch.cat([part.adapter.down.to(x.device, x.dtype) for part in self.parts])
                up = torch.cat([_scaled_up(part, x.device).to(x.dtype) for part in self.parts], dim=1)
                self._built = down, up, _total_gain(self.parts, x.device)
        return self._built


def _scaled_up(part: Part, device: torch.device) -> Tensor:
    up = part.adapter.up.to(device, torch.float32) * (part.strength * part.adapter.scale)
    return up if part.gain is None else up * part.gain.to(device)[:, None]


def _total_gain(parts: Sequence[Part], device: torch.device) -> Tensor | None:
    """Factor of the layer's own output: 1 plus the share of every DoRA's gain at its strength; None without DoRA."""
    shares = [part.strength * (part.gain.to(device) - 1) for part in parts if part.gain is not None]
    return 1 + torch.stack(shares).sum(0) if shares else None


def apply_loras(network: nn.Module, loras: Sequence[tuple[Lora, float]]) -> Applied:
    """Activate LoRAs, each at its strength (0 adds nothing, negative ones subtract).

    `network` is a `DiT` of the size that the LoRAs were read for. Its layers may be of any kind that is called like a
    linear layer. Give all LoRAs at once: raises `UserError` where some are active already, or a strength is out of
    range.
    """
    for lora, strength in loras:
        if not math.isfinite(strength) or abs(strength) > LARGEST_STRENGTH:
            raise UserError(
                f"LoRA {lora.name}: strength is {strength:g}, expected -{LARGEST_STRENGTH:g} to {LARGEST_STRENGTH:g}"
            )
    # Sorted by content, so that sums round the same in whatever order the LoRAs were given.
    active = sorted(((lora, s) for lora, s in loras if s), key=lambda pair: (pair[0].digest, pair[1]))
    hooks: dict[nn.Module, LoraHook] = {}
    for name in dict.fromkeys(name for lora, _ in active for name in lora.adapters):
        layer = network.get_submodule(name)
        if any(isinstance(hook, LoraHook) for hook in layer._forward_hooks.values()):
            raise UserError("this network has LoRAs in force; remove them first, and apply all that are wanted at once")
        patches = [(lora.adapters[name], s) for lora, s in active if name in lora.adapters]
        hooks[layer] = LoraHook([Part(adapter, s, _gain(layer, adapter)) for adapter, s in patches])
    return Applied(tuple(loras), tuple(layer.register_forward_hook(hook) for layer, hook in hooks.items()))


@torch.no_grad()
def _gain(layer: nn.Module, adapter: Adapter) -> Tensor | None:
    """DoRA's factor of each row [out], fp32: the trained length of the row over its present length."""
    if adapter.magnitude is None:
        return None
    weight = dequantized(layer)
    return adapter.gain(weight.float() + adapter.delta(weight.device))


def dequantized(layer: nn.Module) -> Tensor:
    """Weight [out, in] of a linear layer, dequantized where necessary."""
    return layer.dequantized() if isinstance(layer, QuantLinear) else layer.weight.detach()


def lora_facts(lora: Lora, strength: float) -> dict[str, object]:
    """Facts of a LoRA for the manifest."""
    return {"file": lora.name, "digest": lora.digest, "strength": strength, "matched": lora.matched}

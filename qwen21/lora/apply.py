"""LoRAs in force on a network, beside its weights: nothing is merged, so quantized layers take them and undo is exact.

A merge rounds the sum to the weight's own grid, which swallows most of a small difference: `tests/bench/lora.py`.
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
    """LoRAs in force on a network, until `remove`."""

    loras: tuple[tuple[Lora, float], ...]
    handles: tuple[RemovableHandle, ...]

    @property
    def identity(self) -> str:
        """A name of what they change, the same in whatever order they were given; empty where they change nothing."""
        parts = sorted(f"{lora.digest}:{strength.hex()}" for lora, strength in self.loras if strength)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16] if parts else ""

    @property
    def report(self) -> list[dict[str, object]]:
        """Of each LoRA its file's name, digest, strength, patched layers by kind, and what matched nothing by name."""
        return [lora_facts(lora, strength) | {"unmatched": list(lora.unmatched)} for lora, strength in self.loras]

    def remove(self) -> None:
        """Take the LoRAs off again: the network computes bit for bit what it did before."""
        for handle in self.handles:
            handle.remove()


@dataclass(frozen=True)
class Part:
    """One adapter at one strength on one layer. `gain` [out], fp32, is DoRA's factor of each row, None without DoRA."""

    adapter: Adapter
    strength: float
    gain: Tensor | None


class LoraHook:
    """A forward hook: adds what all LoRAs of one layer add, as one product of their stacked ranks.

    With W' = gain * (W + delta) for DoRA, a strength s moves the layer from W to W + s (W' - W); every LoRA refers to
    the plain W, so their order does not matter.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self._built: tuple[Tensor, Tensor, Tensor | None] | None = None

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """inputs [..., in] and the layer's own output [..., out] -> its output with the LoRAs [..., out]."""
        down, up, gain = self._stacked(inputs[0])
        hidden = F.linear(inputs[0], down).flatten(0, -2)  # [N, ranks]
        rows = output.reshape(-1, output.shape[-1])
        if torch.is_grad_enabled():
            return torch.addmm(rows if gain is None else (rows * gain).to(rows.dtype), hidden, up.T).view(output.shape)
        if gain is not None:
            rows.mul_(gain)
        return rows.addmm_(hidden, up.T).view(output.shape)  # in place: no second copy of the largest activations

    def _stacked(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """down [ranks, in] and up [out, ranks] as x is, scales and strengths within up; the rows' gain in fp32."""
        if self._built is None or self._built[0].dtype != x.dtype or self._built[0].device != x.device:
            with torch.inference_mode(False), torch.no_grad():  # they outlive this call, which may be a guarded one
                down = torch.cat([part.adapter.down.to(x.device, x.dtype) for part in self.parts])
                up = torch.cat([_scaled_up(part, x.device).to(x.dtype) for part in self.parts], dim=1)
                self._built = down, up, _total_gain(self.parts, x.device)
        return self._built


def _scaled_up(part: Part, device: torch.device) -> Tensor:
    up = part.adapter.up.to(device, torch.float32) * (part.strength * part.adapter.scale)
    return up if part.gain is None else up * part.gain.to(device)[:, None]


def _total_gain(parts: Sequence[Part], device: torch.device) -> Tensor | None:
    """What the layer's own output is multiplied with: 1 and the strengths' shares of every DoRA's gain."""
    shares = [part.strength * (part.gain.to(device) - 1) for part in parts if part.gain is not None]
    return 1 + torch.stack(shares).sum(0) if shares else None


def apply_loras(network: nn.Module, loras: Sequence[tuple[Lora, float]]) -> Applied:
    """Put LoRAs into force, each at its strength (0 adds nothing, negative ones subtract).

    `network` is a `DiT` of the size the LoRAs were read for, its layers of any kind that are called as linear layers;
    give all LoRAs at once. Raises `UserError` for a strength out of range, and where LoRAs are in force already.
    """
    for lora, strength in loras:
        if not math.isfinite(strength) or abs(strength) > LARGEST_STRENGTH:
            raise UserError(
                f"LoRA {lora.name}: strength is {strength:g}, expected -{LARGEST_STRENGTH:g} to {LARGEST_STRENGTH:g}"
            )
    # By content, so that sums round the same in whatever order they were given.
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
    """DoRA's factor of each row [out], fp32: its trained length over the length it has now."""
    if adapter.magnitude is None:
        return None
    weight = dequantized(layer)
    return adapter.gain(weight.float() + adapter.delta(weight.device))


def dequantized(layer: nn.Module) -> Tensor:
    """A linear layer's weight [out, in] as plain numbers."""
    return layer.dequantized() if isinstance(layer, QuantLinear) else layer.weight.detach()


def lora_facts(lora: Lora, strength: float) -> dict[str, object]:
    """What a manifest says of a LoRA."""
    return {"file": lora.name, "digest": lora.digest, "strength": strength, "matched": lora.matched}

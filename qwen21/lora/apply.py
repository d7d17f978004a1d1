"""Apply LoRAs to a network beside its weights. Nothing is merged, so quantized layers work and removal is exact.

A merge rounds the sum to the grid of the weight's dtype, which loses most of a small difference: `tests/bench/lora.py`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..errors import UserError
from ..ops.quantized import QuantLinear
from .adapters import Adapter, Kronecker, Patch
from .read import Lora

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

    adapter: Patch
    strength: float
    gain: Tensor | None


class LoraHook:
    """A forward hook that adds the output of all LoRAs of one layer, by one product of their stacked ranks, and one
    product for each LoKr.

    With W' = gain * (W + delta) for DoRA, a strength s moves the layer from W to W + s (W' - W). Every LoRA refers to
    the plain W, so their order does not matter.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self._built: Built | None = None

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Map the inputs [..., in] and the layer's own output [..., out] to the output with the LoRAs [..., out]."""
        x, built = inputs[0], self._on(inputs[0])
        rows = output.reshape(-1, output.shape[-1])
        if torch.is_grad_enabled():
            rows = rows.clone()
        if built.gain is not None:  # in place: no second copy of the largest activations
            rows = rows.mul_(built.gain)
        if built.down is not None:
            hidden = F.linear(x, built.down).flatten(0, -2)  # [N, ranks]
            rows = rows.addmm_(hidden, built.up.T)
        for part in built.kroneckers:
            rows = rows.add_(_kronecker_output(part, x).reshape(rows.shape))
        return rows.view(output.shape)

    def _on(self, x: Tensor) -> Built:
        """The LoRAs in the dtype and on the device of x."""
        if self._built is None or (self._built.dtype, self._built.device) != (x.dtype, x.device):
            with torch.inference_mode(False), torch.no_grad():  # they outlive this call, maybe in inference mode
                self._built = Built.of(self.parts, x.dtype, x.device)
        return self._built


@dataclass(frozen=True)
class Built:
    """LoRAs of one layer in one dtype on one device: down [ranks, in] and up [out, ranks] of all low-rank ones stacked,
    with scales and strengths in up (None without any), the LoKrs, and the gain [out], fp32, of the layer's own output
    (None without DoRA)."""

    dtype: torch.dtype
    device: torch.device
    down: Tensor | None
    up: Tensor | None
    kroneckers: tuple[Part, ...]
    gain: Tensor | None

    @classmethod
    def of(cls, parts: Sequence[Part], dtype: torch.dtype, device: torch.device) -> Built:
        low = [part for part in parts if isinstance(part.adapter, Adapter)]
        down = torch.cat([part.adapter.down.to(device, dtype) for part in low]) if low else None
        up = torch.cat([_scaled_up(part, device).to(dtype) for part in low], dim=1) if low else None
        others = (part for part in parts if isinstance(part.adapter, Kronecker))
        kroneckers = tuple(_moved(part, device, dtype) for part in others)
        return cls(dtype, device, down, up, kroneckers, _total_gain(parts, device))


def _moved(part: Part, device: torch.device, dtype: torch.dtype) -> Part:
    adapter = part.adapter
    adapter = replace(adapter, left=adapter.left.to(device, dtype), right=adapter.right.to(device, dtype))
    return replace(part, adapter=adapter, gain=None if part.gain is None else part.gain.to(device))


def _kronecker_output(part: Part, x: Tensor) -> Tensor:
    """What a LoKr adds to the layer's output [..., out] for inputs x [..., in]."""
    added = part.adapter.product(x) * (part.strength * part.adapter.scale)
    return added if part.gain is None else (added * part.gain).to(x.dtype)


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

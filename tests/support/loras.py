"""Random LoRAs for the tiny transformer in every style of keys, and the merged model that they must equal."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from qwen21.config.networks import DiTConfig
from qwen21.models.dit import DiT
from tests.support import tiny

CONFIG = DiTConfig(layers=2, heads=2, text_width=tiny.TEXT_WIDTH)
GATE, PROJ, FUSED = "img_mlp.gate_layer", "img_mlp.proj", "img_mlp.gate_up"
ATTENTION = [f"transformer_blocks.{n}.attn.{part}" for n in (0, 1) for part in ("to_q", "to_k", "to_v", "to_out.0")]
MLP = [f"transformer_blocks.{n}.{part}" for n in (0, 1) for part in (GATE, PROJ, "img_mlp.out")]
OTHER = ["img_in", "txt_in.in_layer", "txt_in.out_layer", "time_text_embed.timestep_embedder.linear_1"]
OTHER += ["time_text_embed.timestep_embedder.linear_2", "modulation.1", "norm_out.linear", "proj_out"]
LAYERS = [*ATTENTION, *MLP, *OTHER]


@dataclass(frozen=True, eq=False)
class Patch:
    """What a trainer saves for one layer: lora_A [rank, in], lora_B [out, rank], maybe alpha and DoRA's magnitude."""

    a: Tensor
    b: Tensor
    alpha: float | None = None
    magnitude: Tensor | None = None

    @property
    def delta(self) -> Tensor:
        """Difference [out, in] in fp64, by the definition of LoRA."""
        alpha = self.a.shape[0] if self.alpha is None else self.alpha
        return alpha / self.a.shape[0] * (self.b.double() @ self.a.double())

    def merged(self, weight: Tensor, strength: float) -> Tensor:
        """The layer's plain weight with the patch merged, in fp64."""
        if self.magnitude is None:
            return weight + strength * self.delta
        whole = weight + self.delta
        whole = self.magnitude.double()[:, None] * whole / whole.norm(dim=1, keepdim=True)
        return weight + strength * (whole - weight)


def network() -> DiT:
    return copy.deepcopy(_plain())


@functools.cache
def _plain() -> DiT:
    dit = DiT(CONFIG).eval()
    dit.load_state_dict(tiny.transformer().state_dict())
    return dit


def make(seed: int, layers: Iterable[str] = LAYERS, alpha: float | None = None, dora: bool = False) -> dict[str, Patch]:
    """Make patches with ranks cycling from 1 to 5, and differences of about a fifth of the weights."""
    generator = torch.Generator().manual_seed(seed)
    patches = {}
    for i, layer in enumerate(layers):
        weight = _plain().get_submodule(layer).weight.detach()
        rank = 1 + i % 5
        a = torch.randn(rank, weight.shape[1], generator=generator) * weight.shape[1] ** -0.5
        b = torch.randn(weight.shape[0], rank, generator=generator) * 0.2
        scale = 1 + 0.3 * torch.randn(len(weight), generator=generator)
        patches[layer] = Patch(a, b, alpha, scale * weight.norm(dim=1) if dora else None)
    return patches


def merge(dit: DiT, *stack: tuple[Mapping[str, Patch], float]) -> DiT:
    """Copy `dit` with all patches merged, each computed from the plain weight in fp64."""
    result = copy.deepcopy(dit)
    for patches, strength in stack:
        for layer, patch in patches.items():
            plain = dit.get_submodule(layer).weight.detach().double()
            parameter = result.get_submodule(layer).weight
            parameter.data = (parameter.double() + patch.merged(plain, strength) - plain).float()
    return result


@torch.no_grad()
def velocity(dit: nn.Module, seed: int = 0) -> Tensor:
    """Velocity of a fixed target with a fixed text and reference, which every layer contributes to."""
    generator = torch.Generator().manual_seed(seed)
    text, reference, target = (
        torch.randn(*shape, generator=generator) for shape in ((7, tiny.TEXT_WIDTH), (64, 2, 4), (2, 64, 4, 2))
    )
    dtype = next(dit.parameters()).dtype
    prefix = dit.prefill(text.to(dtype), [reference.to(dtype)], [3])
    return dit.denoise(target.to(dtype), 0.7, prefix)


# --- files ---------------------------------------------------------------------------------------------------------

AB = {"down": "lora_A.weight", "up": "lora_B.weight", "alpha": "alpha", "magnitude": "lora_magnitude_vector"}
DOWN_UP = {"down": "lora_down.weight", "up": "lora_up.weight", "alpha": "alpha", "magnitude": "dora_scale"}
NAMED = {part: key.replace(".weight", ".default.weight") for part, key in AB.items()}
BARE = {part: key.replace(".weight", "") for part, key in AB.items()}
# prefix, names of the parts, whether dots become underscores, whether gate_up is fused
STYLES: dict[str, tuple[str, dict[str, str], bool, bool]] = {
    "diffusers": ("transformer.", AB, False, False),
    "PEFT": ("base_model.model.", AB, False, False),
    "PEFT of a wrapped model": ("base_model.model.transformer.", NAMED, False, False),
    "adapter name": ("transformer.", NAMED, False, False),
    "no weight": ("transformer.", BARE, False, False),
    "Comfy": ("diffusion_model.", AB, False, False),
    "Comfy, down and up": ("diffusion_model.", DOWN_UP, False, False),
    "Comfy, fused": ("diffusion_model.", AB, False, True),
    "Comfy, fused, down and up": ("diffusion_model.", DOWN_UP, False, True),
    "bare": ("", AB, False, False),
    "DiffSynth": ("pipe.dit.", NAMED, False, False),
    "kohya": ("lora_unet_", DOWN_UP, True, False),
    "kohya, fused": ("lora_unet_", DOWN_UP, True, True),
    "LyCORIS": ("lycoris_", DOWN_UP, True, False),
}


def tensors(patches: Mapping[str, Patch], style: str = "diffusers") -> dict[str, Tensor]:
    prefix, parts, flat, fused = STYLES[style]
    found = {}
    for layer, patch in (_fused(patches) if fused else patches).items():
        stem = prefix + (layer.replace(".", "_") if flat else layer)
        values = {"down": patch.a, "up": patch.b, "magnitude": patch.magnitude}
        values["alpha"] = None if patch.alpha is None else torch.tensor(float(patch.alpha))
        if "dora_scale" in parts.values() and patch.magnitude is not None:
            values["magnitude"] = patch.magnitude[:, None]
        found |= {f"{stem}.{parts[part]}": v.clone() for part, v in values.items() if v is not None}
    return found


def write(path: Path, patches: Mapping[str, Patch], style: str = "diffusers", settings: object = None) -> Path:
    """Write a LoRA file. `settings` become the header's lora_adapter_metadata."""
    metadata = None if settings is None else {"lora_adapter_metadata": json.dumps(settings)}
    save_file(tensors(patches, style), path, metadata)
    return path


def fusable(patches: Mapping[str, Patch]) -> dict[str, Patch]:
    """Copy patches as if gate_layer and proj were trained as one layer: proj shares gate_layer's lora_A."""
    result = dict(patches)
    for layer, patch in patches.items():
        gate = patches.get(layer.replace(PROJ, GATE))
        if layer.endswith(PROJ) and gate:
            b = patch.b[:, :1].expand(-1, gate.b.shape[1]) * torch.linspace(1, 2, gate.b.shape[1])
            result[layer] = Patch(gate.a, b, gate.alpha, patch.magnitude)
    return result


def _fused(patches: Mapping[str, Patch]) -> dict[str, Patch]:
    result = {}
    for layer, patch in patches.items():
        if layer.endswith(GATE):
            proj = patches[layer.replace(GATE, PROJ)]
            magnitude = None if patch.magnitude is None else torch.cat([patch.magnitude, proj.magnitude])
            result[layer.replace(GATE, FUSED)] = Patch(patch.a, torch.cat([patch.b, proj.b]), patch.alpha, magnitude)
        elif not layer.endswith(PROJ):
            result[layer] = patch
    return result

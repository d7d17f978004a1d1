"""Random LoHa and LoKr adapters in the styles of their trainers, and the differences that they stand for.

Nothing here uses the library, because it is tested against these files.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from safetensors.torch import save_file
from torch import Tensor

STYLES = {
    "lycoris": ("lycoris_", True),
    "kohya": ("lora_unet_", True),
    "Comfy": ("diffusion_model.", False),
    "PEFT": ("base_model.model.", False),
    "bare": ("", False),
}


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.2


def loha(rows, columns, rank=3):
    return {f"hada_w{n}_{half}": normal(*shape, seed=10 * n + i) for n in (1, 2)
            for i, (half, shape) in enumerate((("a", (rows, rank)), ("b", (rank, columns))))}  # fmt: skip


def lokr(rows, columns, low1=False, low2=False, factor=4, rank=2):
    parts = {}
    shapes = {"w1": (factor, factor), "w2": (rows // factor, columns // factor)}
    for seed, (name, low) in enumerate((("w1", low1), ("w2", low2))):
        a, b = shapes[name]
        if low:
            parts |= {f"lokr_{name}_a": normal(a, rank, seed=seed), f"lokr_{name}_b": normal(rank, b, seed=seed + 9)}
        else:
            parts[f"lokr_{name}"] = normal(a, b, seed=seed)
    return parts


FORMS = {
    "LoHa": loha,
    "LoKr of whole matrices": lokr,
    "LoKr, first low-rank": lambda rows, columns: lokr(rows, columns, low1=True),
    "LoKr, second low-rank": lambda rows, columns: lokr(rows, columns, low2=True),
    "LoKr, both low-rank": lambda rows, columns: lokr(rows, columns, low1=True, low2=True),
}


def difference(parts, alpha):
    """The difference in fp64, by the definitions of LoHa and LoKr."""
    d = {name: part.double() for name, part in parts.items()}
    if "hada_w1_a" in d:
        scale = 1.0 if alpha is None else alpha / len(d["hada_w1_b"])
        return scale * (d["hada_w1_a"] @ d["hada_w1_b"]) * (d["hada_w2_a"] @ d["hada_w2_b"])
    one, two = (d[f"lokr_{n}"] if f"lokr_{n}" in d else d[f"lokr_{n}_a"] @ d[f"lokr_{n}_b"] for n in ("w1", "w2"))
    rank = next((len(d[f"lokr_{n}_b"]) for n in ("w1", "w2") if f"lokr_{n}_b" in d), None)
    scale = 1.0 if alpha is None or rank is None else alpha / rank
    return scale * torch.kron(one, two)


def write(path, patches, style="lycoris", alpha=None, magnitudes=None):
    prefix, flat = STYLES[style]
    tensors = {}
    for layer, parts in patches.items():
        stem = prefix + (layer.replace(".", "_") if flat else layer)
        tensors |= {f"{stem}.{name}": part for name, part in parts.items()}
        if alpha is not None:
            tensors[f"{stem}.alpha"] = torch.tensor(float(alpha))
        if magnitudes is not None:
            tensors[f"{stem}.dora_scale"] = magnitudes[layer]
    save_file(tensors, path)
    return path


@dataclass(frozen=True, eq=False)
class Difference:
    """A patch of one layer, as `loras.merge` takes it."""

    delta: Tensor

    def merged(self, weight: Tensor, strength: float) -> Tensor:
        return weight + strength * self.delta

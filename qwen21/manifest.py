"""The manifest: all that a rerun must repeat, as JSON stored in the picture's metadata. It holds no absolute paths."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image

from . import __version__
from .checkpoint.component import Component
from .checkpoint.fp8_policy import Fp8
from .checkpoint.load import ModelFiles
from .lora.apply import lora_facts
from .lora.read import Lora
from .prefix import PrefixFacts
from .request import ResolvedRequest
from .sequence import ImageSegment

LIBRARIES = ("torch", "transformers", "safetensors", "pillow", "numpy")


def library_versions() -> dict[str, str]:
    """Versions of the installed libraries a picture depends on."""
    versions = {"qwen21": __version__}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


@dataclass(frozen=True)
class RunFacts:
    """What a manifest says about the networks and how they ran, besides the request and its prefixes."""

    files: ModelFiles
    dtype: torch.dtype
    device: torch.device
    fp8: Fp8 | None
    attention: str
    kernels: str
    prefill: str
    loras: Sequence[tuple[Lora, float]]
    warnings: Sequence[str]


def build_manifest(
    run: RunFacts, resolved: ResolvedRequest, slots: Sequence[int], prefixes: Sequence[PrefixFacts]
) -> dict[str, Any]:
    """The manifest of a finished run; `slots` are the image slots of its first prompt, `prefixes[0]` is its prefix."""
    request = resolved.request
    return {
        "model": {
            "dit": _component(run.files.dit),
            "encoder": _component(run.files.encoder),
            "vae": _component(run.files.vae),
        },
        "prompt": request.prompts if isinstance(request.prompts, str) else list(request.prompts),
        "negative": request.negative if resolved.guided else None,
        "size": list(resolved.size),
        "batch": len(request.prompt_list),
        "seed": request.seed,
        "noise": _noise(resolved),
        "sampler": "euler",
        "schedule": {
            "kind": resolved.schedule.kind,
            "sigmas": [round(s, 7) for s in resolved.schedule.sigmas.tolist()],
        },
        "cfg": _compact(resolved.cfg),
        "denoise": request.denoise,
        "resolution": request.resolution,
        "init_image": _digest(request.init_image),
        "mask": _digest(request.mask),
        "references": _references(resolved, slots, prefixes[0]),
        "dtype": str(run.dtype).removeprefix("torch."),
        "fp8": run.fp8 and {"keep": list(run.fp8.keep)},
        "device": run.device.type,
        "attention": run.attention,
        "kernels": run.kernels,
        "prefix": {
            "cache": request.prefix_cache,
            "prefill": run.prefill,
            "codec": ", ".join(dict.fromkeys(prefix.reuse.codec for prefix in prefixes)),
            "tokens": [prefix.layout.length for prefix in prefixes],
            "bytes": sum({key: n for prefix in prefixes for key, n in prefix.kv_blocks.items()}.values()),
            "reuse": [prefix.reuse.facts for prefix in prefixes],
        },
        "loras": [lora_facts(lora, strength) for lora, strength in run.loras],
        "versions": library_versions(),
        "warnings": list(run.warnings),
    }


def _component(part: Component) -> dict[str, str]:
    checkpoint, identity = part.checkpoint, part.identity
    path = checkpoint.path
    name = f"{path.parent.name}/{path.name}" if path.is_dir() else path.name
    return {"file": name, "fingerprint": checkpoint.fingerprint, "weights": identity.quantization}


def _noise(resolved: ResolvedRequest) -> dict[str, Any]:
    if not resolved.references:
        return {"mode": "released", "seed": resolved.noise_seed}
    return {"mode": resolved.request.edit_noise, "seed": resolved.noise_seed}


def _references(resolved: ResolvedRequest, slots: Sequence[int], prefix: PrefixFacts) -> list[dict[str, Any]]:
    segments = [s for s in prefix.layout.segments if isinstance(s, ImageSegment)]
    return [
        {
            "original": list(reference.original),
            "resized": list(reference.image.size),
            "tokens": segment.length,
            "slot": slot,
            "pixels": reference.digest[:16],
        }
        for reference, segment, slot in zip(resolved.references, segments, slots, strict=True)
    ]


def _digest(image: Image.Image | None) -> str | None:
    """A short hash of a picture's mode, size and pixels; None without a picture."""
    if image is None:
        return None
    return hashlib.sha256(f"{image.mode}{image.size}".encode() + image.tobytes()).hexdigest()[:16]


def _compact(values: tuple[float, ...]) -> float | list[float]:
    """A single number where all `values` are equal, else their list."""
    return values[0] if len(set(values)) == 1 else list(values)

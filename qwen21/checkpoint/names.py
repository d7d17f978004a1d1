"""Map the names in files to the names of our modules: prefixes, the Comfy layouts, fused tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .container import TensorInfo
from .gguf_names import PATCHES, encoder_names, is_gguf_encoder

# Prefixes of keys in whole files: as ComfyUI saves models, then as trainers and other packs do.
WRAPPERS = ("model.model.", "model.", "net.")
DIT_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "transformer.", *WRAPPERS)
ENCODER_PREFIXES = ("text_encoder.", *WRAPPERS)
VAE_PREFIXES = ("first_stage_model.", "vae.", *WRAPPERS)
DIT_MARKS = ("txt_in.text_norm.weight", "transformer_blocks.0.attn.to_q.weight")
ENCODER_STEMS = ("", "model.", "language_model.", "model.language_model.")
ENCODER_MARKS = tuple(f"{stem}embed_tokens.weight" for stem in ENCODER_STEMS)
VAE_MARKS = ("decoder.conv_in.weight", "decoder.conv1.weight")


@dataclass(frozen=True)
class Source:
    """Where one parameter comes from: a tensor of the file, or some of its rows, and the parameter's final shape.

    `frames` are the tensors of a vision kernel's frames, where the file has one for each: they are stacked on axis 2.
    """

    key: str
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None
    frames: tuple[str, ...] = ()


def dit_sources(tensors: Mapping[str, TensorInfo]) -> dict[str, Source]:
    """Sources of `DiT`'s parameters. Fused `gate_up` is split into gate_layer (first half of the rows) and proj."""
    sources: dict[str, Source] = {}
    prefix = dit_prefix(tensors)
    for key, info in tensors.items():
        name = key.removeprefix(prefix)
        if name.endswith(".img_mlp.gate_up.weight") and len(info.shape) == 2:
            stem, half = name.removesuffix("gate_up.weight"), info.shape[0] // 2
            shape = (half, info.shape[1])
            sources[f"{stem}gate_layer.weight"] = Source(key, shape, (0, half))
            sources[f"{stem}proj.weight"] = Source(key, shape, (half, info.shape[0]))
        else:
            sources[name] = Source(key, info.shape)
    return sources


def dit_prefix(tensors: Mapping[str, TensorInfo]) -> str:
    """The prefix of all transformer keys in a file; '' without one."""
    return _prefix(tensors, DIT_PREFIXES, DIT_MARKS)


def _prefix(tensors: Mapping[str, TensorInfo], prefixes: tuple[str, ...], marks: tuple[str, ...]) -> str:
    """The one of `prefixes` that stands before any of `marks`, keys that only this network has; '' without a match."""
    return next((prefix for prefix in ("", *prefixes) if any(prefix + mark in tensors for mark in marks)), "")


def encoder_sources(tensors: Mapping[str, TensorInfo]) -> dict[str, Source]:
    """Sources of `TextEncoder`'s parameters, by the names of Hugging Face, ComfyUI or GGUF. Skips the final norm and
    `lm_head`."""
    names = encoder_names(tensors) if is_gguf_encoder(tensors) else _encoder_names(tensors)
    kept = {key: name for key, name in names.items() if not name.startswith(("lm_head.", "language_model.norm."))}
    sources = {name: Source(key, tensors[key].shape) for key, name in kept.items()}
    if PATCHES in tensors and (second := f"{PATCHES}.1") in tensors:
        width, colors, *patch = tensors[PATCHES].shape
        sources[names[PATCHES]] = Source(PATCHES, (width, colors, 2, *patch), frames=(PATCHES, second))
        sources.pop(second)
    return sources


def _encoder_names(tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Names in `TextEncoder` of a safetensors file's tensors, by their keys."""
    prefix = _prefix(tensors, ENCODER_PREFIXES, ENCODER_MARKS)
    # The language model's keys begin with `model.`; in ComfyUI's files those of the vision tower do not.
    names = {key: key.removeprefix(prefix).removeprefix("model.") for key in tensors}
    starts = ("layers.", "embed_tokens.", "norm.")
    return {key: f"language_model.{name}" if name.startswith(starts) else name for key, name in names.items()}


# Names in the Comfy single-file VAE (those of Wan 2.2) and in diffusers', as regular expressions over whole keys.
_RESIDUAL = {"0": "norm1", "2": "conv1", "3": "norm2", "6": "conv2"}
_VAE_RULES: tuple[tuple[str, str], ...] = (
    (r"conv1\.(\w+)", r"quant_conv.\1"),
    (r"conv2\.(\w+)", r"post_quant_conv.\1"),
    (r"(encoder|decoder)\.conv1\.(\w+)", r"\1.conv_in.\2"),
    (r"(encoder|decoder)\.head\.0\.(\w+)", r"\1.norm_out.\2"),
    (r"(encoder|decoder)\.head\.2\.(\w+)", r"\1.conv_out.\2"),
    (r"(encoder|decoder)\.middle\.0\.residual\.(\d)\.(\w+)", r"\1.mid_block.resnets.0.<\2>.\3"),
    (r"(encoder|decoder)\.middle\.2\.residual\.(\d)\.(\w+)", r"\1.mid_block.resnets.1.<\2>.\3"),
    (r"(encoder|decoder)\.middle\.1\.(norm|to_qkv|proj)\.(\w+)", r"\1.mid_block.attentions.0.\2.\3"),
    (r"encoder\.downsamples\.(\d+)\.downsamples\.(\d+)\.residual\.(\d)\.(\w+)",
     r"encoder.down_blocks.\1.resnets.\2.<\3>.\4"),
    (r"encoder\.downsamples\.(\d+)\.downsamples\.(\d+)\.shortcut\.(\w+)",
     r"encoder.down_blocks.\1.resnets.\2.conv_shortcut.\3"),
    (r"encoder\.downsamples\.(\d+)\.downsamples\.\d+\.(resample\.1|time_conv)\.(\w+)",
     r"encoder.down_blocks.\1.downsampler.\2.\3"),
    (r"decoder\.upsamples\.(\d+)\.upsamples\.(\d+)\.residual\.(\d)\.(\w+)",
     r"decoder.up_blocks.\1.resnets.\2.<\3>.\4"),
    (r"decoder\.upsamples\.(\d+)\.upsamples\.(\d+)\.shortcut\.(\w+)",
     r"decoder.up_blocks.\1.resnets.\2.conv_shortcut.\3"),
    (r"decoder\.upsamples\.(\d+)\.upsamples\.\d+\.(resample\.1|time_conv)\.(\w+)",
     r"decoder.up_blocks.\1.upsampler.\2.\3"),
)  # fmt: skip


def is_comfy_vae(tensors: Mapping[str, TensorInfo]) -> bool:
    return any(".middle.0.residual." in key for key in tensors)


def vae_sources(tensors: Mapping[str, TensorInfo]) -> dict[str, Source]:
    """Sources of the parameters of `VAE`. `time_conv` is included to identify the slots, though the module has none.

    Kernels of rank 5 with one time slot lose that axis; nothing else is squeezed.
    """
    comfy = is_comfy_vae(tensors)
    prefix = _prefix(tensors, VAE_PREFIXES, VAE_MARKS)
    sources = {}
    for key, info in tensors.items():
        name, shape = key.removeprefix(prefix), info.shape
        if len(shape) == 5 and shape[2] == 1:
            shape = (*shape[:2], *shape[3:])
        sources[_vae_name(name) if comfy else name] = Source(key, shape)
    return sources


def _vae_name(key: str) -> str:
    for pattern, replacement in _VAE_RULES:
        match = re.fullmatch(pattern, key)
        if match:
            return re.sub(r"<(\d)>", lambda m: _RESIDUAL.get(m[1], m[0]), match.expand(replacement))
    return key

"""Identify a file by its header alone: which model, which layout, how it is quantized, what is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config.networks import DiTConfig, EncoderConfig, VAEConfig
from ..config.validate import printable
from ..errors import UserError
from ..ops.formats import WeightFormat
from .container import Checkpoint, CutShort
from .gguf_names import (
    ARCHITECTURE,
    DIT_ARCHITECTURES,
    ENCODER_ARCHITECTURE,
    VISION_ARCHITECTURE,
    is_gguf_encoder,
)
from .mmproj import with_vision
from .names import DIT_MARKS, Source, dit_prefix, dit_sources, encoder_sources, is_comfy_vae, vae_sources
from .open_file import open_checkpoint
from .quant_formats import Storage, Tensors, storage_of

SLOTS = {
    "dit": (
        "a Qwen-Image 2.1 transformer (qwen_image_2.1_bf16.safetensors, a GGUF file or a diffusers transformer/ folder)"
    ),
    "encoder": "Qwen3-VL-8B (qwen3vl_8b_bf16.safetensors, a GGUF file or a diffusers text_encoder/ folder)",
    "vae": "the Qwen-Image 2.1 VAE (qwen_image_2.1_vae_bf16.safetensors or a diffusers vae/ folder)",
}
TITLES = {
    "dit": "a Qwen-Image 2.1 transformer",
    "encoder": "a Qwen3-VL encoder",
    "vae": "a Qwen-Image 2.1 VAE",
    "lora": "a LoRA, which patches a model and is none itself",
}
RELEASED_TEXT_WIDTH = 4096
UNKNOWN = "unknown"  # the kind of a checkpoint that nothing here recognises


# Models that people put into the wrong slot, by parts of keys that only they have. The first match names the file.
FOREIGN_FILES = {
    ("double_blocks.", "single_blocks.", "single_transformer_blocks."): "a Flux-like transformer",
    ("joint_blocks.", ".ff_context."): "a Stable Diffusion 3 transformer",
    ("attn.add_q_proj", "img_mlp.net.", "txt_mlp.net."): "the older 20B Qwen-Image transformer",
    ("linear_attn.",): "a Qwen3.5 model (the prompt enhancer), not the encoder",
    (".input_blocks.", "conditioner.embedders.", "cond_stage_model."): "a Stable Diffusion checkpoint",
    ("down_blocks.0.attentions.", "down_blocks.1.attentions."): "a Stable Diffusion U-Net",
    (".cross_attn.norm_k.", ".attn2.norm_k."): "a Wan video transformer",
    ("decoder.up.0.block.", "decoder.up.1.block.", ".upsamplers.0.conv."): "a Flux or Stable Diffusion VAE",
    ("decoder.upsamples.0.residual.", ".upsamplers.0.resample."): "a Wan 2.1 or 20B Qwen-Image VAE",
    ("text_model.encoder.", "encoder.block.0.layer.0."): "a CLIP or T5 text encoder",
}
LORA_PARTS = ("lora_A", "lora_B", "lora_down", "lora_up", "hada_w1", "lokr_w1")
PDD = "Fun-Acc PDD, a few-step {} with four output heads, whose sampler this pack does not have"
CONTROLNET = "a Fun ControlNet Union of Qwen-Image 2.1, which this pack does not apply yet"
CONTROLNET_MARKS = ("control_img_in.weight", "control_blocks.0.img_mlp.out.weight")
OLD_LORA_PARTS = ("add_q_proj", "img_mlp.net", "img_mlp_net", "txt_mlp")


@dataclass(frozen=True)
class Identity:
    """What a checkpoint is. `kind` is dit, encoder, vae, lora, other or unknown; `title` names it for people.

    `quantization` sums up how the weights are stored; `packings` says it for each quantized tensor by its key.
    `damage` says why a checkpoint of a known kind is unusable; it then has neither config nor sources.
    """

    kind: str
    title: str
    layout: str = ""
    quantization: str = ""
    config: Any = None
    sources: Mapping[str, Source] | None = None
    packings: Mapping[str, WeightFormat] = field(default_factory=dict)
    turbo_hint: bool = False
    damage: str = ""


def open_named(path: Path | str, mmproj: Path | None = None) -> Checkpoint:
    """Call `open_checkpoint`, but where the data is cut short, name the model (known by its header) in the error.

    An encoder in GGUF is opened with its vision tower: the file `mmproj`, else the one beside it.
    """
    try:
        return with_vision(open_checkpoint(path), mmproj)
    except CutShort as error:
        identity = identify(error.checkpoint)
        if identity.kind == UNKNOWN:
            raise
        raise UserError(f"{error.checkpoint.path}: this is {identity.title}, but {error.what}") from error


def identify(checkpoint: Checkpoint) -> Identity:
    """Identify the model in a checkpoint. Never raises: a model of another kind gets the kind `other` and its name."""
    storage = storage_of(checkpoint)
    tensors = storage.tensors
    found = (recognise(checkpoint, storage) for recognise in RECOGNISERS)
    first = ", ".join(printable(name) for name in list(tensors)[:3])
    unknown = Identity(UNKNOWN, f"an unknown model ({len(tensors)} tensors: {first}, ...)")
    identity = next((identity for identity in found if identity), unknown)
    if storage.foreign and (identity.kind in SLOTS or identity is unknown):
        title = identity.title if identity.kind in SLOTS else "a model"
        return Identity("other", f"{title} quantized as {storage.foreign}, which this pack does not read")
    if storage.damage and identity.kind in SLOTS:
        return Identity(identity.kind, identity.title, identity.layout, damage=storage.damage)
    return identity


def expect(checkpoint: Checkpoint, slot: str) -> Identity:
    """Identify a checkpoint that must be of kind `slot`. Raises `UserError` that says what it is instead."""
    identity = identify(checkpoint)
    if identity.kind != slot:
        raise UserError(f"{checkpoint.path}: this is {identity.title}; expected {SLOTS[slot]}")
    if identity.damage:
        raise UserError(f"{checkpoint.path}: {identity.title}, but damaged or incomplete: {identity.damage}")
    if slot == "vae" and identity.packings:
        raise UserError(
            f"{checkpoint.path}: its weights are {identity.quantization}, but a VAE is read in bf16, fp16 or fp32; use "
            "the bf16 file"
        )
    return identity


def _has(tensors: Tensors, *parts: str) -> bool:
    return any(part in key for key in tensors for part in parts)


def _gguf(checkpoint: Checkpoint, storage: Storage) -> Identity | None:
    """Identity of a GGUF file whose architecture is of another model, or of a vision tower without its encoder."""
    told = checkpoint.metadata.get(ARCHITECTURE, DIT_ARCHITECTURES[0])
    if told in (*DIT_ARCHITECTURES, ENCODER_ARCHITECTURE):
        return None
    if told == VISION_ARCHITECTURE:
        return Identity("other", "the vision tower (mmproj) of an encoder in GGUF, which is loaded with the encoder")
    return Identity("other", f"a GGUF file of the architecture {printable(told)}")


def _adapter(checkpoint: Checkpoint, storage: Storage) -> Identity | None:
    """Identity of a file that modifies a model and is no model itself."""
    if is_pdd(checkpoint):
        whole = _has(storage.tensors, *DIT_MARKS) and not _has(storage.tensors, *LORA_PARTS)
        return Identity("other", PDD.format("transformer" if whole else "adapter"))
    if not _has(storage.tensors, *LORA_PARTS):
        return None
    if _has(storage.tensors, *OLD_LORA_PARTS):
        return Identity("other", "a LoRA of the older 20B Qwen-Image, which does not fit Qwen-Image 2.1")
    return Identity("lora", TITLES["lora"])


def is_pdd(checkpoint: Checkpoint) -> bool:
    """Whether a file is a PDD model: by its header, its key names, or several output layers in one tensor."""
    tensors = checkpoint.tensors
    stacked = (len(info.shape) == 3 and info.shape[2] > 1 for key, info in tensors.items() if "proj_out" in key)
    return any(key.startswith("pdd_") for key in checkpoint.metadata) or _has(tensors, "pdd_") or any(stacked)


def _control(checkpoint: Checkpoint, storage: Storage) -> Identity | None:
    found = all(any(key.endswith(mark) for key in storage.tensors) for mark in CONTROLNET_MARKS)
    return Identity("other", CONTROLNET) if found else None


def _strange(checkpoint: Checkpoint, storage: Storage) -> Identity | None:
    title = next((title for parts, title in FOREIGN_FILES.items() if _has(storage.tensors, *parts)), None)
    return Identity("other", title) if title else None


def _dit(checkpoint: Checkpoint, storage: Storage) -> Identity | None:
    tensors = storage.tensors
    prefix = dit_prefix(tensors)
    if not any(prefix + mark in tensors for mark in DIT_MARKS):
        return None
    fused = _has(tensors, ".img_mlp.gate_up.")
    layout = ("Comfy" if fused else "diffusers") + (f", keys under {prefix[:-1]!r}" if prefix else "")
    layout += ", GGUF" if ARCHITECTURE in checkpoint.metadata else ""
    # In a folder, sample_sigmas decides, and the name is anybody's choice; a single file has only its name.
    turbo = checkpoint.files == (checkpoint.path,) and "turbo" in checkpoint.path.name.lower()
    return _known("dit", TITLES["dit"], layout, storage, dit_sources, DiTConfig.from_shapes, turbo_hint=turbo)


def _encoder(checkpoint: Checkpoint, storage: Storage) -> Identity | None:
    tensors, sources = storage.tensors, encoder_sources(storage.tensors)
    if not any("layers.0.self_attn.q_proj.weight" in name for name in sources):
        return None
    if not any("self_attn.q_norm." in name for name in sources):
        return Identity("other", "Qwen2.5-VL or another language model without q_norm, not Qwen3-VL")
    gguf = is_gguf_encoder(tensors)  # whose vision tower is a file of its own
    if not gguf and not _has(tensors, "visual."):
        return Identity("other", "a language model without a vision tower, not Qwen3-VL")
    layout = "GGUF" if gguf else "Hugging Face" if _has(tensors, "language_model.layers.") else "Comfy"
    embeddings = sources.get("language_model.embed_tokens.weight")
    if embeddings and embeddings.shape[1:] == (2560,):
        return Identity("other", "Qwen3-VL-4B (width 2560); Qwen-Image 2.1 was trained with the 8B (width 4096)")
    return _known("encoder", TITLES["encoder"], layout, storage, encoder_sources, EncoderConfig.from_shapes)


def _vae(checkpoint: Checkpoint, storage: Storage) -> Identity | None:
    tensors = storage.tensors
    if not _has(tensors, "decoder.conv_in.", "decoder.conv1."):
        return None
    comfy = is_comfy_vae(tensors)
    layout = "Comfy" if comfy else "diffusers"
    sources = vae_sources(tensors)
    channels = sources["decoder.conv_in.weight"].shape[1:2] if "decoder.conv_in.weight" in sources else ()
    if channels in ((16,), (48,), (4,)):
        names = {4: "a Stable Diffusion VAE", 16: "a Wan 2.1 or Flux-like VAE", 48: "the Wan 2.2 VAE"}
        return Identity(
            "other", f"{names[channels[0]]} with {channels[0]} latent channels, not the 64 of Qwen-Image 2.1"
        )
    return _known("vae", TITLES["vae"], layout, storage, vae_sources, VAEConfig.from_shapes)


RECOGNISERS = (_gguf, _adapter, _control, _strange, _dit, _encoder, _vae)


def _known(
    kind: str,
    title: str,
    layout: str,
    storage: Storage,
    sources_of: Callable[[Tensors], dict[str, Source]],
    config_of: Callable[[Mapping[str, tuple[int, ...]]], Any],
    turbo_hint: bool = False,
) -> Identity:
    """Identity of a known kind, with its sources, and with its config where the shapes determine it."""
    sources = sources_of(storage.tensors)
    try:
        config = config_of({name: source.shape for name, source in sources.items()})
    except UserError as error:
        return Identity(kind, title, layout, damage=str(error))
    return Identity(kind, title, layout, storage.title, config, sources, storage.packings, turbo_hint)

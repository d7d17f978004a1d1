"""What a file is, from its header alone: which model, which layout, how it is quantized, what is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..checked import printable
from ..config import DiTConfig, EncoderConfig, VAEConfig
from ..errors import UserError
from .files import Checkpoint, TensorInfo
from .keymap import Source, dit_prefix, dit_sources, encoder_sources, is_comfy_vae, vae_sources

Tensors = Mapping[str, TensorInfo]

SLOTS = {
    "dit": "a Qwen-Image 2.1 transformer (qwen_image_2.1_bf16.safetensors or a diffusers transformer/ folder)",
    "encoder": "Qwen3-VL-8B (qwen3vl_8b_bf16.safetensors or a diffusers text_encoder/ folder)",
    "vae": "the Qwen-Image 2.1 VAE (qwen_image_2.1_vae_bf16.safetensors or a diffusers vae/ folder)",
}
TITLES = {
    "dit": "a Qwen-Image 2.1 transformer",
    "encoder": "a Qwen3-VL encoder",
    "vae": "a Qwen-Image 2.1 VAE",
    "lora": "a LoRA, which patches a model and is none itself",
}
RELEASED_TEXT_WIDTH = 4096


@dataclass(frozen=True)
class Identity:
    """What a checkpoint is. `kind` is dit, encoder, vae, lora or other; `title` names it for people.

    `damage` says why a checkpoint of a known kind cannot be one; it then has neither config nor sources.
    """

    kind: str
    title: str
    layout: str = ""
    quantization: str = ""
    config: Any = None
    sources: Mapping[str, Source] | None = None
    turbo_hint: bool = False
    damage: str = ""


def identify(checkpoint: Checkpoint) -> Identity:
    """Name the model in a checkpoint. Never raises for a strange file: strangers are of kind `other`, by name."""
    tensors = checkpoint.tensors
    for recognise in (_lora, _strange, _dit, _encoder, _vae):
        identity = recognise(checkpoint, tensors)
        if identity is not None:
            return identity
    first = ", ".join(printable(name) for name in list(tensors)[:3])
    return Identity("other", f"an unknown model ({len(tensors)} tensors: {first}, ...)")


def expect(checkpoint: Checkpoint, slot: str) -> Identity:
    """The identity of a checkpoint that must be of kind `slot`; else one line that says what it is instead."""
    identity = identify(checkpoint)
    if identity.kind != slot:
        raise UserError(f"{checkpoint.path}: this is {identity.title}; expected {SLOTS[slot]}")
    if identity.damage:
        raise UserError(f"{checkpoint.path}: {identity.title}, but damaged or incomplete: {identity.damage}")
    if identity.quantization not in ("bf16", "fp16", "fp32"):
        raise UserError(
            f"{checkpoint.path}: its weights are {identity.quantization}, which cannot be loaded yet; use the bf16 file"
        )
    return identity


def _has(tensors: Tensors, *parts: str) -> bool:
    return any(part in key for key in tensors for part in parts)


def _lora(checkpoint: Checkpoint, tensors: Tensors) -> Identity | None:
    if not _has(tensors, "lora_A", "lora_B", "lora_down", "lora_up"):
        return None
    if _has(tensors, "add_q_proj", "img_mlp.net", "img_mlp_net", "txt_mlp"):
        return Identity("other", "a LoRA of the older 20B Qwen-Image, which does not fit Qwen-Image 2.1")
    return Identity("lora", TITLES["lora"])


def _strange(checkpoint: Checkpoint, tensors: Tensors) -> Identity | None:
    """Models that people put into the wrong slot, recognised by keys that only they have."""
    marks: tuple[tuple[tuple[str, ...], str], ...] = (
        (("attn.add_q_proj", "img_mlp.net.", "txt_mlp.net."), "the older 20B Qwen-Image transformer"),
        (("linear_attn.",), "a Qwen3.5 model (the prompt enhancer), not the encoder"),
        (("model.diffusion_model.input_blocks.", "conditioner.embedders."), "a Stable Diffusion checkpoint"),
        (("double_blocks.", "single_blocks."), "a Flux-like transformer"),
        (("decoder.up.0.block.", "decoder.up.1.block."), "a Flux or Stable Diffusion VAE"),
        (("decoder.upsamples.0.residual.",), "a Wan 2.1 or 20B Qwen-Image VAE"),
        (("qweight", "qzeros"), "a GPTQ or AWQ quantized model, which this pack does not read"),
        (("wscales", "smooth_factor", ".proj_down"), "an SVDQuant (Nunchaku) model, which this pack does not read"),
        (("bitsandbytes", "absmax"), "a bitsandbytes-quantized model, which this pack does not read"),
    )
    for parts, title in marks:
        if _has(tensors, *parts):
            return Identity("other", title)
    return None


def _dit(checkpoint: Checkpoint, tensors: Tensors) -> Identity | None:
    prefix = dit_prefix(tensors)
    if (
        f"{prefix}txt_in.text_norm.weight" not in tensors
        and f"{prefix}transformer_blocks.0.attn.to_q.weight" not in tensors
    ):
        return None
    fused = _has(tensors, ".img_mlp.gate_up.")
    layout = ("Comfy" if fused else "diffusers") + (f", keys under {prefix[:-1]!r}" if prefix else "")
    # A folder's sample_sigmas tell, and its name is anybody's choice; only a file has nothing but its name.
    turbo = checkpoint.files == (checkpoint.path,) and "turbo" in checkpoint.path.name.lower()
    return _known("dit", TITLES["dit"], layout, tensors, dit_sources, DiTConfig.from_shapes, turbo_hint=turbo)


def _encoder(checkpoint: Checkpoint, tensors: Tensors) -> Identity | None:
    if not _has(tensors, "layers.0.self_attn.q_proj.weight"):
        return None
    if not _has(tensors, "self_attn.q_norm."):
        return Identity("other", "Qwen2.5-VL or another language model without q_norm, not Qwen3-VL")
    if not _has(tensors, "visual."):
        return Identity("other", "a language model without a vision tower, not Qwen3-VL")
    layout = "Hugging Face" if _has(tensors, "language_model.layers.") else "Comfy"
    embeddings = encoder_sources(tensors).get("language_model.embed_tokens.weight")
    if embeddings and embeddings.shape[1:] == (2560,):
        return Identity("other", "Qwen3-VL-4B (width 2560); Qwen-Image 2.1 was trained with the 8B (width 4096)")
    return _known("encoder", TITLES["encoder"], layout, tensors, encoder_sources, EncoderConfig.from_shapes)


def _vae(checkpoint: Checkpoint, tensors: Tensors) -> Identity | None:
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
    return _known("vae", TITLES["vae"], layout, tensors, vae_sources, VAEConfig.from_shapes)


def _known(
    kind: str,
    title: str,
    layout: str,
    tensors: Tensors,
    sources_of: Callable[[Tensors], dict[str, Source]],
    config_of: Callable[[Mapping[str, tuple[int, ...]]], Any],
    turbo_hint: bool = False,
) -> Identity:
    """An identity with its sources, and its sizes where the shapes tell them."""
    sources = sources_of(tensors)
    try:
        config = config_of({name: source.shape for name, source in sources.items()})
    except UserError as error:
        return Identity(kind, title, layout, damage=str(error))
    return Identity(kind, title, layout, quantization(tensors), config, sources, turbo_hint)


def quantization(tensors: Tensors) -> str:
    """The weights' storage: bf16, fp16, fp32, or the name of a quantized format."""
    counts: Counter[str] = Counter()
    for name, info in tensors.items():
        if name.endswith("weight") and len(info.shape) >= 2:
            counts[info.dtype] += info.nbytes
    quantized = {key for key in counts if key.startswith(("F8", "I8", "U8", "I32"))}
    if _has(tensors, "comfy_quant") and "I8" in counts:
        return "int8_convrot"
    if quantized & {"F8_E4M3", "F8_E5M2"}:
        return "fp8 scaled" if _has(tensors, "weight_scale", "scale_weight", "scaled_fp8") else "fp8"
    if quantized:
        return "quantized (" + ", ".join(sorted(quantized)) + ")"
    names = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp64"}
    dtype = counts.most_common(1)[0][0] if counts else "F32"
    return names.get(dtype, dtype)

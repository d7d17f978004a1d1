"""The tiny models in ComfyUI's model folders, as people have the released ones."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load_file

from tests.support import tiny_gguf
from tests.support.tiny import VOCABULARY, Tiny, comfy_dit, comfy_encoder
from tests.support.tiny_quant import LAYOUTS, block_linear, pack, write
from tests.support.tiny_tokenizer import write_tokenizer

DIT = "qwen_image_2.1_tiny.safetensors"
TURBO = "qwen_image_2.1_turbo_tiny.safetensors"
ENCODER = "qwen3vl_tiny.safetensors"
VAE = "qwen_image_2.1_vae_tiny.safetensors"
FOLDER = "qwen-image-2.1-tiny"
DIT_GGUF, ENCODER_GGUF, MMPROJ = "qwen_image_2.1_tiny-Q4_K.gguf", "Qwen3-VL-Q8_0.gguf", "mmproj-F16.gguf"
DIT_INT8, ENCODER_INT8 = "qwen_image_2.1_int8_convrot_tiny.safetensors", "qwen3vl_int8_convrot_tiny.safetensors"


def write_models(models: Path) -> Path:
    """Single files by slot, a tokenizer beside the encoder's, and the same weights in the diffusers layout."""
    for name in ("diffusion_models", "text_encoders", "vae", "loras"):
        (models / name).mkdir(parents=True)
    tiny = Tiny(models / "diffusers" / FOLDER)
    files = tiny.single_files(models / "single")
    files["dit"].rename(models / "diffusion_models" / DIT)
    files["encoder"].rename(models / "text_encoders" / ENCODER)
    files["vae"].rename(models / "vae" / VAE)
    (models / "single").rmdir()
    shutil.copy(models / "diffusion_models" / DIT, models / "diffusion_models" / TURBO)
    quantize(models / "diffusion_models" / DIT, DIT_INT8)
    quantize(models / "text_encoders" / ENCODER, ENCODER_INT8)
    write_gguf(models, tiny)
    for name in (ENCODER, ENCODER_INT8, ENCODER_GGUF):
        write_tokenizer((models / "text_encoders" / name).with_suffix(""), VOCABULARY)
    return models


def write_gguf(models: Path, tiny: Tiny) -> None:
    """Transformer, encoder and vision tower in GGUF, and in `dense/` the numbers that the first two stand for."""
    transformer = comfy_dit(tiny.transformer.state_dict())
    dense = tiny_gguf.write(
        models / "diffusion_models" / DIT_GGUF, transformer, "qwen_image21", tiny_gguf.fitting("Q4_K")
    )
    write(models / "dense" / f"{DIT_GGUF}.safetensors", dense)
    _, _, dense = tiny_gguf.write_encoder(models / "text_encoders", tiny.text_encoder.state_dict(), "Q8_0")
    encoder = write(models / "dense" / f"{ENCODER_GGUF}.safetensors", comfy_encoder(dense))
    write_tokenizer(encoder.with_suffix(""), VOCABULARY)


def quantize(source: Path, name: str, layout: str = "int8_convrot") -> tuple[Path, Path]:
    """A quantized file beside its source, an encoder's embeddings too, and one of the numbers its codes stand for."""
    is_encoder = source.parent.name == "text_encoders"

    def chosen(key: str) -> bool:
        return block_linear(key) or key == "model.embed_tokens.weight"

    tensors, metadata, dense = pack(load_file(source), LAYOUTS[layout], group=16 if is_encoder else 256, chosen=chosen)
    dense = {key: value.float() for key, value in dense.items()}
    path = write(source.with_name(name), tensors, metadata)
    return path, write(source.parents[2] / "dense" / name, dense)

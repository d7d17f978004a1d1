"""The tiny models in ComfyUI's model folders, as people have the released ones."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.tiny import VOCABULARY, Tiny
from tests.tiny_tokenizer import write_tokenizer

DIT = "qwen_image_2.1_tiny.safetensors"
TURBO = "qwen_image_2.1_turbo_tiny.safetensors"
ENCODER = "qwen3vl_tiny.safetensors"
VAE = "qwen_image_2.1_vae_tiny.safetensors"
FOLDER = "qwen-image-2.1-tiny"


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
    write_tokenizer((models / "text_encoders" / ENCODER).with_suffix(""), VOCABULARY)
    return models

"""A tiny model with random weights, written as a whole-model folder: it paints noise, but by the released code path."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from ..checkpoint.load import module_of
from ..config import DiTConfig, EncoderConfig, ScheduleConfig, TextConfig, VAEConfig, VisionConfig
from ..config_keys import DIT_KEYS, TEXT_KEYS, VAE_KEYS, VISION_KEYS, to_json
from ..tokenizer import SPECIAL_TOKENS

TEXT_WIDTH = 64
DIT = DiTConfig(layers=2, heads=1, text_width=TEXT_WIDTH)
VAE = VAEConfig(base_width=8, decoder_base_width=12)
ENCODER = EncoderConfig(
    TextConfig(width=TEXT_WIDTH, mlp_width=96, layers=2, heads=2, kv_heads=1, vocabulary=256 + len(SPECIAL_TOKENS)),
    VisionConfig(layers=27, width=32, mlp_width=48, heads=2, positions=64, out_width=TEXT_WIDTH),
)


def write_random_model(folder: Path, seed: int = 0) -> Path:
    """Write the model in the diffusers layout into `folder`; the same seed gives the same bytes."""
    torch_generator = torch.Generator().manual_seed(seed)
    parts = {"transformer": ("dit", DIT), "vae": ("vae", VAE), "text_encoder": ("encoder", ENCODER)}
    for name, (slot, config) in parts.items():
        tensors = _random_weights(module_of(slot, config), torch_generator)
        (folder / name).mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / name / "diffusion_pytorch_model.safetensors")
        _write_json(folder / name / "config.json", _json_config(config))
    _write_json(folder / "scheduler" / "scheduler_config.json", {"use_dynamic_shifting": True, **_schedule()})
    _write_json(folder / "model_index.json", {"_class_name": "QwenImage21Pipeline"})
    write_byte_tokenizer(folder / "processor")
    return folder


def _random_weights(module: nn.Module, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Weights that keep activations near unit size; norms around one, none constant."""
    tensors = {}
    for name, parameter in module.named_parameters():
        value = torch.randn(parameter.shape, generator=generator)
        if name.endswith("gamma") or (parameter.ndim == 1 and "norm" in name and name.endswith("weight")):
            value = 0.1 * value + (0 if "text_norm" in name else 1)
        elif parameter.ndim == 1:
            value *= 0.02
        else:
            value *= (parameter[0].numel()) ** -0.5
        tensors[name] = value
    return tensors


def _schedule() -> dict[str, Any]:
    values = asdict(ScheduleConfig())
    return {key: values[key] for key in values if key not in ("turbo_sigmas", "steps")}


def _json_config(config: DiTConfig | VAEConfig | EncoderConfig) -> dict[str, Any]:
    """The config under the names that diffusers and transformers give its fields."""
    if isinstance(config, EncoderConfig):
        text = to_json(TEXT_KEYS, config.text, without={"mrope_sections"})
        text["rope_scaling"] = {"mrope_section": list(config.text.mrope_sections), "rope_type": "default"}
        return {"model_type": "qwen3_vl", "text_config": text, "vision_config": to_json(VISION_KEYS, config.vision)}
    return to_json(VAE_KEYS if isinstance(config, VAEConfig) else DIT_KEYS, config)


def write_byte_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges in the Qwen file format: one token a byte, then the special ones."""
    symbols = _byte_symbols()
    vocabulary = {symbol: i for i, symbol in enumerate(symbols)}
    special = {str(len(symbols) + i): {"content": name, "special": True} for i, name in enumerate(SPECIAL_TOKENS)}
    _write_json(folder / "vocab.json", vocabulary)
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    config = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": special, "eos_token": "<|im_end|>"}
    _write_json(folder / "tokenizer_config.json", config)


def _byte_symbols() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies: itself where printable, else from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols, spare = [], 0x100
    for byte in range(256):
        symbols.append(chr(byte if byte in printable else spare))
        spare += byte not in printable
    return symbols


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")

"""The sizes of the miniature and its tokenizer, and writing a model as a whole-model folder in the diffusers layout."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..choices import COMPONENT_FOLDERS
from ..config.json_keys import DIT_KEYS, TEXT_KEYS, VAE_KEYS, VISION_KEYS, to_json
from ..config.networks import (
    LATENT_PIXELS,
    DiTConfig,
    EncoderConfig,
    ScheduleConfig,
    TextConfig,
    VAEConfig,
    VisionConfig,
)
from ..inputs.prompt import IMAGE_PAD, SYSTEM_PROMPT, VIDEO_PAD, VISION_END, VISION_START
from ..inputs.references import TEMPORAL_PATCH, VISION_MERGE
from ..inputs.tokenizer import SPECIAL_TOKENS
from . import LARGEST, SMALLEST, world

VOCABULARY = 448  # bytes, words of the toy world, special tokens
TEXT_WIDTH = 128
RESOLUTION = 96  # picture side in pixels in most of the training
DIT = DiTConfig(layers=7, heads=6, head_dim=32, text_width=TEXT_WIDTH, rope_axes=(4, 14, 14))
VAE = VAEConfig(base_width=8, decoder_base_width=8)
ENCODER = EncoderConfig(
    TextConfig(
        width=TEXT_WIDTH,
        mlp_width=256,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=32,
        vocabulary=VOCABULARY,
        mrope_sections=(6, 5, 5),
    ),
    VisionConfig(layers=2, width=48, mlp_width=96, heads=2, positions=64, deepstack=(0,), out_width=TEXT_WIDTH),
)
INDEX = {
    "_class_name": "QwenImage21Pipeline",
    "_diffusers_version": "0.42.1",
    "processor": ["transformers", "Qwen3VLProcessor"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen3VLForConditionalGeneration"],
    "transformer": ["diffusers", "QwenImage21Transformer2DModel"],
    "vae": ["diffusers", "AutoencoderKLQwenImage21"],
    "trained_sizes": [SMALLEST, LARGEST],
}
TOKEN_IDS = {
    "image_token_id": IMAGE_PAD,
    "video_token_id": VIDEO_PAD,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "size": {"shortest_edge": 32 * 32, "longest_edge": 16777216},  # area in pixels; the low minimum prevents upscaling
    "patch_size": LATENT_PIXELS,
    "temporal_patch_size": TEMPORAL_PATCH,
    "merge_size": VISION_MERGE,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
)
# What the tokenizer is trained on, besides captions.
SENTENCES = (
    SYSTEM_PROMPT,
    "system\nuser\nassistant\n",
    *(f"<image{i}> " for i in range(1, 11)),
    "Make the background transparent.",
    "Change the background to a",
    "The shape of <image1> in the color of <image2>.",
    "Move the to the. Remove the. Add a at the.",
)


def write_model(folder: Path, parts: Mapping[str, tuple[Any, Mapping[str, Tensor]]]) -> Path:
    """Write the configs and bf16 tensors of `parts` by slot (dit, vae, encoder), the schedule and the tokenizer."""
    for slot, (config, tensors) in parts.items():
        place = folder / COMPONENT_FOLDERS[slot]
        place.mkdir(parents=True, exist_ok=True)
        kept = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
        file = "model.safetensors" if slot == "encoder" else "diffusion_pytorch_model.safetensors"
        save_file(kept, place / file, {"format": "pt"})
        _write_json(place / "config.json", config_json(config))
    schedule = asdict(ScheduleConfig())
    numbers = {key: value for key, value in schedule.items() if key not in ("turbo_sigmas", "steps")}
    names = {"num_train_timesteps": 1000, "time_shift_type": "exponential", "use_dynamic_shifting": True}
    _write_json(folder / "scheduler" / "scheduler_config.json", {**names, **numbers})
    _write_json(folder / "model_index.json", INDEX)
    write_tokenizer(folder / "processor")
    _write_json(folder / "processor" / "preprocessor_config.json", PREPROCESSOR)
    (folder / "processor" / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return folder


def config_json(config: DiTConfig | VAEConfig | EncoderConfig) -> dict[str, Any]:
    """The config under the names that diffusers and transformers give its fields."""
    if isinstance(config, EncoderConfig):
        text = to_json(TEXT_KEYS, config.text, without={"mrope_sections"})
        sections = list(config.text.mrope_sections)
        text["rope_scaling"] = {"mrope_section": sections, "rope_type": "default", "mrope_interleaved": True}
        vision = to_json(VISION_KEYS, config.vision)
        first = config.text.vocabulary - len(SPECIAL_TOKENS)
        tokens = {key: first + SPECIAL_TOKENS.index(name) for key, name in TOKEN_IDS.items()}
        parts = {"text_config": text, "vision_config": vision}
        return {"model_type": "qwen3_vl", **parts, **tokens, "tie_word_embeddings": True}
    if isinstance(config, VAEConfig):
        return to_json(VAE_KEYS, config) | {"temperal_downsample": [slots == 2 for slots in config.slots]}
    return to_json(DIT_KEYS, config)


def sentences() -> Iterable[str]:
    """Texts in which every word of the toy world occurs."""
    for size, color, kind, place in product(world.SIZES, world.COLORS, world.KINDS, world.PLACES):
        yield f"A {size} {color} {kind} at the {place}, a {size} {color} {kind} and a"
    for top, bottom in product(world.GROUNDS, world.GROUNDS):
        yield f" on a {top} background. on a gradient from {top} to {bottom}. on a transparent background."
    yield from SENTENCES


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE of the toy world's words in Qwen's file format, special tokens in Qwen's order."""
    from transformers import Qwen2TokenizerFast

    size = VOCABULARY - len(SPECIAL_TOKENS)
    with TemporaryDirectory() as bytes_only:
        _write_bytes(Path(bytes_only))
        plain = Qwen2TokenizerFast.from_pretrained(bytes_only, local_files_only=True)
        learnt = plain.train_new_from_iterator(sentences(), size + 1, show_progress=False)  # one is <|endoftext|>
    folder.mkdir(parents=True, exist_ok=True)
    learnt.backend_tokenizer.model.save(str(folder))
    words = sorted(learnt.get_vocab().items(), key=lambda entry: entry[1])
    _write_json(folder / "vocab.json", {word: i for i, (word, _) in enumerate(words[1:])})
    special = {str(size + i): {"content": name, "special": True} for i, name in enumerate(SPECIAL_TOKENS)}
    config = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": special, "eos_token": "<|im_end|>"}
    _write_json(folder / "tokenizer_config.json", config)


def _write_bytes(folder: Path) -> None:
    """Write a vocabulary of single bytes: a printable byte is itself, any other a character from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols, spare = [], 0x100
    for byte in range(256):
        symbols.append(chr(byte if byte in printable else spare))
        spare += byte not in printable
    _write_json(folder / "vocab.json", {symbol: i for i, symbol in enumerate(symbols)})
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer"})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")

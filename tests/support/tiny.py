"""Small random checkpoints in every supported layout, and the diffusers pipeline with the same weights.

Sizes that single files do not determine are the released ones: head size 128, rope axes, vision-tower depth and heads,
the VAE's five stages. No tensor is constant, because a missing norm with weights of 1 would not be noticed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLQwenImage21,
    FlowMatchEulerDiscreteScheduler,
    QwenImage21Pipeline,
    QwenImage21Transformer2DModel,
)
from safetensors.torch import load_file, save_file
from torch import nn

from qwen21.checkpoint.fp8_policy import is_block_layer
from qwen21.ops.formats import Fp8Weight
from qwen21.ops.formats.fp8 import quantize_rows
from qwen21.ops.quantized import QuantLinear

from .tiny_tokenizer import Processor, write_tokenizer

TEXT_WIDTH = 64
VOCABULARY = 512
SCHEDULER = {
    "num_train_timesteps": 1000,
    "base_image_seq_len": 256,
    "max_image_seq_len": 8192,
    "base_shift": 0.5,
    "max_shift": 0.9,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}
TURBO_SIGMAS = [1.0, 0.978453, 0.95418, 0.926626, 0.89508, 0.845148, 0.704534, 0.414568]


def randomise(module: nn.Module, seed: int) -> nn.Module:
    """Fill a module with random weights that keep activations near unit size.

    Norm scales are around one, or around zero where they are stored zero-centred.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            value = torch.randn(parameter.shape, generator=generator)
            is_scale = name.endswith("gamma") or (parameter.ndim == 1 and "norm" in name and name.endswith("weight"))
            if is_scale:
                value = 0.2 * value + (0.0 if "text_norm" in name else 1.0)
            elif parameter.ndim == 1:
                value = 0.05 * value
            else:
                value = value * parameter[0].numel() ** -0.5
            parameter.copy_(value)
    return module.eval()


def transformer(seed: int = 1, layers: int = 2, heads: int = 2) -> QwenImage21Transformer2DModel:
    model = QwenImage21Transformer2DModel(num_layers=layers, num_attention_heads=heads, context_in_dim=TEXT_WIDTH)
    return randomise(model, seed)


def vae(seed: int = 2, base: int = 4, decoder_base: int = 6) -> AutoencoderKLQwenImage21:
    return randomise(AutoencoderKLQwenImage21(base_dim=base, decoder_base_dim=decoder_base), seed)


def text_encoder(seed: int = 3, width: int = TEXT_WIDTH) -> nn.Module:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    config = Qwen3VLConfig(
        text_config={
            "hidden_size": width,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 128,
            "vocab_size": VOCABULARY,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_section": [24, 20, 20],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 27,
            "hidden_size": 64,
            "intermediate_size": 48,
            "num_heads": 16,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [8, 16, 24],
            "out_hidden_size": width,
        },
    )
    config._attn_implementation = "sdpa"
    return randomise(Qwen3VLForConditionalGeneration(config), seed)


class Tiny:
    """One tiny model: its diffusers modules, its folder on disk, and single files that are written on demand."""

    def __init__(self, folder: Path, turbo: bool = False, sharded: bool = False) -> None:
        self.folder = folder
        self.turbo = turbo
        self.transformer, self.vae, self.text_encoder = transformer(), vae(), text_encoder()
        shard = {"max_shard_size": "400KB"} if sharded else {}
        self.transformer.save_pretrained(folder / "transformer", **shard)
        self.vae.save_pretrained(folder / "vae")
        self.text_encoder.save_pretrained(folder / "text_encoder")
        write_tokenizer(folder / "processor", VOCABULARY)
        scheduler = SCHEDULER | ({"use_dynamic_shifting": False, "shift_terminal": None} if turbo else {})
        _json(folder / "scheduler" / "scheduler_config.json", scheduler)
        index = {"_class_name": "QwenImage21Pipeline"} | ({"sample_sigmas": TURBO_SIGMAS} if turbo else {})
        _json(folder / "model_index.json", index)

    def pipeline(self) -> QwenImage21Pipeline:
        """The diffusers pipeline, which gives the expected values."""
        processor = Processor(self.folder / "processor")
        for config in (self.text_encoder.config, self.text_encoder.model.config):
            config.image_token_id = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
        shifting = {} if not self.turbo else {"use_dynamic_shifting": False, "shift_terminal": None}
        pipeline = QwenImage21Pipeline(
            FlowMatchEulerDiscreteScheduler(**(SCHEDULER | shifting)),
            self.vae,
            self.text_encoder,
            processor,
            self.transformer,
            sample_sigmas=TURBO_SIGMAS if self.turbo else None,
        )
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def single_files(self, folder: Path, prefix: str = "", dtype: torch.dtype = torch.float32) -> dict[str, Path]:
        """Write Comfy single files of the same weights; return their paths by slot."""
        folder.mkdir(parents=True, exist_ok=True)
        files = {
            "dit": (folder / "qwen_image_2.1.safetensors", comfy_dit(self.transformer.state_dict(), prefix)),
            "encoder": (folder / "qwen3vl_8b.safetensors", comfy_encoder(self.text_encoder.state_dict())),
            "vae": (folder / "qwen_image_2.1_vae.safetensors", comfy_vae(self.vae.state_dict())),
        }
        for path, tensors in files.values():
            save_file({name: t.to(dtype).contiguous() for name, t in tensors.items()}, path)
        return {slot: path for slot, (path, _) in files.items()}


class Opened(Tiny):
    """A model on disk in the diffusers layout, opened by diffusers and transformers themselves, in fp32."""

    def __init__(self, folder: Path) -> None:
        from transformers import Qwen3VLForConditionalGeneration

        self.folder, self.turbo = folder, False
        as_fp32 = {"torch_dtype": torch.float32}
        self.transformer = QwenImage21Transformer2DModel.from_pretrained(folder / "transformer", **as_fp32)
        self.vae = AutoencoderKLQwenImage21.from_pretrained(folder / "vae", **as_fp32)
        self.text_encoder = Qwen3VLForConditionalGeneration.from_pretrained(
            folder / "text_encoder", dtype=torch.float32, attn_implementation="sdpa"
        )


def comfy_dit(state: dict[str, torch.Tensor], prefix: str = "") -> dict[str, torch.Tensor]:
    """Convert to Comfy's single file: `gate_up` has the rows of gate_layer, then those of proj."""
    result = {}
    for name, value in state.items():
        if name.endswith("gate_layer.weight"):
            stem = name.removesuffix("gate_layer.weight")
            result[f"{prefix}{stem}gate_up.weight"] = torch.cat([value, state[f"{stem}proj.weight"]])
        elif not name.endswith("img_mlp.proj.weight"):
            result[prefix + name] = value
    return result


def comfy_encoder(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    result = {}
    for name, value in state.items():
        if name.startswith("model.language_model."):
            result["model." + name.removeprefix("model.language_model.")] = value
        elif name.startswith("model.visual."):
            result[name.removeprefix("model.")] = value
    return result


def comfy_vae(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert to Wan 2.2's names, with a time axis on convolution kernels and time_conv with its three-frame kernel."""
    residual = {
        "norm1": "residual.0",
        "conv1": "residual.2",
        "norm2": "residual.3",
        "conv2": "residual.6",
        "conv_shortcut": "shortcut",
    }
    result = {}
    for name, value in state.items():
        parts = name.split(".")
        tail = parts[-1]
        if parts[0] in ("quant_conv", "post_quant_conv"):
            new = {"quant_conv": "conv1", "post_quant_conv": "conv2"}[parts[0]] + f".{tail}"
        elif parts[1] in ("conv_in", "norm_out", "conv_out"):
            new = f"{parts[0]}.{ {'conv_in': 'conv1', 'norm_out': 'head.0', 'conv_out': 'head.2'}[parts[1]] }.{tail}"
        elif parts[1] == "mid_block" and parts[2] == "attentions":
            new = f"{parts[0]}.middle.1.{parts[4]}.{tail}"
        elif parts[1] == "mid_block":
            new = f"{parts[0]}.middle.{2 * int(parts[3])}.{residual[parts[4]]}.{tail}"
        else:
            up = parts[0] == "decoder"
            group = "upsamples" if up else "downsamples"
            if parts[3] == "resnets":
                new = f"{parts[0]}.{group}.{parts[2]}.{group}.{parts[4]}.{residual[parts[5]]}.{tail}"
            else:
                last = 3 if up else 2
                new = f"{parts[0]}.{group}.{parts[2]}.{group}.{last}.{'.'.join(parts[4:])}"
        if "time_conv" in name and tail == "weight":
            value = torch.randn(*value.shape[:2], 3, 1, 1)
        elif (
            value.ndim == 4
            and tail == "weight"
            and ".to_qkv" not in name
            and ".proj" not in name
            and "resample.1" not in name
        ):
            value = value[:, :, None]  # the shape of a causal 3-D convolution for a single frame
        result[new] = value
    return result


def rewrite(path: Path, change: dict[str, torch.Tensor | None]) -> Path:
    """Replace tensors of a safetensors file in place; None removes one."""
    tensors = load_file(path)
    for name, value in change.items():
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, path)
    return path


def _json(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def in_fp8(dit):
    """Convert every linear layer of a transformer's blocks to fp8, with a scale per row."""
    for name, layer in list(dit.named_modules()):
        if isinstance(layer, torch.nn.Linear) and is_block_layer(name):
            dit.set_submodule(name, QuantLinear(Fp8Weight(*quantize_rows(layer.weight))))

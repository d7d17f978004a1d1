"""GGUF files of the tiny models, written by the package gguf, with names as llama.cpp's converter gives them.

Nothing here uses the library, because it is tested against these files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

# Places of the fp16 scales in blocks of types that gguf does not write, and ratios that centre the values.
HALVES = {
    "Q2_K": {80: 1, 82: 1.5},
    "Q3_K": {108: 1},
    "Q4_K": {0: 1, 2: 7.5},
    "Q5_K": {0: 1, 2: 15.5},
    "Q6_K": {208: 1},
}
BLOCK_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", *HALVES)

TEXT_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
VISION_NAMES = {
    "norm1": "ln1", "norm2": "ln2", "attn.qkv": "attn_qkv", "attn.proj": "attn_out", "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
}  # fmt: skip
AROUND = {
    "merger.norm": "v.post_ln", "merger.linear_fc1": "mm.0", "merger.linear_fc2": "mm.2", "pos_embed": "v.position_embd"
}  # fmt: skip
DEEPSTACK = (8, 16, 24)


def blocks(kind: str, rows: int, columns: int, rng: np.random.Generator, size: float = 1.0) -> np.ndarray:
    """Random blocks, bytes [rows, bytes of a row], of values whose standard deviation is about `size`."""
    values, count = gguf.GGML_QUANT_SIZES[Type[kind]]
    if kind not in HALVES:
        return gguf.quants.quantize(rng.normal(0, size, (rows, columns)).astype(np.float32), Type[kind])
    data = rng.integers(0, 256, (rows * columns // values, count), dtype=np.uint8)

    def scaled(by: float) -> np.ndarray:
        for place, ratio in HALVES[kind].items():
            data[:, place : place + 2] = np.full((len(data), 1), by * ratio, np.float16).view(np.uint8)
        return gguf.quants.dequantize(data, Type[kind])

    scaled(size / scaled(1.0).std())
    return data.reshape(rows, -1)


def write(
    path: Path,
    tensors: Mapping[str, Tensor],
    architecture: str | None,
    kind_of: Callable[[str, Tensor], str],
    notes: Mapping[str, Any] | None = None,
) -> dict[str, Tensor]:
    """Write a GGUF file and return the fp32 tensors that it stands for. `kind_of` names the type of each tensor."""
    writer, dense, rng = gguf.GGUFWriter(path, architecture or "pig"), {}, np.random.default_rng(0)
    if architecture is None:
        del writer.kv_data[0]["general.architecture"]
    for key, value in (notes or {}).items():
        writer.add_array(key, value) if isinstance(value, list) else writer.add_string(key, value)
    for name, tensor in tensors.items():
        kind, shape = kind_of(name, tensor), tuple(tensor.shape)
        if kind in HALVES:
            data = blocks(kind, *shape, rng, shape[1] ** -0.5)
        else:
            data = gguf.quants.quantize(tensor.float().numpy(), Type[kind])
        writer.add_tensor(name, data, raw_dtype=Type[kind])
        dense[name] = torch.from_numpy(np.array(gguf.quants.dequantize(data, Type[kind]))).reshape(shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dense


def fitting(kind: str) -> Callable[[str, Tensor], str]:
    """Weights of linear layers in `kind` where its blocks fill their rows, else in Q8_0 or F16; vectors in F32."""

    def kind_of(name: str, tensor: Tensor) -> str:
        if tensor.ndim != 2:
            return "F32" if tensor.ndim < 2 else "F16"
        fits = (each for each in (kind, "Q8_0") if tensor.shape[1] % gguf.GGML_QUANT_SIZES[Type[each]][0] == 0)
        return next(fits, "F16")

    return kind_of


def encoder_names(state: Mapping[str, Tensor], deepstack: str = "deepstack") -> tuple[dict[str, str], dict[str, str]]:
    """Keys in GGUF by Hugging Face names: of the language model, and of the vision tower (without its first kernel)."""
    text, vision = {}, {}
    for name in state:
        stem, _, kind = name.rpartition(".")
        parts = stem.split(".")
        if stem == "model.language_model.embed_tokens":
            text[name] = "token_embd.weight"
        elif stem in ("model.language_model.norm", "lm_head"):
            text[name] = {"lm_head": "output"}.get(stem, "output_norm") + ".weight"
        elif name.startswith("model.language_model.layers."):
            text[name] = f"blk.{parts[3]}.{TEXT_NAMES['.'.join(parts[4:])]}.{kind}"
        elif name.startswith("model.visual.blocks."):
            vision[name] = f"v.blk.{parts[3]}.{VISION_NAMES['.'.join(parts[4:])]}.{kind}"
        elif name.startswith("model.visual.deepstack_merger_list."):
            short = {"linear_fc1": "fc1", "linear_fc2": "fc2", "norm": "norm"}[parts[4]]
            vision[name] = f"v.{deepstack}.{DEEPSTACK[int(parts[3])]}.{short}.{kind}"
        elif stem != "model.visual.patch_embed.proj":
            vision[name] = f"{AROUND[stem.removeprefix('model.visual.')]}.{kind}"
    return text, vision


def write_encoder(
    folder: Path, state: Mapping[str, Tensor], kind: str, deepstack: str = "deepstack"
) -> tuple[Path, Path, dict[str, Tensor]]:
    """Write an encoder's two files; return their paths and the dense weights by Hugging Face names."""
    text, vision = encoder_names(state, deepstack)
    language, tower = folder / f"Qwen3-VL-{kind}.gguf", folder / "mmproj-F16.gguf"
    told = write(language, {key: state[name] for name, key in text.items()}, "qwen3vl", fitting(kind))
    tensors = {key: state[name] for name, key in vision.items()}
    kernel = state["model.visual.patch_embed.proj.weight"]
    frames = {"v.patch_embd.weight": kernel[:, :, 0], "v.patch_embd.weight.1": kernel[:, :, 1]}
    tensors |= {"v.patch_embd.bias": state["model.visual.patch_embed.proj.bias"]}
    notes = {"general.type": "mmproj", "clip.projector_type": "qwen3vl_merger"}
    told |= write(tower, tensors | frames, "clip", lambda _, tensor: "F32" if tensor.ndim < 2 else "F16", notes)
    dense = {name: told[key] for name, key in (text | vision).items()}
    dense["model.visual.patch_embed.proj.weight"] = torch.stack([told[key] for key in frames], dim=2)
    dense["model.visual.patch_embed.proj.bias"] = told["v.patch_embd.bias"]
    return language, tower, dense

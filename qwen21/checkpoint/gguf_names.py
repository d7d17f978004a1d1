"""Names in the GGUF files of Qwen3-VL: of its language model, and of its vision tower in a file of its own (mmproj).

They come from llama.cpp's converter, and are all written here, so that a new spelling is one more line. A transformer
keeps its own names in GGUF.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from .container import TensorInfo

ARCHITECTURE = "general.architecture"  # keys of the metadata
PROJECTOR = ("clip.projector_type", "clip.vision.projector_type")
DIT_ARCHITECTURES = ("qwen_image21", "pig", "cow")  # the last two are converters' names for any diffusion model
ENCODER_ARCHITECTURE, VISION_ARCHITECTURE, VISION_PROJECTOR = "qwen3vl", "clip", "qwen3vl_merger"
EMBEDDING = "token_embd.weight"
PATCHES = "v.patch_embd.weight"  # the kernel of the first frame; that of the second has this name and `.1`

_TEXT = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_VISION = {
    "ln1": "norm1",
    "ln2": "norm2",
    "attn_qkv": "attn.qkv",
    "attn_out": "attn.proj",
    "ffn_up": "mlp.linear_fc1",
    "ffn_down": "mlp.linear_fc2",
}
_MERGER = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}
_DEEPSTACK = r"v\.(?:deepstack|deepstast)\.(\d+)\."  # older converters misspell it
_ALONE = {
    "token_embd": "language_model.embed_tokens",
    "output_norm": "language_model.norm",
    "output": "lm_head",
    "v.patch_embd": "visual.patch_embed.proj",
    "v.position_embd": "visual.pos_embed",
    "v.post_ln": "visual.merger.norm",
    "mm.0": "visual.merger.linear_fc1",
    "mm.2": "visual.merger.linear_fc2",
}


def is_gguf_encoder(tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether a file's tensors have the names of a language model in GGUF."""
    return EMBEDDING in tensors and any(key.startswith("blk.0.") for key in tensors)


def has_gguf_vision(tensors: Mapping[str, TensorInfo]) -> bool:
    return PATCHES in tensors


def encoder_names(tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Names in `TextEncoder` of a file's tensors, by their keys; an unknown key is its own name."""
    layers = sorted({int(found[1]) for key in tensors if (found := re.match(_DEEPSTACK, key))})
    return {key: _name(key, layers) for key in tensors}


def _name(key: str, deepstack: list[int]) -> str:
    """The name of one tensor. `deepstack` are the layers of the vision tower whose outputs have mergers, in order."""
    stem, _, kind = key.rpartition(".")
    if stem in _ALONE:
        return f"{_ALONE[stem]}.{kind}"
    if (found := re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)) and found[2] in _TEXT:
        return f"language_model.layers.{found[1]}.{_TEXT[found[2]]}.{kind}"
    if (found := re.fullmatch(r"v\.blk\.(\d+)\.(\w+)", stem)) and found[2] in _VISION:
        return f"visual.blocks.{found[1]}.{_VISION[found[2]]}.{kind}"
    if (found := re.fullmatch(_DEEPSTACK + r"(\w+)", stem)) and found[2] in _MERGER:
        return f"visual.deepstack_merger_list.{deepstack.index(int(found[1]))}.{_MERGER[found[2]]}.{kind}"
    return key


def gguf_key(name: str, deepstack: tuple[int, ...]) -> str:
    """The key in GGUF of the encoder's parameter `name`, the inverse of `encoder_names`; vision keys begin with `v.` or
    `mm.`. `deepstack` are the layers of the vision tower whose outputs have mergers."""
    stem, _, kind = name.rpartition(".")
    alone = _inverse(_ALONE)
    if stem in alone:
        return f"{alone[stem]}.{kind}"
    for pattern, prefix, table in (
        (r"language_model\.layers\.(\d+)\.(.+)", "blk", _TEXT),
        (r"visual\.blocks\.(\d+)\.(.+)", "v.blk", _VISION),
        (r"visual\.deepstack_merger_list\.(\d+)\.(.+)", "v.deepstack", _MERGER),
    ):
        if found := re.fullmatch(pattern, stem):
            layer = deepstack[int(found[1])] if table is _MERGER else found[1]
            return f"{prefix}.{layer}.{_inverse(table)[found[2]]}.{kind}"
    raise KeyError(name)


def _inverse(names: Mapping[str, str]) -> dict[str, str]:
    return {name: key for key, name in names.items()}

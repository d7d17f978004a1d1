"""transformers' Qwen3-VL layers, built without weights and taken out of transformers' model classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..config.json_keys import TEXT_KEYS, VISION_KEYS, to_json
from ..config.networks import EncoderConfig
from ..errors import UserError


def meta_skeleton(config: EncoderConfig) -> nn.Module:
    """transformers' Qwen3VLModel of the sizes in `config`, on the meta device, so without memory for weights."""
    try:
        from transformers import Qwen3VLConfig, Qwen3VLModel
    except ImportError as error:
        raise UserError(
            f"the text encoder needs the package transformers, 4.57 or newer ({error}); update it"
        ) from error
    text_config = to_json(TEXT_KEYS, config.text, without={"rope_base", "mrope_sections"})
    # RoPE is computed in `text_encoder.py`, but transformers 4.57 needs this entry to build; 5.x reads it too.
    text_config["rope_scaling"] = {"rope_type": "default", "mrope_section": list(config.text.mrope_sections)}
    vision_config = to_json(VISION_KEYS, config.vision)
    with torch.device("meta"):
        return Qwen3VLModel(
            Qwen3VLConfig(text_config=text_config, vision_config=vision_config, attn_implementation="sdpa")
        )


def plain(model: nn.Module, *names: str) -> nn.Module:
    """A plain `nn.Module` with the children `names` of `model`."""
    module = nn.Module()
    for name in names:
        module.add_module(name, getattr(model, name))
    return module


def inject(module: nn.Module, operations: Any, **where: Any) -> None:
    """Replace every layer with parameters below `module` by the same layer of `operations`."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            new = operations.Linear(child.in_features, child.out_features, bias=child.bias is not None, **where)
        elif isinstance(child, nn.Embedding):
            new = operations.Embedding(child.num_embeddings, child.embedding_dim, **where)
        elif isinstance(child, nn.LayerNorm):
            new = operations.LayerNorm(child.normalized_shape, eps=child.eps, **where)
        elif isinstance(child, nn.Conv3d):
            new = operations.Conv3d(
                child.in_channels, child.out_channels, child.kernel_size, stride=child.stride, **where
            )
        elif type(child).__name__.endswith("RMSNorm"):
            new = operations.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon, **where)
        else:
            if next(child.parameters(recurse=False), None) is not None:
                raise TypeError(f"{type(child).__name__} holds parameters, and no layer is known to replace it")
            inject(child, operations, **where)
            continue
        setattr(module, name, new)

"""The fields of the configurations, their keys in `config.json`, and which of them follow from tensor shapes."""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any

DIT_KEYS = {
    "layers": "num_layers",
    "heads": "num_attention_heads",
    "head_dim": "attention_head_dim",
    "in_channels": "in_channels",
    "out_channels": "out_channels",
    "text_width": "context_in_dim",
    "mlp_ratio": "mlp_ratio",
    "rope_axes": "axes_dims_rope",
    "eps": "eps",
}
VAE_KEYS = {
    "base_width": "base_dim",
    "decoder_base_width": "decoder_base_dim",
    "latent_channels": "z_dim",
    "multipliers": "dim_mult",
    "res_blocks": "num_res_blocks",
    "in_channels": "in_channels",
    "out_channels": "out_channels",
    "latents_mean": "latents_mean",
    "latents_std": "latents_std",
}
TEXT_KEYS = {
    "width": "hidden_size",
    "mlp_width": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocabulary": "vocab_size",
    "rope_base": "rope_theta",
    "mrope_sections": "mrope_section",
    "eps": "rms_norm_eps",
}
VISION_KEYS = {
    "layers": "depth",
    "width": "hidden_size",
    "mlp_width": "intermediate_size",
    "heads": "num_heads",
    "patch": "patch_size",
    "temporal_patch": "temporal_patch_size",
    "merge": "spatial_merge_size",
    "positions": "num_position_embeddings",
    "deepstack": "deepstack_visual_indexes",
    "out_width": "out_hidden_size",
}
SCHEDULE_KEYS = {
    name: name for name in ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift", "shift_terminal")
}


def to_json(keys: dict[str, str], config: Any, without: Set[str] = frozenset()) -> dict[str, Any]:
    """The fields of `config` by their keys in `config.json`, tuples as lists, except the fields `without`."""
    values = {key: getattr(config, name) for name, key in keys.items() if name not in without}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


# Fields that do not follow from shapes alone, and so are never compared with them.
UNTOLD = {"rope_axes", "eps", "latents_mean", "latents_std", "rope_base", "mrope_sections", "merge", "deepstack"}
UNTOLD_OF_VISION = UNTOLD | {"heads"}


def differences(config: Any, told: Any, without: Set[str] = frozenset()) -> Iterator[tuple[str, Any, Any]]:
    """The key, the value in `config` and that in `told` of every field where they differ and that shapes determine.

    `told` is the configuration read from tensor shapes, of the class of `config`. `without` names fields to leave out.
    """
    if hasattr(config, "vision"):
        yield from _differences(TEXT_KEYS, UNTOLD, config.text, told.text)
        if "vision" not in without:
            yield from _differences(VISION_KEYS, UNTOLD_OF_VISION, config.vision, told.vision)
    elif hasattr(config, "slots"):
        yield from _differences(VAE_KEYS | {"slots": "temperal_downsample"}, UNTOLD | without, config, told)
    else:
        yield from _differences(DIT_KEYS, UNTOLD, config, told)


def _differences(keys: dict[str, str], untold: set[str], config: Any, told: Any) -> Iterator[tuple[str, Any, Any]]:
    for name, key in keys.items():
        got, expected = getattr(config, name), getattr(told, name)
        if name not in untold and got != expected:
            yield (key, _flags(got), _flags(expected)) if name == "slots" else (key, got, expected)


def _flags(slots: tuple[int, ...]) -> list[bool]:
    return [slot == 2 for slot in slots]

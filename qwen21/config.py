"""Sizes of the networks as frozen dataclasses: from a diffusers `config.json`, or from the shapes of a checkpoint.

The defaults are the released model's. What tensor shapes cannot tell (rope axes and base, eps, vision heads, latent
statistics, schedule numbers) is always the released constant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import UserError
from .latent_statistics import LATENTS_MEAN, LATENTS_STD

Shapes = Mapping[str, tuple[int, ...]]

MAX_REFERENCES = 10
LATENT_PIXELS = 16  # pixels per latent cell, each way
SIZE_MULTIPLE = 32  # one vision token covers 2x2 latent cells, so sizes are multiples of 32 pixels


def _shape(shapes: Shapes, name: str, rank: int) -> tuple[int, ...]:
    """Shape of the tensor `name`; `UserError` if it is absent or not of that rank."""
    if name not in shapes:
        raise UserError(f"tensor {name!r} is missing, so the model's size cannot be read; is the file complete?")
    shape = tuple(shapes[name])
    if len(shape) != rank:
        raise UserError(f"tensor {name!r} has shape {list(shape)}, expected {rank} dimensions; is the file damaged?")
    return shape


def _count(shapes: Shapes, prefix: str) -> int:
    """Number of consecutive `prefix` + index + `.` groups, from 0. A gap is a damaged file."""
    found = {int(key[len(prefix) :].split(".", 1)[0]) for key in shapes if _is_indexed(key, prefix)}
    if found != set(range(len(found))):
        missing = min(set(range(max(found) + 1)) - found)
        raise UserError(f"'{prefix}{missing}' is missing between others that are there; is a shard missing?")
    return len(found)


def _is_indexed(key: str, prefix: str) -> bool:
    return key.startswith(prefix) and key[len(prefix) :].split(".", 1)[0].isdigit()


def _pick(cls: type, config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The entries of a JSON config that a dataclass knows, lists as tuples; absent ones keep the default."""
    values = {field_name: config[key] for field_name, key in names.items() if config.get(key) is not None}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


@dataclass(frozen=True)
class DiTConfig:
    """Sizes of the diffusion transformer. Source: released `transformer/config.json`."""

    layers: int = 32
    heads: int = 32
    head_dim: int = 128
    in_channels: int = 64
    out_channels: int = 64
    text_width: int = 4096
    mlp_ratio: int = 3
    rope_axes: tuple[int, int, int] = (16, 56, 56)
    rope_base: int = 10000
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if sum(self.rope_axes) != self.head_dim:
            raise UserError(
                f"rope axes {self.rope_axes} add up to {sum(self.rope_axes)}, but the head size is {self.head_dim}; "
                "they must be equal"
            )

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def mlp_width(self) -> int:
        return self.width * self.mlp_ratio

    @classmethod
    def from_diffusers(cls, config: Mapping[str, Any]) -> DiTConfig:
        if config.get("patch_size", 1) != 1:
            raise UserError(f"patch_size is {config['patch_size']}, but Qwen-Image 2.1 has 1; is this another model?")
        if not config.get("causal_condition", True):
            raise UserError(
                "causal_condition is off, but every Qwen-Image 2.1 release has it on: its prefix must not depend on "
                "the "
                "step; is this another model?"
            )
        names = {
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
        return cls(**_pick(cls, config, names))

    @classmethod
    def from_shapes(cls, shapes: Shapes) -> DiTConfig:
        """From tensors named as in `dit.py` (split `to_q`, `gate_layer`, `proj`)."""
        width, in_channels = _shape(shapes, "img_in.weight", 2)
        (head_dim,) = _shape(shapes, "transformer_blocks.0.attn.norm_q.weight", 1)
        mlp_width, _ = _shape(shapes, "transformer_blocks.0.img_mlp.proj.weight", 2)
        out_channels, _ = _shape(shapes, "proj_out.weight", 2)
        (text_width,) = _shape(shapes, "txt_in.text_norm.weight", 1)
        if width % head_dim or mlp_width % width:
            raise UserError(
                f"width {width} is not a multiple of the head size {head_dim}, or the MLP width {mlp_width} not of "
                f"{width}; this is not a Qwen-Image 2.1 transformer"
            )
        return cls(
            layers=_count(shapes, "transformer_blocks."),
            heads=width // head_dim,
            head_dim=head_dim,
            in_channels=in_channels,
            out_channels=out_channels,
            text_width=text_width,
            mlp_ratio=mlp_width // width,
        )


@dataclass(frozen=True)
class VAEConfig:
    """Sizes of the RGBA VAE. Source: released `vae/config.json`.

    `slots[i]` is the number of time slots (f_t) of stage i's shortcut in the encoder; the decoder runs them backwards.
    """

    base_width: int = 96
    decoder_base_width: int = 144
    latent_channels: int = 64
    multipliers: tuple[int, ...] = (1, 2, 4, 8, 8)
    res_blocks: int = 2
    in_channels: int = 4
    out_channels: int = 4
    slots: tuple[int, ...] = (1, 2, 2, 2)
    latents_mean: tuple[float, ...] = field(default=LATENTS_MEAN, repr=False)
    latents_std: tuple[float, ...] = field(default=LATENTS_STD, repr=False)

    def __post_init__(self) -> None:
        if len(self.slots) != len(self.multipliers) - 1:
            raise UserError(
                f"the VAE has {len(self.multipliers)} stages but {len(self.slots)} resampling flags; expected one "
                "fewer than stages"
            )
        for name in ("latents_mean", "latents_std"):
            if len(getattr(self, name)) != self.latent_channels:
                raise UserError(
                    f"{name} has {len(getattr(self, name))} values but the VAE has {self.latent_channels} latent "
                    "channels; they must be equal"
                )

    @classmethod
    def from_diffusers(cls, config: Mapping[str, Any]) -> VAEConfig:
        if config.get("patch_size") not in (None, 1) or config.get("is_residual") is False:
            raise UserError(
                "this VAE's config is of another family (patch_size or is_residual differ); expected "
                "AutoencoderKLQwenImage21"
            )
        names = {
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
        values = _pick(cls, config, names)
        if config.get("temperal_downsample") is not None:
            values["slots"] = tuple(2 if flag else 1 for flag in config["temperal_downsample"])
        return cls(**values)

    @classmethod
    def from_shapes(cls, shapes: Shapes) -> VAEConfig:
        """From tensors named as in `vae.py` (diffusers names)."""
        decoder_top, latent_channels = _shape(shapes, "decoder.conv_in.weight", 4)[:2]
        stages = _count(shapes, "decoder.up_blocks.")
        widths = [_shape(shapes, f"decoder.up_blocks.{i}.resnets.0.conv1.weight", 4)[0] for i in range(stages)]
        multipliers = cls().multipliers
        if len(multipliers) != stages or decoder_top % multipliers[-1]:
            raise UserError(f"this VAE has {stages} decoder stages, expected {len(multipliers)}; is this another VAE?")
        decoder_base = decoder_top // multipliers[-1]
        if [decoder_base * m for m in multipliers[::-1]] != widths:
            raise UserError(f"this VAE's decoder widths are {widths}, which no Qwen-Image 2.1 VAE has")
        slots = tuple(
            2 if f"decoder.up_blocks.{stages - 2 - i}.upsampler.time_conv.weight" in shapes else 1
            for i in range(stages - 1)
        )
        has_time = any(key.endswith("time_conv.weight") for key in shapes)
        has_encoder = "encoder.conv_in.weight" in shapes
        return cls(
            base_width=_shape(shapes, "encoder.conv_in.weight", 4)[0] if has_encoder else decoder_base * 2 // 3,
            decoder_base_width=decoder_base,
            latent_channels=latent_channels,
            res_blocks=_count(shapes, "decoder.up_blocks.0.resnets.") - 1,
            in_channels=_shape(shapes, "encoder.conv_in.weight", 4)[1] if has_encoder else 4,
            out_channels=_shape(shapes, "decoder.conv_out.weight", 4)[0],
            slots=slots if has_time else cls().slots,
        )


@dataclass(frozen=True)
class TextConfig:
    """Sizes of the Qwen3-VL language model."""

    width: int = 4096
    mlp_width: int = 12288
    layers: int = 36
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 151936
    rope_base: float = 5_000_000.0
    mrope_sections: tuple[int, int, int] = (24, 20, 20)
    eps: float = 1e-6


@dataclass(frozen=True)
class VisionConfig:
    """Sizes of the Qwen3-VL vision tower."""

    layers: int = 27
    width: int = 1152
    mlp_width: int = 4304
    heads: int = 16
    patch: int = 16
    temporal_patch: int = 2
    merge: int = 2
    positions: int = 2304
    deepstack: tuple[int, ...] = (8, 16, 24)
    out_width: int = 4096


@dataclass(frozen=True)
class EncoderConfig:
    """Sizes of the Qwen3-VL encoder. Source: released `text_encoder/config.json`."""

    text: TextConfig = TextConfig()
    vision: VisionConfig = VisionConfig()

    @classmethod
    def from_transformers(cls, config: Mapping[str, Any]) -> EncoderConfig:
        """From a Hugging Face `config.json`, with `rope_theta` and `rope_scaling` (4.x) or `rope_parameters` (5.x)."""
        if config.get("model_type", "qwen3_vl") != "qwen3_vl":
            raise UserError(f"the text encoder is of type {config['model_type']!r}, expected 'qwen3_vl' (Qwen3-VL-8B)")
        text, vision = config.get("text_config") or {}, config.get("vision_config") or {}
        rope = {**(text.get("rope_scaling") or {}), **(text.get("rope_parameters") or {})}
        values = _pick(
            TextConfig,
            {**text, **rope},
            {
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
            },
        )
        vision_values = _pick(
            VisionConfig,
            vision,
            {
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
            },
        )
        return cls(TextConfig(**values), VisionConfig(**vision_values))

    @classmethod
    def from_shapes(cls, shapes: Shapes) -> EncoderConfig:
        """From tensors named as in `Qwen3VLModel` (`language_model.*`, `visual.*`)."""
        vocabulary, width = _shape(shapes, "language_model.embed_tokens.weight", 2)
        layer = "language_model.layers.0."
        (head_dim,) = _shape(shapes, layer + "self_attn.q_norm.weight", 1)
        text = TextConfig(
            width=width,
            mlp_width=_shape(shapes, layer + "mlp.gate_proj.weight", 2)[0],
            layers=_count(shapes, "language_model.layers."),
            heads=_shape(shapes, layer + "self_attn.q_proj.weight", 2)[0] // head_dim,
            kv_heads=_shape(shapes, layer + "self_attn.k_proj.weight", 2)[0] // head_dim,
            head_dim=head_dim,
            vocabulary=vocabulary,
        )
        vision_width, _, temporal_patch, patch, _ = _shape(shapes, "visual.patch_embed.proj.weight", 5)
        vision = VisionConfig(
            layers=_count(shapes, "visual.blocks."),
            width=vision_width,
            mlp_width=_shape(shapes, "visual.blocks.0.mlp.linear_fc1.weight", 2)[0],
            patch=patch,
            temporal_patch=temporal_patch,
            positions=_shape(shapes, "visual.pos_embed.weight", 2)[0],
            out_width=_shape(shapes, "visual.merger.linear_fc2.weight", 2)[0],
        )
        return cls(text, vision)


@dataclass(frozen=True)
class ScheduleConfig:
    """Numbers of the base schedule, and the fixed sigmas of Turbo. Source: released scheduler configurations."""

    base_image_seq_len: int = 256
    max_image_seq_len: int = 8192
    base_shift: float = 0.5
    max_shift: float = 0.9
    shift_terminal: float = 0.02
    steps: int = 40
    turbo_sigmas: tuple[float, ...] = (1.0, 0.978453, 0.95418, 0.926626, 0.89508, 0.845148, 0.704534, 0.414568)

    @classmethod
    def from_diffusers(cls, config: Mapping[str, Any], sample_sigmas: list[float] | None = None) -> ScheduleConfig:
        """From `scheduler_config.json` and the `sample_sigmas` of `model_index.json`.

        A Turbo folder's scheduler has no dynamic shift; the base numbers then stay the released ones.
        """
        values: dict[str, Any] = {}
        if config.get("use_dynamic_shifting", True):
            names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift", "shift_terminal")
            values = _pick(cls, config, {name: name for name in names})
        if sample_sigmas:
            values["turbo_sigmas"] = tuple(float(s) for s in sample_sigmas)
        return cls(**values)

"""Sizes of the networks as frozen dataclasses, read from a diffusers `config.json` or from a checkpoint's shapes.

The defaults are the released model's. Values that do not follow from tensor shapes (RoPE axes and base, eps, vision
heads, latent statistics, schedule numbers) are then the released constants.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from ..errors import UserError
from .json_keys import DIT_KEYS, SCHEDULE_KEYS, TEXT_KEYS, VAE_KEYS, VISION_KEYS
from .latent_statistics import LATENTS_MEAN, LATENTS_STD
from .validate import LARGEST, Within, count_of, flag, flags, pick, quotient, sample_sigmas, shape_of, short, table

Shapes = Mapping[str, tuple[int, ...]]

MAX_REFERENCES = 10
MAX_BATCH = 64
LATENT_PIXELS = 16  # pixels per latent cell, each way
SHIFTED_TOKENS = 65536  # latent tokens of 4096 x 4096 pixels
MOST_SHIFT = 15.0  # above it the schedule's first steps are all 1 in fp32; the released shift reaches 3.8
SIZE_MULTIPLE = 32  # one vision token covers 2x2 latent cells, so sizes are multiples of 32 pixels


Ratio = Annotated[float, Within(1e-12, 0.1)]
Base = Annotated[float, Within(1.0, 1e12)]


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
    eps: Ratio = 1e-6

    def __post_init__(self) -> None:
        if any(axis % 2 for axis in self.rope_axes):
            raise UserError(
                f"rope axes are {self.rope_axes}, expected even numbers; each pair of channels turns together"
            )
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
            raise UserError(
                f"patch_size is {short(config['patch_size'])}, but Qwen-Image 2.1 has 1; is this another model?"
            )
        if not flag("causal_condition", config.get("causal_condition", True)):
            raise UserError(
                "causal_condition is false, but every Qwen-Image 2.1 release has it on: its prefix must not depend on "
                "the step; is this another model?"
            )
        return cls(**pick(cls, config, DIT_KEYS))

    @classmethod
    def from_shapes(cls, shapes: Shapes) -> DiTConfig:
        """The sizes in `shapes` of tensors named as in `models/dit.py` (split `to_q`, `gate_layer`, `proj`)."""
        width, in_channels = shape_of(shapes, "img_in.weight", 2)
        (head_dim,) = shape_of(shapes, "transformer_blocks.0.attn.norm_q.weight", 1)
        mlp_width, _ = shape_of(shapes, "transformer_blocks.0.img_mlp.proj.weight", 2)
        out_channels, _ = shape_of(shapes, "proj_out.weight", 2)
        (text_width,) = shape_of(shapes, "txt_in.text_norm.weight", 1)
        return cls(
            layers=count_of(shapes, "transformer_blocks."),
            heads=quotient(width, head_dim, "the width", "the head size"),
            head_dim=head_dim,
            in_channels=in_channels,
            out_channels=out_channels,
            text_width=text_width,
            mlp_ratio=quotient(mlp_width, width, "the MLP width", "the width"),
            rope_axes=(head_dim // 8, head_dim * 7 // 16, head_dim * 7 // 16),  # the released shares
        )


@dataclass(frozen=True)
class VAEConfig:
    """Sizes of the RGBA VAE. Source: released `vae/config.json`.

    `slots[i]` is the number of time slots (f_t) of the shortcut of encoder stage i; the decoder has them reversed.
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
    latents_std: tuple[Annotated[float, Within(1e-6, 1e6)], ...] = field(default=LATENTS_STD, repr=False)

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
        if config.get("patch_size") not in (None, 1) or not flag("is_residual", config.get("is_residual", True)):
            raise UserError(
                "this VAE's config is of another family (patch_size or is_residual differ); expected "
                "AutoencoderKLQwenImage21"
            )
        values = pick(cls, config, VAE_KEYS)
        if "temperal_downsample" in config:
            doubled = flags("temperal_downsample", config["temperal_downsample"])
            values["slots"] = tuple(2 if two else 1 for two in doubled)
        return cls(**values)

    @classmethod
    def from_shapes(cls, shapes: Shapes) -> VAEConfig:
        """The sizes in `shapes` of tensors named as in `models/vae.py` (diffusers names)."""
        decoder_top, latent_channels = shape_of(shapes, "decoder.conv_in.weight", 4)[:2]
        stages = count_of(shapes, "decoder.up_blocks.")
        widths = [shape_of(shapes, f"decoder.up_blocks.{i}.resnets.0.conv1.weight", 4)[0] for i in range(stages)]
        multipliers = cls().multipliers
        if len(multipliers) != stages or decoder_top % multipliers[-1]:
            raise UserError(f"this VAE has {stages} decoder stages, expected {len(multipliers)}; is this another VAE?")
        decoder_base = decoder_top // multipliers[-1]
        if [decoder_base * m for m in multipliers[::-1]] != widths:
            raise UserError(f"this VAE's decoder widths are {widths}, which no Qwen-Image 2.1 VAE has")
        base, in_channels = max(decoder_base * 2 // 3, 1), 4
        if "encoder.conv_in.weight" in shapes:
            base, in_channels = shape_of(shapes, "encoder.conv_in.weight", 4)[:2]
        return cls(
            base_width=base,
            decoder_base_width=decoder_base,
            latent_channels=latent_channels,
            res_blocks=count_of(shapes, "decoder.up_blocks.0.resnets.") - 1,
            in_channels=in_channels,
            out_channels=shape_of(shapes, "decoder.conv_out.weight", 4)[0],
            slots=tuple(_slots(shapes, i, released) for i, released in enumerate(cls().slots)),
        )


def _slots(shapes: Shapes, stage: int, released: int) -> int:
    """The number of time slots of a VAE stage: two where it has a `time_conv`, else the `released` number.

    Pictures need no `time_conv`, so a file may lack some. One in a stage that has none in the released VAE means
    another VAE, if encoder and decoder agree.
    """
    mirrored = len(VAEConfig().slots) - 1 - stage
    names = [f"encoder.down_blocks.{stage}.downsampler", f"decoder.up_blocks.{mirrored}.upsampler"]
    names = [f"{name}.time_conv.weight" for name in names if f"{name}.resample.1.weight" in shapes]
    present = [name for name in names if name in shapes]
    if released == 2 or not present:
        return released
    if len(present) < len(names):
        raise UserError(
            f"it has the tensor {short(present[0])} but not {short(next(n for n in names if n not in present))}, so "
            "how its stages work cannot be told"
        )
    return 2


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
    rope_base: Base = 5_000_000.0
    mrope_sections: tuple[int, int, int] = (24, 20, 20)
    eps: Ratio = 1e-6

    def __post_init__(self) -> None:
        quotient(self.heads, self.kv_heads, "the number of heads", "the number of key-value heads")


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
    deepstack: tuple[Annotated[int, Within(0, LARGEST)], ...] = (8, 16, 24)
    out_width: int = 4096


@dataclass(frozen=True)
class EncoderConfig:
    """Sizes of the Qwen3-VL encoder. Source: released `text_encoder/config.json`."""

    text: TextConfig = TextConfig()
    vision: VisionConfig = VisionConfig()

    def require_buildable(self) -> None:
        """Raise `UserError` where sizes do not match. Not done on creation, because shapes do not give all sizes."""
        text, vision = self.text, self.vision
        if vision.out_width != text.width:
            raise UserError(f"out_hidden_size is {vision.out_width}, expected the language model's width {text.width}")
        if text.head_dim % 2 or 2 * sum(text.mrope_sections) > text.head_dim:
            raise UserError(
                f"mrope_section is {text.mrope_sections}, expected a sum of at most half the head size "
                f"{text.head_dim}; a file of weights cannot tell it: give the folder with its config.json"
            )
        if vision.width % (4 * vision.heads):
            raise UserError(
                f"num_heads is {vision.heads}, expected heads of a multiple of 4 channels in the vision tower's width "
                f"{vision.width}"
            )
        if math.isqrt(vision.positions) ** 2 != vision.positions:
            raise UserError(f"num_position_embeddings is {vision.positions}, expected a square number")
        rising = sorted(set(vision.deepstack))
        if list(vision.deepstack) != rising or not all(i < vision.layers for i in rising):
            raise UserError(
                f"deepstack_visual_indexes is {short(vision.deepstack)}, expected rising numbers below the vision "
                f"tower's {vision.layers} layers"
            )

    @classmethod
    def from_transformers(cls, config: Mapping[str, Any]) -> EncoderConfig:
        """The sizes in a Hugging Face `config.json`, with `rope_theta` and `rope_scaling` (transformers 4.x) or
        `rope_parameters` (5.x)."""
        if config.get("model_type", "qwen3_vl") != "qwen3_vl":
            raise UserError(
                f"the text encoder is of type {short(config['model_type'])}, expected 'qwen3_vl' (Qwen3-VL-8B)"
            )
        text, vision = table(config, "text_config"), table(config, "vision_config")
        rope = {**table(text, "rope_scaling", null=True), **table(text, "rope_parameters", null=True)}
        values = pick(TextConfig, {**text, **rope}, TEXT_KEYS)
        vision_values = pick(VisionConfig, vision, VISION_KEYS)
        return cls(TextConfig(**values), VisionConfig(**vision_values))

    @classmethod
    def from_shapes(cls, shapes: Shapes) -> EncoderConfig:
        """The sizes in `shapes` of tensors named as in `Qwen3VLModel` (`language_model.*`, `visual.*`).

        Without a vision tower, its sizes are the released ones.
        """
        vocabulary, width = shape_of(shapes, "language_model.embed_tokens.weight", 2)
        layer = "language_model.layers.0."
        (head_dim,) = shape_of(shapes, layer + "self_attn.q_norm.weight", 1)
        queries, keys = (shape_of(shapes, f"{layer}self_attn.{name}_proj.weight", 2)[0] for name in "qk")
        text = TextConfig(
            width=width,
            mlp_width=shape_of(shapes, layer + "mlp.gate_proj.weight", 2)[0],
            layers=count_of(shapes, "language_model.layers."),
            heads=quotient(queries, head_dim, "the queries' width", "the head size"),
            kv_heads=quotient(keys, head_dim, "the keys' width", "the head size"),
            head_dim=head_dim,
            vocabulary=vocabulary,
        )
        if not any(name.startswith("visual.") for name in shapes):
            return cls(text, VisionConfig(out_width=width))
        vision_width, _, temporal_patch, patch, _ = shape_of(shapes, "visual.patch_embed.proj.weight", 5)
        vision = VisionConfig(
            layers=count_of(shapes, "visual.blocks."),
            width=vision_width,
            mlp_width=shape_of(shapes, "visual.blocks.0.mlp.linear_fc1.weight", 2)[0],
            patch=patch,
            temporal_patch=temporal_patch,
            positions=shape_of(shapes, "visual.pos_embed.weight", 2)[0],
            out_width=shape_of(shapes, "visual.merger.linear_fc2.weight", 2)[0],
        )
        return cls(text, vision)


@dataclass(frozen=True)
class ScheduleConfig:
    """Numbers of the base schedule, and the fixed sigmas of Turbo. Source: released scheduler configurations."""

    base_image_seq_len: int = 256
    max_image_seq_len: int = 8192
    base_shift: float = 0.5
    max_shift: float = 0.9
    shift_terminal: Annotated[float, Within(0.0, 0.99)] = 0.02
    steps: int = 40
    turbo_sigmas: tuple[float, ...] = (1.0, 0.978453, 0.95418, 0.926626, 0.89508, 0.845148, 0.704534, 0.414568)

    def __post_init__(self) -> None:
        if self.max_image_seq_len <= self.base_image_seq_len:
            raise UserError(
                f"max_image_seq_len is {self.max_image_seq_len}, expected more than base_image_seq_len, which is "
                f"{self.base_image_seq_len}; download the scheduler's configuration again"
            )
        slope = (self.max_shift - self.base_shift) / (self.max_image_seq_len - self.base_image_seq_len)
        shifts = [self.base_shift + slope * (tokens - self.base_image_seq_len) for tokens in (1, SHIFTED_TOKENS)]
        if max(map(abs, shifts)) > MOST_SHIFT:
            raise UserError(
                f"base_shift {self.base_shift:g} and max_shift {self.max_shift:g} shift pictures by {shifts[0]:g} to "
                f"{shifts[1]:g}, expected at most {MOST_SHIFT:g}; download the scheduler's configuration again"
            )

    @classmethod
    def from_diffusers(cls, config: Mapping[str, Any], turbo_sigmas: tuple[float, ...] | None = None) -> ScheduleConfig:
        """The schedule in `scheduler_config.json`, with the checked `sample_sigmas` of `model_index.json`.

        A Turbo folder's scheduler has no dynamic shift; the base schedule then keeps its released numbers.
        """
        values: dict[str, Any] = {}
        if flag("use_dynamic_shifting", config.get("use_dynamic_shifting", True)):
            values = pick(cls, config, SCHEDULE_KEYS)
        if turbo_sigmas is not None:
            values["turbo_sigmas"] = sample_sigmas(turbo_sigmas)
        return cls(**values)

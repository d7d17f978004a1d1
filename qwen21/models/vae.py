"""The RGBA VAE, for still images: pixels [B, 4, H, W] in [-1, 1] <-> raw latents [B, 64, H/16, W/16].

Parameters are named as in diffusers' `AutoencoderKLQwenImage21`, without `time_conv` weights, which only videos use.
All tensors are 4-D: padding of large 5-D tensors returns zeros on some Apple machines. Encoder and decoder each have a
coarse part, whose attention sees the whole picture, and a local, fine part, which `vae_tiling.py` runs in exact tiles.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config.networks import VAEConfig
from ..errors import UserError

QUERY_CHUNK = 4096  # queries per attention call; limits the scores where no fused kernel has this head dimension
CASTS_AT_USE = "comfy_cast_weights"  # ComfyUI sets it on layers that cast their weights to the input's dtype

log = logging.getLogger(__name__)

Crop = Callable[[Tensor, int], Tensor]


class NonFinite(ArithmeticError):
    """Raised for a result with NaN or infinity, and caught by `VAE.checked`."""


def is_finite(x: Tensor) -> bool:
    low, high = torch.aminmax(x)  # both are NaN if any value is; allocates nothing of x's size
    return bool(torch.isfinite(low) & torch.isfinite(high))


def finite(x: Tensor) -> Tensor:
    if not is_finite(x):
        raise NonFinite
    return x


def packed(x: Tensor) -> Tensor:
    """`x` in the memory format its device is fastest with: channels_last takes a third less time on a CPU."""
    on_cpu = x.device.type == "cpu"
    return x.contiguous(memory_format=torch.channels_last if on_cpu else torch.contiguous_format)


class RMSNorm(nn.Module):
    """x / |x| * sqrt(C) * gamma over the channels of [B, C, H, W]; |x| is computed in fp32 for half dtypes."""

    def __init__(self, channels: int, ones: int, *, dtype=None, device=None):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels, *[1] * ones, dtype=dtype, device=device))

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The norm of x, written to `out`, which may be `x`: that rounds once and needs no fp32 copy of a half `x`."""
        channels = x.shape[1]
        norm = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
        scale = channels**0.5 / norm.clamp_min(1e-12)
        if torch.is_grad_enabled():  # autograd does not support `out`
            return x * scale * self.gamma.to(x.device, x.dtype).view(1, channels, 1, 1)
        out = torch.mul(x, scale, out=torch.empty_like(x) if out is None else out)
        return out.mul_(self.gamma.to(x.device, x.dtype).view(1, channels, 1, 1))


class ResidualBlock(nn.Module):
    """Norm, SiLU, conv3, norm, SiLU, conv3, plus the input (through a 1x1 convolution where widths differ)."""

    def __init__(self, inner: int, outer: int, operations, **kwargs):
        super().__init__()
        self.norm1 = RMSNorm(inner, 3, **kwargs)
        self.conv1 = operations.Conv2d(inner, outer, 3, padding=1, **kwargs)
        self.norm2 = RMSNorm(outer, 3, **kwargs)
        self.conv2 = operations.Conv2d(outer, outer, 3, padding=1, **kwargs)
        self.conv_shortcut = operations.Conv2d(inner, outer, 1, **kwargs) if inner != outer else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x), inplace=True))
        h = self.conv2(F.silu(self.norm2(h, out=h), inplace=True))
        return h.add_(x if self.conv_shortcut is None else self.conv_shortcut(x))


def residual_blocks(inner: int, outer: int, count: int, operations, **kwargs) -> nn.ModuleList:
    inputs = [inner] + [outer] * (count - 1)
    return nn.ModuleList(ResidualBlock(width, outer, operations, **kwargs) for width in inputs)


class Attention(nn.Module):
    """Single-head attention over all pixels of [B, C, H, W], plus the input."""

    def __init__(self, channels: int, operations, **kwargs):
        super().__init__()
        self.norm = RMSNorm(channels, 2, **kwargs)
        self.to_qkv = operations.Conv2d(channels, 3 * channels, 1, **kwargs)
        self.proj = operations.Conv2d(channels, channels, 1, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.to_qkv(self.norm(x)).flatten(2).transpose(1, 2).contiguous()  # [B, HW, 3C]
        q, k, v = qkv.unsqueeze(1).chunk(3, dim=-1)  # each [B, 1, HW, C]
        out = torch.cat([F.scaled_dot_product_attention(part, k, v) for part in q.split(QUERY_CHUNK, dim=2)], dim=2)
        return self.proj(out.squeeze(1).transpose(1, 2).reshape(x.shape)).add_(x)


class MidBlock(nn.Module):
    def __init__(self, channels: int, operations, **kwargs):
        super().__init__()
        self.resnets = residual_blocks(channels, channels, 2, operations, **kwargs)
        self.attentions = nn.ModuleList([Attention(channels, operations, **kwargs)])

    def forward(self, x: Tensor) -> Tensor:
        return self.resnets[1](self.attentions[0](self.resnets[0](x)))


def resampler(channels: int, operations, *, down: bool, **kwargs) -> nn.ModuleDict:
    """A layer that halves the size (stride 2, padded right and bottom only) or doubles it (nearest, then conv3)."""
    first = nn.ZeroPad2d((0, 1, 0, 1)) if down else nn.Upsample(scale_factor=2.0, mode="nearest-exact")
    conv = operations.Conv2d(channels, channels, 3, **({"stride": 2} if down else {"padding": 1}), **kwargs)
    return nn.ModuleDict({"resample": nn.Sequential(first, conv)})


def unknown_stage(part: str, inner: int, outer: int, slots: int) -> UserError:
    got = f"a VAE {part} stage goes from {inner} to {outer} channels with {slots} time slots"
    return UserError(f"{got}, which no Qwen-Image 2.1 VAE has; is this another VAE?")


class DownStage(nn.Module):
    """Residual blocks, then half the size (in all but the last stage), plus a shortcut around the stage.

    The shortcut reads 2x2 pixels and `slots` time slots as channels (c, t, y, x), all slots but the last zero, and
    averages consecutive channels down to the output width. Where an average covers whole 2x2 cells, that is average
    pooling into every `step`-th channel, and adds nothing to the channels between.
    """

    def __init__(self, inner: int, outer: int, blocks: int, slots: int, operations, *, down: bool, **kwargs):
        super().__init__()
        self.step = outer // inner
        self.share = self.step / slots  # the share of nonzero values in one average
        if outer % inner or slots % self.step or (not down and inner != outer):
            raise unknown_stage("encoder", inner, outer, slots)
        self.resnets = residual_blocks(inner, outer, blocks, operations, **kwargs)
        self.downsampler = resampler(outer, operations, down=True, **kwargs) if down else None

    def forward(self, x: Tensor) -> Tensor:
        source = x
        for resnet in self.resnets:
            x = resnet(x)
        if self.downsampler is None:
            return x.add_(source)
        x = self.downsampler["resample"](x)
        x[:, self.step - 1 :: self.step].add_(F.avg_pool2d(source, 2), alpha=self.share)
        return x


class UpStage(nn.Module):
    """Residual blocks, then double the size, plus a shortcut around the stage; the last stage has only the blocks.

    The shortcut repeats each channel and reads the result as (c, t, y, x), with t over `slots` time slots, of which the
    last is kept. So output pixel (y, x) of each 2x2 cell takes every `step`-th input channel, from an offset that may
    depend on (y, x).
    """

    def __init__(self, inner: int, outer: int, blocks: int, slots: int, operations, *, up: bool, **kwargs):
        super().__init__()
        self.step = inner // outer
        if up and (inner % outer or 4 * slots % self.step):
            raise unknown_stage("decoder", inner, outer, slots)
        self.slots = slots
        self.resnets = residual_blocks(inner, outer, blocks + 1, operations, **kwargs)
        self.upsampler = resampler(outer, operations, down=False, **kwargs) if up else None

    def forward(self, x: Tensor) -> Tensor:
        source = x
        for resnet in self.resnets:
            x = resnet(x)
        if self.upsampler is None:
            return x
        x = self.upsampler["resample"](x)
        repeats = 4 * self.slots // self.step
        for place in range(4):
            offset = (4 * (self.slots - 1) + place) // repeats
            x[:, :, place // 2 :: 2, place % 2 :: 2].add_(source[:, offset :: self.step])
        return x


class Encoder(nn.Module):
    def __init__(self, config: VAEConfig, operations, **kwargs):
        super().__init__()
        widths = [config.base_width * m for m in (1, *config.multipliers)]
        self.conv_in = operations.Conv2d(config.in_channels, widths[0], 3, padding=1, **kwargs)
        self.down_blocks = nn.ModuleList(
            DownStage(a, b, config.res_blocks, slots, operations, down=i < len(config.slots), **kwargs)
            for i, (a, b, slots) in enumerate(zip(widths[:-1], widths[1:], (*config.slots, 1), strict=True))
        )
        self.mid_block = MidBlock(widths[-1], operations, **kwargs)
        self.norm_out = RMSNorm(widths[-1], 3, **kwargs)
        self.conv_out = operations.Conv2d(widths[-1], 2 * config.latent_channels, 3, padding=1, **kwargs)

    def fine(self, pixels: Tensor) -> Tensor:
        x = self.conv_in(packed(pixels))
        for stage in self.down_blocks:
            x = stage(x)
        return x

    def coarse(self, x: Tensor) -> Tensor:
        x = self.mid_block(packed(x))
        return self.conv_out(F.silu(self.norm_out(x, out=x), inplace=True))


class Decoder(nn.Module):
    def __init__(self, config: VAEConfig, operations, **kwargs):
        super().__init__()
        multipliers = config.multipliers[::-1]
        widths = [config.decoder_base_width * m for m in (multipliers[0], *multipliers)]
        self.conv_in = operations.Conv2d(config.latent_channels, widths[0], 3, padding=1, **kwargs)
        self.mid_block = MidBlock(widths[0], operations, **kwargs)
        self.up_blocks = nn.ModuleList(
            UpStage(a, b, config.res_blocks, slots, operations, up=i < len(config.slots), **kwargs)
            for i, (a, b, slots) in enumerate(zip(widths[:-1], widths[1:], (*config.slots[::-1], 1), strict=True))
        )
        self.norm_out = RMSNorm(widths[-1], 3, **kwargs)
        self.conv_out = operations.Conv2d(widths[-1], config.out_channels, 3, padding=1, **kwargs)

    def coarse(self, x: Tensor) -> Tensor:
        return self.mid_block(self.conv_in(packed(x)))

    def fine(self, x: Tensor, crop: Crop = lambda x, i: x) -> Tensor:
        """Pixels of coarse features `x`. `crop(x, i)` may crop stage i's input and, after the last, the picture."""
        for i, stage in enumerate(self.up_blocks):
            x = packed(crop(x, i))  # a line of its own, so that the uncropped tensor is freed before the stage runs
            x = stage(x)
        x = self.conv_out(F.silu(self.norm_out(x, out=x), inplace=True))
        return crop(x, len(self.up_blocks))


class VAE(nn.Module):
    """The VAE. Computes in its weights' dtype, or `compute_dtype` where layers cast at use; returns the input's dtype.

    `encode` and `decode` return finite values or raise `UserError`: this VAE overflows fp16 (values exceed 65504), so a
    non-finite result is computed once more in fp32. `encoder=False` builds only the decoder.
    """

    def __init__(
        self,
        config: VAEConfig = VAEConfig(),
        *,
        operations=nn,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        encoder: bool = True,
    ):
        super().__init__()
        self.config = config
        self.factor = 2 ** len(config.slots)  # pixels per latent cell, each way
        self.compute_dtype: torch.dtype | None = None
        kwargs = {"dtype": dtype, "device": device}
        channels = config.latent_channels
        if encoder:
            self.encoder = Encoder(config, operations, **kwargs)
            self.quant_conv = operations.Conv2d(2 * channels, 2 * channels, 1, **kwargs)
        self.post_quant_conv = operations.Conv2d(channels, channels, 1, **kwargs)
        self.decoder = Decoder(config, operations, **kwargs)

    @property
    def dtype(self) -> torch.dtype:
        return self.compute_dtype or self.post_quant_conv.weight.dtype

    def encode(self, pixels: Tensor) -> Tensor:
        """Raw latents [B, 64, H/16, W/16] (the mean) of pixels [B, 4, H, W] in [-1, 1], H and W multiples of 16."""
        return self.checked(pixels, lambda x: self.encode_coarse(self.encoder.fine(x)), decode=False)

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels [B, 4, 16h, 16w] in [-1, 1] of raw latents [B, 64, h, w]."""
        return self.checked(latents, lambda z: self.decode_fine(self.decode_coarse(z)), decode=True)

    def normalise(self, latents: Tensor) -> Tensor:
        """Raw latents normalised as the diffusion transformer expects them, in the dtype of `latents`."""
        mean, std = self._statistics(latents)
        return (latents - mean) / std

    def denormalise(self, latents: Tensor) -> Tensor:
        mean, std = self._statistics(latents)
        return latents * std + mean

    def _statistics(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.tensor([self.config.latents_mean, self.config.latents_std]).to(latents).view(2, -1, 1, 1)
        return both[0], both[1]

    def encode_coarse(self, x: Tensor) -> Tensor:
        return self.quant_conv(self.encoder.coarse(x))[:, : self.config.latent_channels]

    def decode_coarse(self, latents: Tensor) -> Tensor:
        return self.decoder.coarse(self.post_quant_conv(latents))

    def decode_fine(self, x: Tensor, crop: Crop = lambda x, i: x) -> Tensor:
        # Checked before the clamp, which would turn infinity into a white pixel.
        return finite(self.decoder.fine(x, crop)).clamp_(-1, 1)

    @torch.no_grad()
    def checked(self, x: Tensor, run: Callable[[Tensor], Tensor], *, decode: bool) -> Tensor:
        """The finite result of `run(x)` in this VAE's dtype, else in fp32; `UserError` if that is not finite either."""
        given, wanted = ("latents", "pixels") if decode else ("pixels", "latents")
        self._require_input(x, given, decode)

        result = None
        with suppress(NonFinite):
            result = finite(run(x.to(self.dtype)).to(x.dtype))
        if result is None and torch.finfo(self.dtype).bits < 32:
            log.warning("the VAE's %s overflowed in %s; computing again in fp32", wanted, self.dtype)
            with self._in_fp32(decode), suppress(NonFinite):
                result = finite(run(x.float()).to(x.dtype))
        if result is None:
            raise UserError(
                f"the VAE's {wanted} came out with NaN or infinite values in fp32, expected finite ones; the VAE file "
                f"may be damaged: load it again, or check the {given} given"
            )
        return result

    def _require_input(self, x: Tensor, name: str, decode: bool) -> None:
        if not decode and not hasattr(self, "encoder"):
            raise UserError("this VAE was loaded without its encoder, which encoding needs; load the whole VAE")
        channels, multiple = (self.config.latent_channels, 1) if decode else (self.config.in_channels, self.factor)
        if x.dim() != 4 or x.shape[1] != channels or x.shape[2] % multiple or x.shape[3] % multiple or not x.numel():
            sizes = "H and W at least 1" if decode else f"H and W multiples of {multiple}"
            raise UserError(f"the VAE got {name} of shape {list(x.shape)}, expected [B, {channels}, H, W], {sizes}")
        if not x.is_floating_point():
            raise UserError(f"the VAE got {name} as {x.dtype}, expected floating point; convert them first")
        if not is_finite(x):
            raise UserError(f"the VAE got {name} with NaN or infinite values, expected finite; the step before failed")

    @contextmanager
    def _in_fp32(self, decode: bool) -> Iterator[None]:
        """Cast the weights of one half to fp32 within the context. Layers that cast at use are left alone."""
        halves = (self.post_quant_conv, self.decoder) if decode else (self.encoder, self.quant_conv)
        before, originals = self.compute_dtype, []
        try:
            self.compute_dtype = torch.float32
            for layer in (layer for half in halves for layer in half.modules()):
                if getattr(layer, CASTS_AT_USE, False):
                    continue
                for name, parameter in list(layer.named_parameters(recurse=False)):
                    originals.append((layer, name, parameter))
                    setattr(layer, name, nn.Parameter(parameter.float(), requires_grad=False))
            yield
        finally:
            for layer, name, parameter in originals:
                setattr(layer, name, parameter)
            self.compute_dtype = before

"""Train the miniature's VAE: pictures of the toy world through 64 latent channels, each near a standard normal.

First encoder and decoder learn together. Then the decoder alone learns further, from latents of shapes with more noise,
until it draws sharp edges even where the transformer is slightly wrong.
"""

from __future__ import annotations

from random import Random

import numpy as np
import torch
from torch import Tensor, nn

from ...config.networks import VAEConfig
from ...models.vae import VAE
from ..world import draw, middle, random_scene
from .loop import Plan


def _hidden(name: str, value: Tensor) -> bool:
    return value.ndim == 4 and min(value.shape[:2]) > 4


VAE_PLAN = Plan(steps=6000, rate=1.2e-3, hidden=_hidden)
DECODER_PLAN = Plan(steps=5600, rate=6e-4, hidden=_hidden)
SIZES = ((96, 96), (128, 128), (128, 96), (96, 128))
CROP, CROPS = 48, 28  # most steps use crops, because convolutions learn from small pictures as well
WHOLE_FROM, WHOLES = 0.85, 8  # the last part of the training uses whole pictures
NOISE = 0.1  # on latents during training, so that small errors of the transformer stay small in pictures
MOST_NOISE = 0.5  # while the decoder learns alone
LATENT_SIZE = 1e-4  # weight of the latents' mean square, which keeps them near unit size


def pixels(rng: Random, crop: int | None, count: int) -> Tensor:
    """Random pictures [count, 4, h, w] in [-1, 1]."""
    pictures = []
    for _ in range(count):
        width, height = rng.choice(SIZES) if crop else SIZES[0]
        picture = np.asarray(draw(random_scene(rng), width, height))
        if crop:
            x, y = rng.randint(0, width - crop), rng.randint(0, height - crop)
            picture = picture[y : y + crop, x : x + crop]
        pictures.append(picture)
    return _stacked(pictures)


def shape_pixels(rng: Random, crop: int, count: int) -> Tensor:
    """Pictures [count, 4, crop, crop] in [-1, 1], each a crop around a shape of a scene with many shapes."""
    pictures = []
    for _ in range(count):
        (width, height), scene = SIZES[0], random_scene(rng, fewest=3)
        spot = middle(rng.choice(scene.shapes), width, height)
        x, y = (
            min(max(0, round(at) - crop // 2 + rng.randint(-crop // 4, crop // 4)), side - crop)
            for at, side in zip(spot, (width, height), strict=True)
        )
        pictures.append(np.asarray(draw(scene, width, height))[y : y + crop, x : x + crop])
    return _stacked(pictures)


def _stacked(pictures: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2) / 127.5 - 1


def picture_error(got: Tensor, wanted: Tensor) -> Tensor:
    """Errors of alpha, and of the picture over black and white, so that colours count as far as visible."""
    (got_color, got_alpha), (color, alpha) = (((x + 1) / 2).split([3, 1], dim=1) for x in (got, wanted))
    black = got_color * got_alpha - color * alpha
    white = black - got_alpha + alpha
    errors = torch.cat([black, white, got_alpha - alpha, 0.1 * (got_color - color)], dim=1)
    return errors.abs().mean() + 4 * errors.square().mean()


class VAETrainer(nn.Module):
    """The VAE in training; `loss` is minimised. Its latents are normalised ones: `fold` makes them raw."""

    def __init__(self, config: VAEConfig):
        super().__init__()
        self.vae = VAE(config)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):  # PyTorch's default, a third as large, learns no colours for long
                nn.init.kaiming_normal_(layer.weight, nonlinearity="linear")
                nn.init.zeros_(layer.bias)

    def loss(self, step: int, rng: Random, generator: torch.Generator) -> Tensor:
        whole = step >= WHOLE_FROM * VAE_PLAN.steps
        x = pixels(rng, None if whole else CROP, WHOLES if whole else CROPS)
        with torch.autocast("cpu", torch.bfloat16):
            latents = self.vae.encode_coarse(self.vae.encoder.fine(x)).float()
            noisy = latents + NOISE * torch.randn(latents.shape, generator=generator)
            decoded = self.vae.decoder.fine(self.vae.decode_coarse(noisy)).float()
        return picture_error(decoded, x) + LATENT_SIZE * latents.square().mean()


class DecoderTrainer(nn.Module):
    """A trained VAE whose decoder is trained further, while its encoder, and so its latents, stay the same."""

    def __init__(self, vae: VAE):
        super().__init__()
        self.vae = vae
        for part in (vae.decoder, vae.post_quant_conv):
            part.requires_grad_(True)
        for part in (vae.encoder, vae.quant_conv):
            part.requires_grad_(False)

    def loss(self, step: int, rng: Random, generator: torch.Generator) -> Tensor:
        x = shape_pixels(rng, CROP, CROPS)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            latents = self.vae.normalise(self.vae.encode_coarse(self.vae.encoder.fine(x)).float())
        strength = MOST_NOISE * torch.rand(len(x), 1, 1, 1, generator=generator)
        noisy = self.vae.denormalise(latents + strength * torch.randn(latents.shape, generator=generator))
        with torch.autocast("cpu", torch.bfloat16):
            decoded = self.vae.decoder.fine(self.vae.decode_coarse(noisy)).float()
        return picture_error(decoded, x)


@torch.no_grad()
def fold(vae: VAE) -> VAE:
    """Scale latents to the released range: fold mean and deviation into the 1x1 convolutions beside them.

    The encoder's other output is the log-variance, which nothing here reads: it is set to that of the noise.
    """
    channels = vae.config.latent_channels
    mean, std = torch.tensor([vae.config.latents_mean, vae.config.latents_std])
    inward, outward = vae.quant_conv, vae.post_quant_conv
    outward.bias -= outward.weight.flatten(1) @ (mean / std)
    outward.weight /= std[:, None, None]
    inward.weight[:channels] *= std[:, None, None, None]
    inward.bias[:channels] = inward.bias[:channels] * std + mean
    inward.weight[channels:] = 0
    inward.bias[channels:] = 2 * (NOISE * std).log()
    return vae

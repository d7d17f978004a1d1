"""Which decoded pictures count as opaque, on the bundled miniature: what was opaque does, cut-outs and soft edges do
not."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter

from qwen21 import mini
from qwen21.checkpoint.load import find_vae, load
from qwen21.inputs.images import is_opaque, to_vae_pixels
from qwen21.mini.world import draw, random_scene

SIZE, COUNT = 64, 110


@pytest.fixture(scope="module")
def vae():
    return load(find_vae(mini.WEIGHTS / "vae"), torch.float32)


def scene(seed):
    """Shapes on a ground of one colour or two."""
    rng = Random(seed)
    found = random_scene(rng)
    while not found.ground:
        found = random_scene(rng)
    return draw(found, SIZE, SIZE)


def photo(seed):
    """Coloured noise, sharp to soft: nothing that the miniature has learnt."""
    noise = np.random.default_rng(seed).normal(128, 200, (SIZE, SIZE, 3)).clip(0, 255).astype(np.uint8)
    return Image.fromarray(noise).filter(ImageFilter.GaussianBlur((0, 1, 2, 4)[seed % 4])).convert("RGBA")


def cut_out(seed):
    return draw(replace(random_scene(Random(seed)), ground=()), SIZE, SIZE)


def soft_edges(seed):
    """A cut-out whose alpha fades over 1 to 3 pixels."""
    picture = cut_out(seed)
    picture.putalpha(picture.getchannel("A").filter(ImageFilter.GaussianBlur(1 + seed % 3)))
    return picture


@pytest.mark.parametrize(("make", "opaque"), [(scene, True), (photo, True), (cut_out, False), (soft_edges, False)])
@torch.inference_mode()
def test_opaque_pictures_are_told_from_others_after_the_vae(vae, make, opaque):
    pixels = torch.cat([to_vae_pixels(make(seed)) for seed in range(COUNT)])
    alphas = torch.cat([vae.decode(vae.encode(some))[:, 3:] for some in pixels.split(10)]) * 0.5 + 0.5
    assert [is_opaque(one[None]) for one in alphas] == [opaque] * COUNT
    assert not opaque or float(alphas.amin(dim=(1, 2, 3)).min()) < 240 / 255  # no round trip keeps alpha at 1


@pytest.mark.parametrize(
    ("low", "pixels", "opaque"), [(241, 10_000, True), (220, 100, True), (220, 101, False), (191, 1, False)]
)
def test_the_rule(low, pixels, opaque):
    """A picture of 100 x 100 with some pixels at `low`, beside one at 255: each of a batch counts by itself."""
    alphas = torch.full((2, 10_000, 1), 255.0)
    alphas[1, :pixels] = low
    assert is_opaque(alphas / 255) is opaque

"""What a noise mask keeps: by ComfyUI's own node the very pixels of the picture, as the help of the sampler says."""

import torch

from tests.comfy.graphs import node, sampler, show, text_to_image


def test_image_composite_masked_keeps_the_pictures_own_pixels(comfy):
    nodes = {
        "image": node("ProbeImage", n=1, height=64, width=96, channels=4, offset=1),
        "mask": node("ProbeMask", kind="left", height=64, width=96),
        "encoded": node("VAEEncode", pixels=["image", 0], vae=["vae", 0]),
        "masked": node("SetLatentNoiseMask", samples=["encoded", 0], mask=["mask", 0]),
        "sample": sampler(latent=["masked", 0]),
        "decoded": node("VAEDecode", samples=["sample", 0], vae=["vae", 0]),
    }
    pasted = {"destination": ["image", 0], "source": ["decoded", 0], "mask": ["mask", 0], "x": 0, "y": 0}
    nodes["kept"] = node("ImageCompositeMasked", resize_source=False, **pasted)
    names = ("image", "mask", "decoded", "kept")
    run = comfy.run(text_to_image(**nodes) | {f"show {name}": show(name) for name in names})
    image, mask, decoded, kept = (run.shown(f"show {name}") for name in names)
    outside = mask == 0
    assert outside.any() and kept.shape == image.shape == (1, 64, 96, 4)
    assert torch.equal(kept[outside], image[outside])
    assert not torch.equal(decoded[outside], image[outside])
    assert torch.equal(kept[mask == 1], decoded[mask == 1])

"""Latents of other shapes and sizes than ours: converted in one way by every node, and whatever is lost is told."""

import json

import pytest
import torch

from qwen21.sampling.schedule import base_sigmas
from tests.comfy.graphs import STEPS, ksampler, loaders, node, prompt, sampler, show, text_to_image

TOKENS = 4 * 6  # of 96x64 pixels


@pytest.mark.parametrize("name", ["EmptyLatentImage", "EmptySD3LatentImage", "Qwen21EmptyLatent"])
def test_the_schedule_of_an_empty_latent_is_that_of_its_pixels(comfy, name):
    batch = "batch" if name == "Qwen21EmptyLatent" else "batch_size"
    graph = {
        "empty": node(name, width=96, height=64, **{batch: 1}),
        "sigmas": node(
            "Qwen21Schedule", schedule="base", steps=STEPS, denoise=1.0, width=1024, height=1024, latent=["empty", 0]
        ),
        "out": show("sigmas"),
    }
    torch.testing.assert_close(comfy.run(graph).shown(), base_sigmas(STEPS, TOKENS), atol=1e-6, rtol=0)


def ways(**entry):
    return {"ours": sampler(latent=["other", 0], **entry), "ksampler": ksampler(latent_image=["other", 0], **entry)}


@pytest.mark.parametrize("way", ["ours", "ksampler"])
def test_a_picture_with_an_axis_of_frames_is_a_picture(comfy, way):
    """Empty, and one to start from."""
    for seed, entry in ((-1, {}), (9, {"denoise": 0.6})):
        shape = {"batch": 2, "channels": 64, "height": 4, "width": 6, "seed": seed}
        plain, framed = (
            comfy.latent(text_to_image(other=node("ProbeLatent", **shape, frames=frames), sample=ways(**entry)[way]))
            for frames in (0, 1)
        )
        assert torch.equal(framed.reshape(plain.shape), plain)


def test_more_masks_than_pictures_are_refused(comfy):
    graph = text_to_image(
        left=node("ProbeMask", kind="left", height=64, width=96),
        ones=node("ProbeMask", kind="ones", height=64, width=96),
        both=node("MaskToImage", mask=["left", 0]),
        other=node("MaskToImage", mask=["ones", 0]),
        batch=node("ImageBatch", image1=["both", 0], image2=["other", 0]),
        masks=node("ImageToMask", image=["batch", 0], channel="red"),
        masked=node("SetLatentNoiseMask", samples=["pos", 1], mask=["masks", 0]),
        sample=sampler(latent=["masked", 0]),
    )
    node_id, message = comfy.error(graph)
    assert node_id == "sample" and "2 masks for 1 picture" in message and "\n" not in message


def converted(comfy, graph):
    """(latent's shape, warnings of the report, what the log got)."""
    before = len(comfy.server.log())
    run = comfy.run(graph | {"report": show("sample", 1)})
    return list(run.latent.shape), json.loads(run.shown("report"))["warnings"], comfy.server.log()[before:]


@pytest.mark.parametrize("name", ["Qwen21EmptyLatent", "EmptySD3LatentImage", "Qwen21EncodePrompt"])
def test_sizes_that_are_rounded_are_told(comfy, name):
    width, height = (80, 112) if name == "EmptySD3LatentImage" else (100, 112)
    empty = node(name, width=width, height=height, **{"batch_size" if "SD3" in name else "batch": 1})
    graph = text_to_image(other=empty, sample=sampler(latent=["other", 0]))
    if name == "Qwen21EncodePrompt":
        graph = text_to_image(pos=prompt(width=width, height=height))
    shape, warnings, log = converted(comfy, graph)
    wide = width // 32 * 32
    assert shape == [1, 64, 96 // 16, wide // 16]
    line = f"{width}x{height} became {wide}x96"
    assert any(line in warning for warning in warnings) and line in log


def test_a_picture_that_the_vae_cuts_is_told_and_its_mask_is_cut_with_it(comfy):
    picture = {"picture": node("ProbeImage", n=1, height=133, width=200, channels=3, offset=0)}
    encoded = picture | {"start": node("VAEEncode", pixels=["picture", 0], vae=["vae", 0])}
    mask = {"mask": node("ProbeMask", kind="left", height=133, width=200)}
    masked = {"masked": node("SetLatentNoiseMask", samples=["start", 0], mask=["mask", 0])}
    graph = text_to_image(**encoded, **mask, **masked, sample=sampler(latent=["masked", 0], denoise=0.6))
    shape, warnings, log = converted(comfy, graph)
    assert shape == [1, 64, 8, 12]
    assert any("200x133 was cut to 192x128" in warning for warning in warnings) and "200x133 was cut" in log
    start = comfy.run(loaders() | encoded | {"out": show("start")}).latent
    kept = (comfy.latent(graph) - start).abs().amax(dim=(0, 1, 2))
    assert (kept[6:] < 1e-3).all() and (kept[:6] > 1e-2).all()  # the mask ends at 100 - 4 = 96 pixels, or 6 cells


def test_an_opaque_picture_comes_back_in_three_channels_and_a_cut_out_in_four(comfy):
    for channels in (3, 4):
        graph = {
            "vae": node("Qwen21LoadVAE", file="qwen21-mini (bundled)", dtype="fp32", alpha="auto"),
            "clear": node("ProbeMask", kind="left", height=64, width=64),
            "flat": node("EmptyImage", width=64, height=64, batch_size=1, color=0x2060C0),
            "black": node("EmptyImage", width=64, height=64, batch_size=1, color=0),
            "half": node(
                "ImageCompositeMasked",
                destination=["flat", 0],
                source=["black", 0],
                x=0,
                y=0,
                resize_source=False,
                mask=["clear", 0],
            ),  # fmt: skip
            "cut": node("JoinImageWithAlpha", image=["half", 0], alpha=["clear", 0]),
            "latent": node("VAEEncode", pixels=["flat" if channels == 3 else "cut", 0], vae=["vae", 0]),
            "picture": node("VAEDecode", samples=["latent", 0], vae=["vae", 0]),
            "out": show("picture"),
        }
        if channels == 4 and comfy.version < (0, 4):
            continue  # its VAE Encode takes no alpha
        assert comfy.run(graph).shown().shape[-1] == channels

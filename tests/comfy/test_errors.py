"""Mistakes: each ends in one line, at the node where it was made."""

import pytest
import torch
from safetensors.torch import save_file

from tests.comfy.graphs import (
    custom_sampling,
    ksampler,
    loaders,
    node,
    prompt,
    sampler,
    shown,
    text_to_image,
    two_references,
)
from tests.comfy.models import DIT, ENCODER, VAE

EMPTY = "'Empty Qwen-Image 2.1 latent'"  # what the canvas calls the node


def refused(comfy, graph, node_id, *words):
    failed, message = comfy.error(graph)
    assert failed == node_id and "\n" not in message, (failed, message)
    assert all(word in message for word in words), message


# --- files ---------------------------------------------------------------------------------------------------------

WRONG = {
    "vae as dit": (
        "dit",
        "diffusion_models",
        ("vae", VAE),
        "this is a Qwen-Image 2.1 VAE; expected a Qwen-Image 2.1 transformer",
    ),
    "encoder as dit": ("dit", "diffusion_models", ("text_encoders", ENCODER), "this is a Qwen3-VL encoder"),
    "dit as vae": (
        "vae",
        "vae",
        ("diffusion_models", DIT),
        "this is a Qwen-Image 2.1 transformer; expected the Qwen-Image 2.1 VAE",
    ),
    "vae as encoder": ("encoder", "text_encoders", ("vae", VAE), "this is a Qwen-Image 2.1 VAE; expected Qwen3-VL-8B"),
    "cut short": ("dit", "diffusion_models", ("diffusion_models", DIT, 50000), "cut short"),
    "web page": ("dit", "diffusion_models", b"<!DOCTYPE html><html></html>", "web page"),
    "another model": ("dit", "diffusion_models", {"blocks.0.weight": torch.zeros(3)}, "this is an unknown model"),
    "empty": ("dit", "diffusion_models", b"", "empty"),
}


@pytest.fixture
def wrong_file(comfy, request):
    """(node, name, words) of a file that does not belong where it lies."""
    where, folder, source, words = WRONG[request.param]
    path = comfy.models / folder / f"wrong_{request.param.replace(' ', '_')}.safetensors"
    if isinstance(source, dict):
        save_file(source, path)
    elif isinstance(source, bytes):
        path.write_bytes(source)
    else:
        path.write_bytes((comfy.models / source[0] / source[1]).read_bytes()[: source[2] if len(source) > 2 else None])
    yield where, path.name, words
    path.unlink()


@pytest.mark.parametrize("wrong_file", WRONG, indirect=True)
def test_a_wrong_file_is_named(comfy, wrong_file):
    where, name, words = wrong_file
    loader = loaders()[where]
    graph = two_references(**{where: loader | {"inputs": loader["inputs"] | {"file": name}}})
    refused(comfy, graph, where, words, name)


@pytest.mark.parametrize("name", ["absent.safetensors", "../../secret.safetensors", "/etc/passwd", "(no file found)"])
def test_a_file_that_is_not_listed_is_refused_before_anything_runs(comfy, name):
    loader = node("Qwen21LoadDiT", file=name, dtype="default")
    refused(comfy, text_to_image(dit=loader), "dit", name, "models/diffusion_models")


# --- latents -------------------------------------------------------------------------------------------------------


def latent(channels, seed=-1):
    return node("ProbeLatent", batch=1, channels=channels, height=8, width=12, seed=seed)


@pytest.mark.parametrize("channels", [4, 16])
def test_an_empty_latent_of_another_model_keeps_its_size_in_our_sampler(comfy, channels):
    """8 x 12 cells of 8 pixels are 64 x 96 pixels."""
    graph = text_to_image(other=latent(channels), sample=sampler(latent=["other", 0]))
    assert torch.equal(comfy.latent(graph), comfy.latent(text_to_image()))


@pytest.mark.parametrize("channels", [4, 16])
def test_an_empty_latent_without_a_ratio_never_doubles_the_picture_in_ksampler(comfy, channels):
    result = comfy.server.post(text_to_image(other=latent(channels), sample=ksampler(latent_image=["other", 0])))
    if result.error:
        assert f"the latent has {channels} channels" in result.error and EMPTY in result.error
    else:
        assert list(shown(result.outputs)["samples"].shape) == [1, 64, 4, 6]


@pytest.mark.parametrize("name", ["EmptyLatentImage", "EmptySD3LatentImage"])
def test_cores_empty_latents_never_double_the_picture_in_ksampler(comfy, name):
    empty = node(name, width=96, height=64, batch_size=1)
    result = comfy.server.post(text_to_image(other=empty, sample=ksampler(latent_image=["other", 0])))
    if comfy.version < (0, 33):  # it cannot know their ratio
        assert EMPTY in result.error and result.error_node == "sample"
    else:
        assert list(shown(result.outputs)["samples"].shape) == [1, 64, 4, 6]


@pytest.mark.parametrize("channels", [3, 4, 16, 128])
@pytest.mark.parametrize("way", ["ours", "ksampler", "custom"])
def test_a_picture_of_another_model_is_refused(comfy, channels, way):
    graph = text_to_image(other=latent(channels, seed=3))
    if way == "custom":
        grid = node("Qwen21Schedule", schedule="base", steps=3, denoise=0.5, width=96, height=64)
        graph |= custom_sampling(["grid", 0], grid=grid)
        graph["sample"]["inputs"]["latent_image"] = ["other", 0]
    else:
        graph["sample"] = sampler(latent=["other", 0]) if way == "ours" else ksampler(latent_image=["other", 0])
    refused(comfy, graph, "sample", f"the latent has {channels} channels, Qwen-Image 2.1 has 64")


@pytest.mark.parametrize("way", [sampler, ksampler], ids=["ours", "ksampler"])
def test_latents_with_frames_are_refused(comfy, way):
    frames = node("EmptyHunyuanLatentVideo", width=96, height=64, length=9, batch_size=1)
    entry = {"latent" if way is sampler else "latent_image": ["other", 0]}
    refused(comfy, text_to_image(other=frames, sample=way(**entry)), "sample", "the latent has", EMPTY)


# --- models that do not belong together ----------------------------------------------------------------------------

OTHER = node("ProbeOther", model=["dit", 0])


def test_another_model_in_our_sampler(comfy):
    graph = text_to_image(o=OTHER, sample=sampler(model=["o", 0]))
    refused(comfy, graph, "sample", "the MODEL is a Flux", "'Load Qwen-Image 2.1 transformer'")


def test_another_model_in_the_prefix_cache_node(comfy):
    cache = node("Qwen21PrefixCache", base_model=["o", 0], prefix_cache="on", device="auto")
    refused(comfy, text_to_image(o=OTHER, c=cache, sample=ksampler(model=["c", 0])), "c", "the MODEL is a Flux")


def test_another_vae_in_the_encoder_node(comfy):
    graph = two_references(o=OTHER, pos=prompt(references=["refs", 0], vae=["o", 1]))
    refused(comfy, graph, "pos", "the VAE has 16 latent channels", "'Load Qwen-Image 2.1 VAE'")


def test_conditioning_of_another_text_encoder(comfy):
    wide = node("ProbeConditioning", width=48, tokens=7)
    graph = text_to_image(wide=wide, sample=sampler(positive=["wide", 0]))
    refused(comfy, graph, "sample", "the text states have shape", "encoder that belongs to it")


# --- settings ------------------------------------------------------------------------------------------------------


def test_guidance_without_a_negative(comfy):
    graph = text_to_image(sample=sampler(cfg=3.0))
    refused(comfy, graph, "sample", "cfg is 3 but no negative is wired", "'Encode Qwen-Image 2.1 prompt'")


@pytest.mark.parametrize("values", ["0.1, 0.5, 0", "1, 1, 0", "2, 1, 0", "1"])
def test_sigmas_that_make_no_grid(comfy, values):
    grid = node("ProbeSigmas", values=values)
    refused(comfy, text_to_image(grid=grid, sample=sampler(sigmas=["grid", 0])), "sample", "sigmas")

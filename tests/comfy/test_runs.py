"""What happens around sampling: interrupts, the queue, previews, the report and the PNG's metadata."""

import json
import secrets
import time
import uuid

import pytest
import torch
from safetensors.torch import load_file

from qwen21.sampler import noise_seed
from qwen21.schedule import base_sigmas
from tests.comfy.graphs import (
    STEPS,
    ksampler,
    loaders,
    node,
    probe,
    prompt,
    sampler,
    show,
    shown,
    text_to_image,
    two_references,
)


def seed():
    """Another one every time, so that ComfyUI's cache has nothing to say."""
    return secrets.randbelow(2**32)


def saved(name="save"):
    image = node("SaveImage", images=["decode", 0], filename_prefix=uuid.uuid4().hex)
    return {"decode": node("VAEDecode", samples=["sample", 0], vae=["vae", 0]), name: image}


def png(comfy, run):
    (picture,) = comfy.server.images(run.result)
    return picture


# --- interrupts and the queue --------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def fresh_latent(inside):
    """Text to image in a process that did nothing else before."""
    return load_file(inside["folder"] / "fresh.safetensors")["latent"]


def test_a_warm_process_equals_a_fresh_one(comfy, fresh_latent):
    assert torch.equal(comfy.latent(text_to_image()), fresh_latent)


@pytest.mark.parametrize("make", [sampler, ksampler], ids=["ours", "ksampler"])
@pytest.mark.parametrize("when", ["prefill", "step"])
def test_an_interrupt_ends_the_run_and_leaves_nothing_behind(comfy, fresh_latent, make, when):
    comfy.run(text_to_image(sample=make(seed=seed())))
    model = probe(interrupt=when)
    stopped = comfy.server.post(two_references(probe=model, sample=make(model=["probe", 0], seed=seed())))
    assert stopped.interrupted and not stopped.error and "out" not in stopped.outputs
    counted = comfy.run(loaders() | {"probe": model, "out": show("probe", 1)})  # the very same probe, from the cache
    assert counted.shown() == {"prefill": 1, "denoise": 0 if when == "prefill" else 2, "attention": 0}
    after = comfy.run(text_to_image(sample=make()))
    assert "sample" in after.executed and "dit" not in after.executed
    assert torch.equal(after.latent, fresh_latent)


def test_an_interrupt_from_outside_comes_between_steps(comfy, fresh_latent):
    running = comfy.server.start(text_to_image(sample=sampler(steps=1000, seed=seed())))
    running.until(lambda kind, data: kind == "progress" and data["value"] >= 2)
    asked = time.monotonic()
    comfy.server.interrupt()
    assert running.wait().interrupted
    assert time.monotonic() - asked < 3
    assert torch.equal(comfy.latent(text_to_image()), fresh_latent)


def test_two_queued_prompts_both_run(comfy):
    seeds = [seed(), seed()]
    queued = [comfy.server.start(text_to_image(sample=sampler(seed=each))) for each in seeds]
    for running, each in zip(queued, seeds, strict=True):
        result = running.wait()
        assert not result.error
        alone = comfy.latent(text_to_image(sample=ksampler(seed=each)))
        assert torch.equal(shown(result.outputs)["samples"], alone)


@pytest.mark.parametrize("make", [sampler, ksampler], ids=["ours", "ksampler"])
def test_previews_come_while_it_samples(comfy, make):
    """0.33 holds back those that follow each other too fast."""
    previews = comfy.run(text_to_image(sample=make(seed=seed()))).result.previews
    assert 1 <= len(previews) <= STEPS
    assert previews[0][8:11] == b"\xff\xd8\xff"  # a JPEG


# --- the report ----------------------------------------------------------------------------------------------------


def report(comfy, graph):
    return json.loads(comfy.run(graph | {"report": show("sample", 1)}).shown("report"))


def test_the_report_tells_what_ran(comfy):
    found = report(comfy, two_references(sample=sampler(seed=9, edit_noise="decorrelated")))
    assert found["model"]["file"] == "qwen_image_2.1_tiny.safetensors" and found["model"]["patched_weights"] == 0
    assert found["schedule"]["kind"] == "base"
    assert found["schedule"]["sigmas"] == pytest.approx(base_sigmas(STEPS, 24).tolist(), abs=1e-6)
    assert found["seed"] == 9 and found["noise"] == {"mode": "decorrelated", "seed": noise_seed(9, 2, "decorrelated")}
    assert found["size"] == [96, 64] and found["batch"] == 1 and found["cfg"] == 1.0 and found["negative"] is None
    positive = found["positive"]
    assert positive["prompt"] == "put <image1> on <image2>" and positive["vae"] == "qwen_image_2.1_vae_tiny.safetensors"
    assert [r["original"] for r in positive["references"]] == [[64, 64], [96, 64]]
    assert [r["tokens"] for r in positive["references"]] == [16, 16]
    assert found["warnings"] == [] and "torch" in found["versions"]


def test_the_report_lists_the_sigmas_that_ran(comfy):
    """BasicScheduler's grid becomes the released one, as in KSampler; the report must not show the other."""
    grid = node("BasicScheduler", model=["dit", 0], scheduler="simple", steps=STEPS, denoise=1.0)
    found = report(comfy, text_to_image(grid=grid, sample=sampler(sigmas=["grid", 0])))
    assert found["schedule"]["sigmas"] == pytest.approx(base_sigmas(STEPS, 24).tolist(), abs=1e-6)


def test_the_report_says_where_sigmas_end_above_0(comfy):
    graph = text_to_image(grid=node("ProbeSigmas", values="1, 0.7, 0.25"), sample=sampler(sigmas=["grid", 0]))
    (warning,) = report(comfy, graph)["warnings"]
    assert warning.startswith("the sigmas end at 0.25, not at 0")


def test_the_report_warns(comfy):
    turbo = node("Qwen21LoadDiT", file="qwen_image_2.1_turbo_tiny.safetensors", dtype="default")
    found = report(comfy, text_to_image(dit=turbo, sample=sampler(steps=4)))
    assert found["schedule"]["kind"] == "turbo" and len(found["schedule"]["sigmas"]) == 9
    assert "Turbo has 8 fixed steps" in found["warnings"][0]


def test_the_report_tells_of_a_negative_prompt_that_is_not_used(comfy):
    found = report(comfy, text_to_image(neg=prompt("blurry"), sample=sampler(negative=["neg", 0])))
    assert any("negative" in warning for warning in found["warnings"])


@pytest.mark.parametrize(("start", "end"), [(0.9, 0.2), (0.51, 0.52)])
def test_the_report_tells_of_a_range_without_steps(comfy, start, end):
    guided = sampler(steps=4, cfg=3.0, negative=["neg", 0], cfg_start=start, cfg_end=end)
    found = report(comfy, text_to_image(neg=prompt("blurry"), sample=guided))
    assert found["cfg"] == 1.0
    why = f"no step of 4 lies from cfg_start {start} up to cfg_end {end}"
    assert found["warnings"] == [f"cfg 3 is without effect: {why}"]


def test_the_report_tells_of_a_placeholder_without_a_reference(comfy):
    found = report(comfy, text_to_image(pos=prompt("make <image1> red")))
    assert found["warnings"] == ["the prompt speaks of <image1>, but there are no references"]


def test_turbos_own_grid_is_no_matter_for_a_warning(comfy):
    turbo = node("Qwen21LoadDiT", file="qwen_image_2.1_turbo_tiny.safetensors", dtype="default")
    logged = len(comfy.server.log())
    comfy.run(text_to_image(dit=turbo, sample=sampler(seed=seed(), steps=8)))
    assert "not its own 8 steps" not in comfy.server.log()[logged:]
    comfy.run(text_to_image(dit=turbo, sample=ksampler(seed=seed(), steps=5)))
    assert "not its own 8 steps" in comfy.server.log()[logged:]


def test_the_report_tells_of_latents_without_slots(comfy):
    """They follow the text, as in core; people should hear of it."""
    nodes = {
        "pixels": node("VAEEncode", pixels=["other", 0], vae=["vae", 0]),
        "more": node("ReferenceLatent", conditioning=["pos", 0], latent=["pixels", 0]),
    }
    found = report(comfy, two_references(**nodes, sample=sampler(positive=["more", 0])))
    assert any("no slot" in warning for warning in found["warnings"])


def test_the_node_shows_a_summary(comfy):
    (text,) = comfy.run(two_references(sample=sampler(seed=seed()))).outputs["sample"]["text"]
    assert "base, 3 steps, euler" in text and "reference 2: 96x64 as 64x64, 16 tokens" in text


# --- the PNG -------------------------------------------------------------------------------------------------------


def test_the_png_carries_the_report(comfy):
    """As sent by a browser: the workflow beside the report."""
    number = seed()
    run = comfy.run(text_to_image(**saved(), sample=sampler(seed=number)), extra_pnginfo={"workflow": {"nodes": []}})
    text = png(comfy, run).text
    assert {"prompt", "workflow", "qwen21"} <= set(text)
    assert json.loads(text["qwen21"])["seed"] == number


def test_the_png_carries_the_report_of_a_headless_run(comfy):
    """Without a browser the caller sends a place for the metadata, as `python -m qwen21 run` does."""
    run = comfy.run(text_to_image(**saved(), sample=sampler(seed=seed())), extra_pnginfo={})
    assert "qwen21" in png(comfy, run).text

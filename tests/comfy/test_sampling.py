"""Our sampler and ComfyUI's own, on our MODEL: the same numbers by every way, and those of the library."""

import pytest
import torch

from qwen21.sampling.schedule import base_sigmas
from tests.comfy.graphs import (
    STEPS,
    counts,
    custom_sampling,
    ksampler,
    node,
    probe,
    prompt,
    sampler,
    show,
    text_to_image,
    two_references,
)

TOLERANCE = 1e-4  # raw latents reach 25: rounding of fp32 sums taken in another order


def side(run, name="pos"):
    """States, latents and slots of a conditioning that a workflow showed."""
    states, extra = run.shown(name)[0]
    return states[0], extra.get("reference_latents", []), extra.get("image_slots", [])


def base_schedule(**inputs):
    return node(
        "Qwen21Schedule", **({"schedule": "base", "steps": STEPS, "denoise": 1.0, "width": 96, "height": 64} | inputs)
    )


def basic_scheduler(**inputs):
    return node(
        "BasicScheduler", **({"model": ["dit", 0], "scheduler": "simple", "steps": STEPS, "denoise": 1.0} | inputs)
    )


# --- every way the same --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", [text_to_image, two_references], ids=["text", "edit"])
def test_our_sampler_equals_the_library(comfy, oracle, graph):
    run = comfy.run(graph(cond=show("pos")))
    torch.testing.assert_close(run.latent, oracle.latent(side(run, "cond")), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("graph", [text_to_image, two_references], ids=["text", "edit"])
def test_ksampler_equals_our_sampler_bit_for_bit(comfy, graph):
    assert torch.equal(comfy.latent(graph(sample=ksampler())), comfy.latent(graph()))


def test_ksampler_equals_our_sampler_under_guidance(comfy, oracle):
    nodes = {"neg": prompt("a dog"), "cond": show("pos"), "unwanted": show("neg")}
    ours = comfy.run(text_to_image(**nodes, sample=sampler(cfg=3.0, negative=["neg", 0])))
    theirs = comfy.latent(text_to_image(**nodes, sample=ksampler(cfg=3.0, negative=["neg", 0])))
    assert torch.equal(ours.latent, theirs)
    expected = oracle.latent(side(ours, "cond"), side(ours, "unwanted"), cfg=[3.0] * STEPS)
    torch.testing.assert_close(ours.latent, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("denoise", [1.0, 0.5])
def test_basic_schedulers_sigmas_in_our_sampler_equal_ksampler(comfy, denoise):
    latent = {"start": node("ProbeLatent", batch=1, channels=64, height=4, width=6, seed=9)} if denoise < 1 else {}
    source = ["start", 0] if latent else ["pos", 1]
    ours = text_to_image(
        **latent, sigmas=basic_scheduler(denoise=denoise), sample=sampler(latent=source, sigmas=["sigmas", 0])
    )
    theirs = text_to_image(**latent, sample=ksampler(latent_image=source, denoise=denoise))
    assert torch.equal(comfy.latent(ours), comfy.latent(theirs))


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_ksamplers_simple_is_our_base_schedule(comfy, steps):
    theirs = comfy.latent(text_to_image(sample=ksampler(steps=steps)))
    ours = comfy.latent(text_to_image(**custom_sampling(["sigmas", 0], sigmas=base_schedule(steps=steps))))
    assert torch.equal(theirs, ours)


def test_another_scheduler_is_left_alone(comfy):
    """Only `simple` becomes the released grid."""
    shown_sigmas = {"sigmas": basic_scheduler(scheduler="normal"), "grid": show("sigmas")}
    run = comfy.run(text_to_image(**custom_sampling(["sigmas", 0], **shown_sigmas)))
    assert torch.equal(run.latent, comfy.latent(text_to_image(sample=ksampler(scheduler="normal"))))
    assert not torch.equal(run.latent, comfy.latent(text_to_image()))


def test_sampler_custom_advanced_takes_any_sigmas(comfy, oracle):
    sigmas = {"sigmas": node("ProbeSigmas", values="1, 0.7, 0.2, 0"), "cond": show("pos")}
    run = comfy.run(text_to_image(**custom_sampling(["sigmas", 0], **sigmas)))
    expected = oracle.latent(side(run, "cond"), sigmas=torch.tensor([1, 0.7, 0.2, 0]))
    torch.testing.assert_close(run.latent, expected, atol=TOLERANCE, rtol=0)
    ours = comfy.latent(text_to_image(sigmas=sigmas["sigmas"], sample=sampler(sigmas=["sigmas", 0])))
    assert torch.equal(run.latent, ours)


# --- batches, masks, guidance --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [sampler, ksampler], ids=["ours", "ksampler"])
def test_a_batch_of_three_equals_the_library_and_prefills_once(comfy, oracle, make):
    nodes = {"pos": prompt(batch=3), "probe": probe(), "counts": counts(), "cond": show("pos")}
    run = comfy.run(text_to_image(**nodes, sample=make(model=["probe", 0])))
    assert run.latent.shape == (3, 64, 4, 6)
    torch.testing.assert_close(run.latent, oracle.latent(side(run, "cond"), batch=3), atol=TOLERANCE, rtol=0)
    assert run.shown("counts") == {"prefill": 1, "denoise": STEPS, "attention": 0}
    assert torch.equal(run.latent[:1], comfy.latent(text_to_image()))


@pytest.mark.parametrize("name", ["sample", "ksample"])
def test_an_inpaint_mask_keeps_what_it_covers(comfy, oracle, name):
    """Core's convention: 1 may change, 0 stays."""
    nodes = {
        "start": node("ProbeLatent", batch=1, channels=64, height=4, width=6, seed=9),
        "half": node("ProbeMask", kind="left", height=64, width=96),
        "masked": node("SetLatentNoiseMask", samples=["start", 0], mask=["half", 0]),
        "original": show("start"),
        "cond": show("pos"),
    }
    make = {"sample": sampler(latent=["masked", 0]), "ksample": ksampler(latent_image=["masked", 0])}[name]
    run = comfy.run(text_to_image(**nodes, sample=make))
    original = run.shown("original")["samples"]
    torch.testing.assert_close(run.latent[..., 3:], original[..., 3:], atol=1e-5, rtol=0)
    assert (run.latent[..., :3] - original[..., :3]).abs().mean() > 0.5
    mask = torch.zeros(1, 1, 4, 6)
    mask[..., :3] = 1
    expected = oracle.latent(side(run, "cond"), start=original, mask=mask)
    torch.testing.assert_close(run.latent, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("start", "end", "guided"), [(0.0, 0.5, [1, 1, 0, 0]), (0.5, 1.0, [0, 0, 1, 1]), (0.25, 0.75, [0, 1, 1, 0])]
)
def test_guidance_in_a_range_of_the_steps(comfy, oracle, start, end, guided):
    nodes = {"neg": prompt("a dog"), "cond": show("pos"), "unwanted": show("neg")}
    run = comfy.run(
        text_to_image(**nodes, sample=sampler(steps=4, cfg=3.0, negative=["neg", 0], cfg_start=start, cfg_end=end))
    )
    cfg = [3.0 if step else 1.0 for step in guided]
    expected = oracle.latent(side(run, "cond"), side(run, "unwanted"), cfg=cfg, steps=4)
    torch.testing.assert_close(run.latent, expected, atol=TOLERANCE, rtol=0)


def test_equal_conditions_run_as_one_batch(comfy):
    """Guidance away from the very same prompt changes nothing, and costs one prefix."""
    nodes = {"probe": probe(), "counts": counts()}
    run = comfy.run(text_to_image(**nodes, sample=sampler(model=["probe", 0], cfg=3.0, negative=["pos", 0])))
    assert run.shown("counts") == {"prefill": 1, "denoise": STEPS, "attention": 0}
    torch.testing.assert_close(run.latent, comfy.latent(text_to_image()), atol=TOLERANCE, rtol=0)


def test_the_negative_prompt_is_not_executed_at_cfg_1(comfy):
    graph = text_to_image(neg=prompt("never looked at"), sample=sampler(seed=71, negative=["neg", 0]))
    assert "neg" not in comfy.run(graph).executed
    graph["sample"]["inputs"]["cfg"] = 2.0
    assert "neg" in comfy.run(graph).executed


# --- the prefix cache ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["our sampler", "Qwen21PrefixCache"])
def test_without_the_prefix_cache_nothing_changes_but_the_work(comfy, where):
    ours = where == "our sampler"
    off = node("Qwen21PrefixCache", base_model=["probe", 0], prefix_cache="off", device="auto")
    sample = sampler(model=["probe", 0], prefix_cache="off") if ours else ksampler(model=["off", 0])
    nodes = {"probe": probe(), "counts": counts()} | ({} if ours else {"off": off})
    run = comfy.run(two_references(**nodes, sample=sample))
    assert run.shown("counts")["prefill"] == STEPS
    assert torch.equal(run.latent, comfy.latent(two_references()))


@pytest.mark.parametrize("schedule", ["auto", "base", "turbo"])
def test_the_schedule_node(comfy, schedule):
    """auto follows the model's name; a wired latent's size counts, not the widgets'."""
    grid = node(
        "Qwen21Schedule",
        schedule=schedule,
        steps=5,
        denoise=1.0,
        width=2048,
        height=2048,
        model=["turbo", 0],
        latent=["pos", 1],
    )
    loader = node("Qwen21LoadDiT", file="qwen_image_2.1_turbo_tiny.safetensors", dtype="default")
    sigmas = comfy.run(text_to_image(turbo=loader, grid=grid, out=show("grid"))).shown()
    if schedule == "base":
        assert torch.equal(sigmas, base_sigmas(5, 24))
    else:
        turbo = [1.0, 0.978453, 0.95418, 0.926626, 0.89508, 0.845148, 0.704534, 0.414568, 0.0]
        torch.testing.assert_close(sigmas, torch.tensor(turbo), atol=1e-7, rtol=0)

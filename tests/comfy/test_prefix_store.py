"""The prefix store in ComfyUI: what one run leaves to the next, and that no run gets what is not its own.

Every picture is compared with one sampled beside it that uses no store at all.
"""

import pytest
import torch

from tests.comfy.graphs import custom_sampling, ksampler, node, prompt, sampler, show
from tests.comfy.models import TURBO
from tests.comfy.run_and_report import (
    SEEDS,
    add,
    edit,
    encode,
    free,
    loader,
    look,
    picture,
    run_and_report,
    run_beside_fresh,
)


@pytest.fixture(scope="module")
def store(comfy):
    """A new one, which knows nothing of other files' tests."""
    free(comfy, free_memory=True)


@pytest.fixture
def stored(comfy, store):
    """A store that holds the edit of two references; what earlier tests stored beside it begins otherwise."""
    return run_beside_fresh(comfy, edit())


# --- what changes between two runs ---------------------------------------------------------------------------------

LEFT = node("ProbeMask", kind="left", height=64, width=64)
SWAPPED = {"first": add("other"), "refs": add("picture", "first")}
THIRD = {"third": picture(2), "more": add("third", "refs"), "pos": encode(references="more")}
CHANGES = {  # kind, references reused, reason, nodes
    "seed": ("hit", 2, "", {}),
    "size": ("hit", 2, "", {"pos": encode(width=128, height=32)}),
    "batch": ("hit", 2, "", {"pos": encode(batch=3)}),
    "prompt": ("partial", 2, "the text is new", {"pos": encode("swap <image1> and <image2>")}),
    "last word": ("partial", 2, "the text is new", {"pos": encode("put <image1> on <image2> now")}),
    "empty prompt": ("partial", 2, "the text is new", {"pos": encode("")}),
    "second picture": ("partial", 1, "new from reference 2 on", {"other": picture(4, 96, 3)}),
    "first picture": ("miss", 0, "new from reference 1 on", {"picture": picture(1)}),
    "order": ("miss", 0, "new from reference 1 on", SWAPPED),
    "second alpha": ("partial", 1, "new from reference 2 on",
                     {"mask": LEFT, "refs": add("other", "first", mask=["mask", 0])}),
    "first alpha": ("miss", 0, "new from reference 1 on", {"mask": LEFT, "first": add("picture", mask=["mask", 0])}),
    "second size": ("partial", 1, "new from reference 2 on", {"refs": add("other", "first", 96)}),
    "first size": ("miss", 0, "new from reference 1 on", {"first": add("picture", resolution=96)}),
    "a third": ("partial", 2, "new from reference 3 on", THIRD),
    "only the first": ("partial", 1, "the text is new", {"pos": encode(references="first")}),
    "the same twice": ("partial", 1, "new from reference 2 on", {"refs": add("picture", "first")}),
    "no reference": ("miss", 0, "", {"pos": prompt("put <image1> on <image2>")}),
}  # fmt: skip


@pytest.mark.parametrize("name", ["seed", "size", "batch"])
def test_a_full_hit_is_bit_equal(comfy, stored, name):
    reported = run_beside_fresh(comfy, edit(**CHANGES[name][-1]))
    assert reported.reuse()["kind"] == "hit" and torch.equal(reported.latent, reported.fresh)
    (summary,) = reported.ran.outputs["sample"]["text"]
    assert "positive prefix: hit: all 63 tokens reused" in summary and "s saved" in summary


@pytest.mark.parametrize("name", CHANGES)
def test_a_run_pays_only_for_what_changed(comfy, stored, name):
    kind, references, reason, nodes = CHANGES[name]
    run_and_report(comfy, kind, references, reason, **nodes)
    run_and_report(comfy, "hit", **nodes)


def test_the_first_run_of_a_model_misses(comfy):
    """And keeps exactly what it says, in memory of its own."""
    reported = run_beside_fresh(
        comfy, edit(model=["other_model", 0], look=look("other_model"), other_model=loader(TURBO, "fp32"))
    )
    assert reported.is_right()
    facts = reported.reuse()
    assert facts["kind"] == "miss" and facts["reason"] == "nothing stored yet for this loaded model"
    seen = reported.ran.shown("look")
    assert seen["units"] == 3 and seen["bytes"] == seen["storages"] == reported.report["prefix"]["stored_bytes"]
    assert seen["bytes"] == facts["tokens"] * 2 * 2 * 2 * 128 * 4  # K and V, layers, heads, head size, fp32


def test_the_negative_prompt_reuses_the_references_of_the_same_run(comfy):
    nodes = {"neg": encode("blurry"), "cfg": 3.0, "negative": ["neg", 0]}
    reported = run_beside_fresh(comfy, edit(cleared=True, **nodes))
    assert reported.is_right()
    sides = [reported.reuse(side) for side in ("positive", "negative")]
    assert sorted(facts["kind"] for facts in sides) == ["miss", "partial"]
    (second,) = (facts for facts in sides if facts["kind"] == "partial")
    assert second["reused"] == reported.tokens_up_to(2) and second["reason"] == "the text is new"
    again = run_beside_fresh(comfy, edit(**nodes))
    assert again.is_right() and {again.reuse(side)["kind"] for side in ("positive", "negative")} == {"hit"}


def test_the_report_tells_of_both_sides_where_they_are_one(comfy, stored):
    """Guidance away from the very same prompt runs as one batch."""
    reported = run_beside_fresh(comfy, edit(cfg=3.0, negative=["pos", 0]))
    assert torch.equal(reported.latent, reported.fresh)
    assert reported.reuse("positive")["kind"] == "hit"


def test_a_changed_encoder_is_another_prompt_and_back_is_a_hit(comfy, stored):
    """The loader's dtype: all that it encoded is found again when it comes back."""
    encoder = node("Qwen21LoadEncoder", file="qwen3vl_tiny.safetensors", dtype="bf16", device="default")
    run_and_report(comfy, "miss", 0, "new from reference 1 on", encoder=encoder)
    run_and_report(comfy, "hit")


def test_a_changed_vae_is_another_reference_and_back_is_a_hit(comfy, stored):
    vae = node("Qwen21LoadVAE", file="qwen_image_2.1_vae_tiny.safetensors", dtype="bf16", alpha="keep")
    run_and_report(comfy, "miss", 0, "new from reference 1 on", vae=vae)
    run_and_report(comfy, "hit", vae=vae | {"inputs": vae["inputs"] | {"alpha": "over white"}})  # of decoding alone
    run_and_report(comfy, "hit")


# --- other samplers ------------------------------------------------------------------------------------------------


def by_core(comfy, way, **nodes):
    """What the log says of a run by core's samplers, whose picture is that of a fresh one by ours."""
    number = next(SEEDS)
    graph = edit(ksampler, seed=number, **nodes)
    if way == "custom":
        grid = node("Qwen21Schedule", schedule="base", steps=3, denoise=1.0, width=96, height=64)
        graph |= custom_sampling(["grid", 0], grid=grid, noise=node("RandomNoise", noise_seed=number))
    logged = len(comfy.server.log())
    ran = comfy.run(graph | {"fresh": sampler(seed=number, prefix_cache="off"), "fresh_out": show("fresh")})
    assert torch.equal(ran.latent, ran.shown("fresh_out")["samples"])
    return comfy.server.log()[logged:]


@pytest.mark.parametrize("way", ["ksampler", "custom"])
def test_cores_samplers_share_the_store_with_ours(comfy, stored, way):
    assert "positive prefix: hit: all 63 tokens reused" in by_core(comfy, way)
    log = by_core(comfy, way, pos=encode(f"new to {way}"))
    assert "positive prefix: partial: 45 of " in log and "(the text is new)" in log
    run_and_report(comfy, "hit", pos=encode(f"new to {way}"))


# --- core's conditioning nodes -------------------------------------------------------------------------------------

DOG = prompt("a dog in the rain")
AVERAGE = {"conditioning_to": ["pos", 0], "conditioning_from": ["dog", 0], "conditioning_to_strength": 0.4}
PIXELS = node("VAEEncode", pixels=["other", 0], vae=["vae", 0])
BETWEEN = {  # kind and references reused of the first run, nodes
    "zero out": ("miss", 0, {"changed": node("ConditioningZeroOut", conditioning=["pos", 0])}),
    "average": ("miss", 0, {"dog": DOG, "changed": node("ConditioningAverage", **AVERAGE)}),
    "concat": ("miss", 0, {"dog": DOG, "changed": node("ConditioningConcat", conditioning_to=["pos", 0],
                                                       conditioning_from=["dog", 0])}),
    "reference": ("partial", 2, {"pixels": PIXELS, "changed": node("ReferenceLatent", conditioning=["pos", 0],
                                                                latent=["pixels", 0])}),
    "as core's": ("miss", 0, {"changed": node("ProbeCoreConditioning", conditioning=["pos", 0], slots="same",
                                              latents=-1, frames=True)}),
    "slots": ("miss", 0, {"changed": node("ProbeCoreConditioning", conditioning=["pos", 0], slots="2,20", latents=-1,
                                          frames=False)}),
    "range": ("hit", 0, {"changed": node("ConditioningSetTimestepRange", conditioning=["pos", 0], start=0.0,
                                         end=1.0)}),
}  # fmt: skip


@pytest.mark.parametrize("name", BETWEEN)
def test_what_core_does_to_a_conditioning_never_meets_stale_keys(comfy, stored, name):
    kind, references, nodes = BETWEEN[name]
    first = run_beside_fresh(comfy, edit(positive=["changed", 0], **nodes))
    assert torch.equal(first.latent, first.fresh)
    assert first.reuse()["kind"] == kind and (
        kind == "hit" or first.reuse()["reused"] == first.tokens_up_to(references)
    )
    again = run_beside_fresh(comfy, edit(positive=["changed", 0], **nodes))
    assert torch.equal(again.latent, again.fresh) and again.reuse()["kind"] == "hit"
    run_and_report(comfy, "hit")


def test_splicing_finds_what_encoding_with_the_vae_stored(comfy, stored):
    """And the other way round: the same words, other seeds."""
    splice = node("Qwen21SpliceReferences", conditioning=["open", 0], references=["refs", 0], vae=["vae", 0])
    nodes = {"open": prompt("put <image1> on <image2>", references=["refs", 0]), "spliced": splice}
    run_and_report(comfy, "hit", positive=["spliced", 0], **nodes)
    nodes["open"] = prompt("turn <image1>", references=["refs", 0])
    run_and_report(comfy, "partial", 2, "the text is new", positive=["spliced", 0], **nodes)
    run_and_report(comfy, "hit", pos=encode("turn <image1>"))


def test_combined_conditionings_are_told_apart(comfy, stored):
    """Two prompts in one positive: each has its own prefix, and the second shares the first's references."""
    nodes = {
        "second": encode("another of two"),
        "both": node("ConditioningCombine", conditioning_1=["pos", 0], conditioning_2=["second", 0]),
    }
    reported = run_beside_fresh(comfy, edit(positive=["both", 0], **nodes))
    assert reported.is_right()
    assert [facts["kind"] for facts in reported.report["prefix"]["positive"]] == ["hit", "partial"]


def test_a_latent_behind_another_is_another(comfy, stored):
    """Latents of ReferenceLatent are known by their contents alone: their keys must say what stands before them."""
    nodes = {
        "third": picture(2),
        "x": node("VAEEncode", pixels=["picture", 0], vae=["vae", 0]),
        "y": node("VAEEncode", pixels=["other", 0], vae=["vae", 0]),
        "z": node("VAEEncode", pixels=["third", 0], vae=["vae", 0]),
        "two": node("ReferenceLatent", conditioning=["one", 0], latent=["y", 0]),
        "pos": prompt(),
        "positive": ["two", 0],
    }
    kinds = []
    for first in ("x", "z", "z", "x"):
        reported = run_beside_fresh(
            comfy, edit(**nodes, one=node("ReferenceLatent", conditioning=["pos", 0], latent=[first, 0]))
        )
        assert reported.is_right()
        kinds.append(reported.reuse()["kind"])
    assert kinds == ["miss", "miss", "hit", "hit"]


def test_no_prefix_outlives_a_run_but_in_the_store(comfy, stored):
    """Guiders are outputs of nodes, which ComfyUI keeps; an interrupted one keeps its conditions as well."""
    stray, number = node("ProbeStray", after=["sample", 0]), next(SEEDS)
    grid = node("Qwen21Schedule", schedule="base", steps=3, denoise=1.0, width=96, height=64)
    custom = custom_sampling(["grid", 0], grid=grid, noise=node("RandomNoise", noise_seed=number), stray=stray)
    assert comfy.run(edit() | custom).shown("stray") == 0
    dual = node("DualModelGuider", model=["dit", 0], model_negative=["second", 0], positive=["pos", 0], cfg=3.0,
                negative=["neg", 0])  # fmt: skip
    two = {"neg": encode("blurry"), "second": loader(TURBO), "guider": dual}
    if dual["class_type"] in comfy.server.object_info():
        assert comfy.run(edit() | custom | two).shown("stray") == 0
    stop = node("ProbeStop", model=["dit", 0], step=2)
    guider = node("BasicGuider", model=["stop", 0], conditioning=["pos", 0])
    assert comfy.server.post(edit() | custom | {"stop": stop, "guider": guider, "pos": encode("stopped")}).interrupted
    assert comfy.run({"stray": node("ProbeStray")}).shown("stray") == 0

"""CONDITIONING of ours through core's nodes, and of core's own Qwen-Image 2.1 encoder through our MODEL."""

import json

import pytest
import torch

from tests.comfy.graphs import ksampler, node, prompt, sampler, show, two_references

TOLERANCE = 1e-4
WITHOUT_VAE = prompt("put <image1> on <image2>", references=["refs", 0])


def core(**inputs):
    """As core's TextEncodeQwenImage21 of 0.37 hands it on."""
    return node(
        "ProbeCoreConditioning",
        **({"conditioning": ["pos", 0], "slots": "same", "latents": -1, "frames": False} | inputs),
    )


def splice(references="refs"):
    return node("Qwen21SpliceReferences", conditioning=["pos", 0], references=[references, 0], vae=["vae", 0])


def test_what_the_encoder_hands_on(comfy):
    """The two keys of core's own nodes: a list of slots, and raw latents."""
    run = comfy.run(
        two_references(
            cond=show("pos"), pixels=node("VAEEncode", pixels=["picture", 0], vae=["vae", 0]), raw=show("pixels")
        )
    )
    states, extra = run.shown("cond")[0]
    assert len(extra["image_slots"]) == 2 and all(isinstance(slot, int) for slot in extra["image_slots"])
    assert [list(latent.shape) for latent in extra["reference_latents"]] == [[1, 64, 4, 4], [1, 64, 4, 4]]
    # not resized (64 x 64 already), so what VAEEncode makes of the very picture; 0.3.64's node strips its alpha
    if comfy.version >= (0, 33):
        torch.testing.assert_close(extra["reference_latents"][0], run.shown("raw")["samples"], atol=1e-2, rtol=0)
    assert states.shape[0] == 1 and states.shape[2] == 64


@pytest.mark.parametrize("frames", [False, True], ids=["4-D", "with a frame axis"])
@pytest.mark.parametrize("make", [sampler, ksampler], ids=["ours", "ksampler"])
def test_conditioning_as_core_builds_it_equals_ours(comfy, make, frames):
    negative = {"negative": ["core", 0]} if make is ksampler else {}
    graph = two_references(core=core(frames=frames), sample=make(positive=["core", 0], **negative))
    assert torch.equal(comfy.latent(graph), comfy.latent(two_references()))


def test_slots_decide_where_references_stand(comfy, oracle):
    run = comfy.run(two_references(core=core(slots="2,20"), cond=show("core"), sample=sampler(positive=["core", 0])))
    states, extra = run.shown("cond")[0]
    expected = oracle.latent((states[0], extra["reference_latents"], (2, 20)))
    torch.testing.assert_close(run.latent, expected, atol=TOLERANCE, rtol=0)
    assert (run.latent - comfy.latent(two_references())).abs().max() > 100 * TOLERANCE


CORE_NODES = {
    "zero out": node("ConditioningZeroOut", conditioning=["pos", 0]),
    "average": node(
        "ConditioningAverage",
        conditioning_to=["pos", 0],
        conditioning_from=["other_prompt", 0],
        conditioning_to_strength=0.4,
    ),
    "concat": node("ConditioningConcat", conditioning_to=["pos", 0], conditioning_from=["other_prompt", 0]),
}


@pytest.mark.parametrize("name", CORE_NODES)
def test_cores_conditioning_nodes(comfy, oracle, name):
    """They change the text states alone; references stay at their slots."""
    nodes = {
        "other_prompt": prompt("a dog in the rain"),
        "changed": CORE_NODES[name],
        "cond": show("changed"),
        "before": show("pos"),
    }
    run = comfy.run(two_references(**nodes, sample=sampler(positive=["changed", 0])))
    (states, extra), (original, kept) = run.shown("cond")[0], run.shown("before")[0]
    assert extra["image_slots"] == kept["image_slots"]
    assert states.shape != original.shape or not torch.equal(states, original)
    assert bool(states.any()) != (name == "zero out")
    expected = oracle.latent((states[0], extra["reference_latents"], extra["image_slots"]))
    torch.testing.assert_close(run.latent, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("first", ["text", "references"])
def test_reference_latent_follows_the_text(comfy, oracle, first):
    """Core's node knows no slots: its latent stands behind the text and the references with slots."""
    source = "pos" if first == "references" else "other_prompt"
    nodes = {
        "other_prompt": prompt("a dog in the rain"),
        "pixels": node("VAEEncode", pixels=["other", 0], vae=["vae", 0]),
        "changed": node("ReferenceLatent", conditioning=[source, 0], latent=["pixels", 0]),
        "cond": show("changed"),
    }
    run = comfy.run(two_references(**nodes, sample=sampler(positive=["changed", 0])))
    states, extra = run.shown("cond")[0]
    slots = [*extra.get("image_slots", []), states.shape[1]]
    assert len(slots) == len(extra["reference_latents"]) == (3 if first == "references" else 1)
    expected = oracle.latent((states[0], extra["reference_latents"], slots))
    torch.testing.assert_close(run.latent, expected, atol=TOLERANCE, rtol=0)


def test_splicing_equals_encoding_with_the_vae(comfy):
    nodes = {"pos": WITHOUT_VAE, "spliced": splice(), "cond": show("spliced")}
    spliced = comfy.run(two_references(**nodes, sample=sampler(positive=["spliced", 0])))
    whole = comfy.run(two_references(cond=show("pos")))
    (states, extra), (expected, kept) = spliced.shown("cond")[0], whole.shown("cond")[0]
    assert torch.equal(states, expected)
    assert extra["image_slots"] == kept["image_slots"]
    assert all(torch.equal(a, b) for a, b in zip(extra["reference_latents"], kept["reference_latents"], strict=True))
    assert torch.equal(spliced.latent, whole.latent)


def test_a_spliced_prompts_report_tells_of_the_references_in_it(comfy):
    nodes = {"pos": WITHOUT_VAE, "spliced": splice(), "report": show("sample", 1)}
    spliced = comfy.run(two_references(**nodes, sample=sampler(positive=["spliced", 0], seed=7)))
    whole = comfy.run(two_references(report=show("sample", 1), sample=sampler(seed=7)))
    assert json.loads(spliced.shown("report"))["positive"] == json.loads(whole.shown("report"))["positive"]


def test_without_a_vae_the_encoders_view_is_used(comfy, oracle):
    """The vision tokens stay in the text states, and there are more states than with slots."""
    run = comfy.run(
        two_references(
            pos=prompt("put <image1> on <image2>", references=["refs", 0], seen_by="encoder only"),
            cond=show("pos"),
            whole=prompt("put <image1> on <image2>", references=["refs", 0], vae=["vae", 0]),
            kept=show("whole"),
        )
    )
    states, extra = run.shown("cond")[0]
    assert "image_slots" not in extra and "reference_latents" not in extra
    assert states.shape[1] == run.shown("kept")[0][0].shape[1] + 8  # 2 x 2 vision tokens each
    torch.testing.assert_close(run.latent, oracle.latent((states[0], [], [])), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ({"changed": core(slots="5,4")}, "image slots [5, 4] must rise"),
        ({"changed": core(slots="5,9999")}, "image slots [5, 9999] must rise"),
        ({"pos": WITHOUT_VAE, "changed": splice("first")}, "encoded with 2 references but 1 arrived"),
        ({"changed": splice()}, "no open slots"),
    ],
    ids=[
        "falling",
        "beyond the text",
        "splice other count",
        "splice twice",
    ],
)
def test_conditioning_that_does_not_agree_is_refused_in_one_line(comfy, nodes, words):
    node_id, message = comfy.error(two_references(**nodes, sample=sampler(positive=["changed", 0])))
    assert words in message and "\n" not in message
    assert node_id == ("changed" if "splice" in str(nodes).lower() else "sample")

"""What people should heed reaches them: refused, or said before the first step in log, message and report."""

import itertools
import json

import pytest

from tests.comfy.graphs import ksampler, node, prompt, sampler, show, text_to_image, two_references
from tests.support import loras

EVENT = "qwen21.warnings"
SEEDS = itertools.count(70_000)
TEXT = "put <image1> on <image2>"
HALF_SEEN = "references were seen by the encoder alone: wire 'Load Qwen-Image 2.1 VAE' into vae of 'Encode"
ALL = {"references": ["refs", 0], "vae": ["vae", 0]}


def guided(make=sampler, **inputs):
    return make(seed=next(SEEDS), cfg=3.0, negative=["neg", 0], **inputs)


def warnings_of(comfy, graph):
    """Warnings in messages, in the log and in the sampler's report, each of which must precede the first step."""
    before = len(comfy.server.log())
    if graph["sample"]["class_type"] == "Qwen21Sampler":
        graph = graph | {"report": show("sample", 1)}
    ran = comfy.run(graph)
    messages = ran.result.messages
    first_step = next(i for i, (kind, _) in enumerate(messages) if kind == "progress")
    events = [(i, data) for i, (kind, data) in enumerate(messages) if kind == EVENT]
    assert all(i < first_step and data["node"] == "sample" for i, data in events)
    warnings = [warning for _, data in events for warning in data["warnings"]]
    log = comfy.server.log()[before:]
    assert all(log.count(f"Qwen-Image 2.1: {warning}") == 1 for warning in warnings)
    if "report" in graph:
        assert json.loads(ran.shown("report"))["warnings"] == warnings
        shown = ran.outputs["sample"]
        assert shown["qwen21_warnings"] == warnings
        assert shown["text"][0].splitlines()[: len(warnings)] == [f"! {warning}" for warning in warnings]
    return warnings


def test_references_without_a_vae_are_refused_by_our_sampler(comfy):
    result = comfy.server.post(two_references(pos=prompt(TEXT, references=["refs", 0])))
    assert result.error_node == "sample"
    assert result.error == (
        "the references were encoded without a VAE, so the picture would not look like them: wire 'Load Qwen-Image 2.1 "
        "VAE' into vae of 'Encode Qwen-Image 2.1 prompt', or set seen_by there to encoder only"
    )
    (failed,) = [data for kind, data in result.messages if kind == "execution_error"]
    assert failed["exception_type"] == "qwen21.UserError"


@pytest.mark.parametrize("make", [sampler, ksampler])
def test_the_encoder_alone_is_a_choice(comfy, make):
    """The VAE may stay wired; nothing is warned of, and the report names it."""
    chosen = prompt(TEXT, **ALL, seen_by="encoder only")
    graph = two_references(pos=chosen, cond=show("pos"), sample=make(seed=next(SEEDS)))
    assert warnings_of(comfy, graph) == []
    extra = comfy.run(graph).shown("cond")[0][1]
    assert "reference_latents" not in extra
    assert [one["seen"] for one in extra["qwen21_report"]["references"]] == ["by the encoder alone"] * 2


def test_references_without_a_vae_in_ksampler(comfy):
    (warning,) = warnings_of(
        comfy, two_references(pos=prompt(TEXT, references=["refs", 0]), sample=ksampler(seed=next(SEEDS)))
    )
    assert warning.startswith(f"the prompt's {HALF_SEEN}")


@pytest.mark.parametrize("make", [sampler, ksampler])
@pytest.mark.parametrize(
    ("negative", "expected"),
    [
        (prompt("blurry"), ["was encoded with 0 references, the positive with 2; wire the same references into both"]),
        (prompt("blurry", **ALL), []),
        (prompt("blurry", references=["refs", 0]), [f"the negative prompt's {HALF_SEEN}"]),
        (prompt("blurry", references=["swapped", 0], vae=["vae", 0]), ["with other references than the positive"]),
        (prompt("no <image3>", **ALL), ["the negative prompt speaks of <image3>, but there are 2 references"]),
    ],
    ids=["none", "the same", "no VAE", "others", "placeholder"],
)
def test_the_negatives_references(comfy, make, negative, expected):
    nodes = {
        "qk_norm_rope": node("Qwen21AddReference", image=["other", 0], resolution=64, fit="resize"),
        "swapped": node(
            "Qwen21AddReference", image=["picture", 0], references=["qk_norm_rope", 0], resolution=64, fit="resize"
        ),
    }
    warnings = warnings_of(comfy, two_references(**nodes, neg=negative, sample=guided(make)))
    assert len(warnings) == len(expected), warnings
    assert all(words in warning for words, warning in zip(expected, warnings, strict=True))


def test_a_negative_that_ksampler_does_not_use_is_no_matter(comfy):
    sample = ksampler(seed=next(SEEDS), negative=["neg", 0], cfg=1.0)
    assert warnings_of(comfy, two_references(neg=prompt("blurry"), sample=sample)) == []


@pytest.mark.parametrize("make", [sampler, ksampler])
def test_a_placeholder_without_its_reference(comfy, make):
    graph = two_references(pos=prompt("<image3> on <image1>", **ALL), sample=make(seed=next(SEEDS)))
    assert warnings_of(comfy, graph) == ["the prompt speaks of <image3>, but there are 2 references"]


def test_texts_of_other_nodes_are_given_to_the_canvas(comfy):
    """A LoRA of which a part matches gives a warning that only its report shows."""
    patches = loras.make(25)
    file = loras.write(comfy.models / "loras" / "partly.safetensors", patches)
    lora = node("Qwen21LoadLoRA", base_model=["dit", 0], file=file.name, strength=0.5)
    plan = node("Qwen21MemoryPlan", **plan_choices(comfy))
    graph = text_to_image(lora=lora, plan=plan, text=show("lora", 1), sample=sampler(model=["lora", 0]))
    outputs = (ran := comfy.run(graph)).outputs
    assert outputs["lora"]["text"] == [ran.shown("text")]
    assert outputs["lora"]["text"][0].startswith("partly.safetensors at strength 0.5")
    assert outputs["plan"]["text"][0].startswith("Memory plan: 96x64 pixels")


def plan_choices(comfy):
    info = comfy.server.object_info()["Qwen21MemoryPlan"]["input"]["required"]
    files = {name: options_of(info[name])[0] for name in ("transformer", "encoder", "vae")}
    sizes = {"width": 96, "height": 64, "references": 0, "resolution": 64, "batch": 1}
    return {**files, **sizes, "guided": False, "kv_storage": "auto", "free_gib": 8.0}


def options_of(declared):
    return declared[0] if isinstance(declared[0], list) else declared[1]["options"]

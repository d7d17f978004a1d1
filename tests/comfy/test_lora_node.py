"""Qwen21LoadLoRA beside core's loaders, on plain and quantized weights: as merged in fp64, and gone when it is off."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.comfy.graphs import ksampler, node, prompt, sampler, show, text_to_image
from tests.comfy.models import DIT, DIT_INT8
from tests.comfy.oracle import Oracle
from tests.comfy.run_and_report import SEEDS, edit, run_and_report, run_beside_fresh
from tests.comfy.test_other_nodes import require_deep_clone
from tests.comfy.test_quantized import loader, relative
from tests.comfy.test_sampling import side
from tests.support import loras, lycoris
from tests.support.tiny_quant import LAYOUTS, pack, write

TOLERANCE = 1e-5  # of the latent's norm
WEIGHTS = {"plain": {}, "int8_convrot": {"file": DIT_INT8}, "fp8": {"dtype": "fp8"}}
PATCHING = ("Qwen21LoadLoRA", "LoraLoaderModelOnly", "ModelMergeSimple")


@pytest.fixture(scope="module")
def files(comfy):
    """Writes a LoRA into models/loras; gives its name."""
    written = []

    def make(name, patches, style="diffusers", settings=None):
        file = comfy.models / "loras" / f"node_{name.replace(' ', '_').replace(',', '')}.safetensors"
        file.parent.mkdir(exist_ok=True)
        written.append(loras.write(file, patches, style, settings))
        return file.name

    yield make
    for file in written:
        file.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def dense(comfy):
    """By weights, a transformer of the numbers that they stand for."""
    source, found = load_file(comfy.models / "diffusion_models" / DIT), {}
    for name, layout in (("plain", None), ("int8_convrot", "int8_convrot"), ("fp8", "fp8 by rows")):
        state = source if layout is None else pack(source, LAYOUTS[layout])[2]
        found[name] = Oracle(write(comfy.models / "dense" / f"lora_{name}.safetensors", state))
    return found


def ours(file, strength=1.0, model="dit"):
    return node("Qwen21LoadLoRA", base_model=[model, 0], file=file, strength=strength)


def cores(file, strength=1.0, model="dit"):
    return node("LoraLoaderModelOnly", model=[model, 0], lora_name=file, strength_model=strength)


def graph(weights="plain", make=sampler, **nodes):
    """Text to image on the last of the nodes that change the MODEL."""
    model = next((name for name in reversed(nodes) if nodes[name]["class_type"] in PATCHING), "dit")
    shown = {"cond": show("pos"), "report": show("sample", 1)} if make is sampler else {"cond": show("pos")}
    return text_to_image(dit=loader("dit", **WEIGHTS[weights]), **nodes, **shown, sample=make(model=[model, 0]))


def expected(dense, run, *stack):
    """The library's picture with LoRAs merged in fp64."""
    one = Oracle.__new__(Oracle)
    one.dit = loras.merge(dense.dit, *stack)
    return one.latent(side(run, "cond"))


def report_of(run):
    return json.loads(run.shown("report"))


# --- as merged -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("make", [sampler, ksampler], ids=["sampler", "ksampler"])
@pytest.mark.parametrize("way", [ours, cores])
def test_a_lora_equals_the_merged_weights_and_leaves_nothing_behind(comfy, files, dense, way, make, weights):
    patches = loras.make(11, alpha=2.0)
    file = files("whole", patches)
    before = comfy.run(graph(weights, make))
    run = comfy.run(graph(weights, make, lora=way(file)))
    assert relative(run.latent, expected(dense[weights], run, (patches, 1.0))) < TOLERANCE
    assert relative(run.latent, before.latent) > 0.05
    after = comfy.run(graph(weights, make))
    assert "sample" in after.executed and "dit" not in after.executed
    assert torch.equal(after.latent, before.latent)


@pytest.mark.parametrize("style", loras.STYLES)
def test_every_style_of_keys(comfy, files, dense, style):
    patches = loras.make(12)
    if "fused" in style:
        patches = loras.fusable(patches)
    run = comfy.run(graph("int8_convrot", lora=ours(files(style, patches, style)), text=show("lora", 1)))
    assert relative(run.latent, expected(dense["int8_convrot"], run, (patches, 1.0))) < TOLERANCE
    assert "matched layers: 8 attention, 6 mlp, 8 other" in run.shown("text")


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("strength", [1.0, 0.5, -1.0])
def test_dora(comfy, files, dense, weights, strength):
    """By its definition: every row at the trained length."""
    patches = loras.make(13, alpha=3.0, dora=True)
    run = comfy.run(graph(weights, lora=ours(files("dora", patches), strength)))
    assert relative(run.latent, expected(dense[weights], run, (patches, strength))) < TOLERANCE


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_stack(comfy, files, dense, weights):
    first, second = loras.make(14), loras.make(15, layers=loras.ATTENTION, alpha=4.0)
    one, two = files("first", first), files("second", second, "kohya")
    stack = ((first, 0.7), (second, -0.4), (first, 0.2))
    nodes = {"a": ours(one, 0.7), "b": cores(two, -0.4, "a"), "c": ours(one, 0.2, "b")}
    run = comfy.run(graph(weights, **nodes))
    assert relative(run.latent, expected(dense[weights], run, *stack)) < TOLERANCE
    attached = report_of(run)["model"]["loras"]
    assert [(one["file"], one["strength"]) for one in attached] == [(one, 0.7), (one, 0.2)]
    assert report_of(run)["model"]["patched_weights"] == len(loras.LAYERS)


def test_alpha_in_the_header(comfy, files, dense):
    patches = loras.make(16)
    file = files("header", patches, settings={"transformer.lora_alpha": 1, "transformer.r": 4})
    scaled = {layer: loras.Patch(patch.a, patch.b, 1.0) for layer, patch in patches.items()}
    run = comfy.run(graph(lora=ours(file)))
    assert relative(run.latent, expected(dense["plain"], run, (scaled, 1.0))) < TOLERANCE


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_lora_by_cores_hooks(comfy, files, dense, weights):
    patches = loras.make(17, layers=loras.ATTENTION + loras.MLP)
    hook = node("CreateHookLora", lora_name=files("hook", patches), strength_model=0.6, strength_clip=0.0)
    hooked = node("ConditioningSetProperties", cond_NEW=["pos", 0], strength=1.0, set_cond_area="default",
                  hooks=["hook", 0])  # fmt: skip
    nodes = {"hook": hook, "hooked": hooked, "sample": sampler(positive=["hooked", 0])}
    before = comfy.latent(graph(weights))
    run = comfy.run(graph(weights) | nodes)
    assert relative(run.latent, expected(dense[weights], run, (patches, 0.6))) < TOLERANCE
    assert torch.equal(comfy.latent(graph(weights, lora=ours(files("whole", loras.make(11)), 0.0))), before)


@pytest.mark.parametrize(("first", "second"), [("plain", "int8_convrot"), ("int8_convrot", "plain")])
def test_models_are_mixed_by_their_numbers(comfy, dense, first, second):
    """Core's merging nodes take the other model's weights for what they stand for."""
    other = loader("dit", **WEIGHTS[second])
    mix = node("ModelMergeSimple", model1=["dit", 0], model2=["other", 0], ratio=0.25)
    run = comfy.run(graph(first, mix=mix) | {"other": other})
    mixed = loras.merge(dense[first].dit)
    for name, parameter in dense[second].dit.named_parameters():
        own = mixed.get_parameter(name)
        own.data = 0.25 * own.data + 0.75 * parameter.data
    one = Oracle.__new__(Oracle)
    one.dit = mixed
    assert relative(run.latent, one.latent(side(run, "cond"))) < TOLERANCE
    assert relative(run.latent, dense[first].latent(side(run, "cond"))) > 100 * TOLERANCE


def test_a_clone_with_weights_of_its_own(comfy, files, dense):
    require_deep_clone(comfy)
    patches = loras.make(18)
    nodes = {"clone": node("ProbeClone", model=["dit", 0]), "lora": ours(files("clone", patches), model="clone")}
    run = comfy.run(graph("int8_convrot", **nodes))
    assert relative(run.latent, expected(dense["int8_convrot"], run, (patches, 1.0))) < TOLERANCE


# --- prefixes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", WEIGHTS)
def test_prefixes_are_kept_by_lora_and_strength(comfy, files, weights):
    one, two = files("prefix one", loras.make(19)), files("prefix two", loras.make(19))  # equal contents
    dora, dit = files("prefix dora", loras.make(19, dora=True)), loader("dit", **WEIGHTS[weights])
    run_beside_fresh(comfy, edit(dit=dit))
    plain = run_and_report(comfy, "hit", dit=dit, seed=(seed := next(SEEDS)))

    def run(kind, lora, **nodes):
        reason = "other LoRAs or strengths" if kind == "miss" else ""
        return run_and_report(comfy, kind, 0, reason, model=["lora", 0], lora=lora, dit=dit, **nodes)

    assert not torch.equal(run("miss", ours(one), seed=seed).latent, plain.latent)
    run("hit", ours(two))
    run("miss", ours(one, 0.5))
    run("miss", ours(dora))
    run("hit", ours(dora))
    run("hit", ours(one, 0.0))
    run("hit", ours(one))
    run_and_report(comfy, "hit", dit=dit)


# --- reports and mistakes ------------------------------------------------------------------------------------------


def test_a_part_that_matches_nothing_is_named(comfy, files):
    patches = loras.make(20)
    file = files("part", patches)
    path = comfy.models / "loras" / file
    extra = {f"transformer.txt_out.lora_{part}.weight": torch.ones(4, 4) for part in "AB"}
    save_file(load_file(path) | extra, path)
    run = comfy.run(graph(lora=ours(file, 0.5), text=show("lora", 1)))
    warning, *lines = run.shown("text").splitlines()  # what is to be heeded comes first
    assert warning.startswith(f"! LoRA {file}: only part of it is used")
    assert lines == [
        f"{file} at strength 0.5",
        "matched layers: 8 attention, 6 mlp, 8 other",
        "not matched: 1",
        "  transformer.txt_out",
    ]
    (attached,) = report_of(run)["model"]["loras"]
    matched = {"attention": 8, "mlp": 6, "other": 8}
    assert attached | {"file": file, "strength": 0.5, "matched": matched} == attached
    assert attached["unmatched"] == ["transformer.txt_out"]


def test_strength_zero_leaves_the_model_alone(comfy, files):
    run = comfy.run(graph(lora=ours(files("zero", loras.make(21)), 0.0), text=show("lora", 1)))
    assert torch.equal(run.latent, comfy.latent(text_to_image()))
    assert report_of(run)["model"]["loras"] == [] and report_of(run)["model"]["patched_weights"] == 0
    assert "! strength is 0" in run.shown("text")


WIDE = torch.ones(3072, 4)
WRONG = {
    "older model": ({"transformer_blocks.0.attn.add_q_proj": (WIDE.T, WIDE)}, "the older 20B Qwen-Image"),
    "another model": ({"double_blocks.0.img_attn.qkv": (torch.ones(4, 8), torch.ones(8, 4))}, "a Flux-like model"),
    "all zero": ({loras.LAYERS[0]: (torch.ones(4, 256), torch.zeros(256, 4))}, "its every lora_B is zero"),
    "block beyond": (
        {"transformer_blocks.40.attn.to_q": (torch.ones(4, 256), torch.ones(256, 4))},
        "is of block 40, but the transformer's blocks are 0 to 1",
    ),
    "wrong width": ({loras.LAYERS[0]: (torch.ones(4, 128), torch.ones(128, 4))}, "this LoRA is for another model"),
    "no LoRA": ({}, "this is a Qwen-Image 2.1 VAE"),
}


@pytest.mark.parametrize(("layers", "words"), WRONG.values(), ids=WRONG)
def test_a_file_that_is_no_lora_for_this_model(comfy, files, layers, words):
    file = files("wrong", loras.make(22))
    tensors = {
        f"transformer.{n}.lora_{p}.weight": t for n, pair in layers.items() for p, t in zip("AB", pair, strict=True)
    }
    source = next((comfy.models / "vae").glob("*.safetensors"))
    saved = {name: tensor.contiguous() for name, tensor in (tensors or load_file(source)).items()}
    save_file(saved, comfy.models / "loras" / file)
    failed, message = comfy.error(graph(lora=ours(file)))
    assert failed == "lora" and "\n" not in message and words in message and file in message


@pytest.mark.parametrize("name", ["absent.safetensors", "../diffusion_models/x.safetensors", "/etc/passwd"])
def test_a_file_that_is_not_listed(comfy, files, name):
    failed, message = comfy.error(graph(lora=ours(name)))
    assert failed == "lora" and f"{name!r} is not in models/loras" in message


def test_a_model_of_another_kind(comfy, files):
    nodes = {"other": node("ProbeOther", model=["dit", 0]), "lora": ours(files("other", loras.make(23)), model="other")}
    failed, message = comfy.error(graph(**nodes))
    assert failed == "lora" and "the MODEL is a Flux" in message and "'Load Qwen-Image 2.1 transformer'" in message


def test_a_new_prompt_under_a_lora(comfy, files, dense):
    patches = loras.make(24)
    run = comfy.run(graph("fp8", pos=prompt("a blue dog"), lora=ours(files("prompt", patches))))
    assert relative(run.latent, expected(dense["fp8"], run, (patches, 1.0))) < TOLERANCE


@pytest.mark.parametrize("form", lycoris.FORMS)
@pytest.mark.parametrize("weights", ["plain", "int8_convrot"])
def test_lokr_and_loha_are_as_merged(comfy, dense, form, weights):
    layer, shape = "transformer_blocks.1.img_mlp.out", (256, 768)
    parts = lycoris.FORMS[form](*shape)
    name = f"{form.replace(' ', '_').replace(',', '')}.safetensors"
    lycoris.write(comfy.models / "loras" / name, {layer: parts}, alpha=1.5)
    run = comfy.run(graph(weights, lora=ours(name), text=show("lora", 1)))
    patches = {layer: lycoris.Difference(lycoris.difference(parts, 1.5))}
    assert relative(run.latent, expected(dense[weights], run, (patches, 1.0))) < TOLERANCE
    assert relative(run.latent, expected(dense[weights], run, ({}, 1.0))) > 10 * TOLERANCE
    assert "matched layers: 0 attention, 1 mlp, 0 other" in run.shown("text")

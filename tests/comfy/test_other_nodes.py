"""Other people's nodes on our MODEL: LoRA loaders, caches, attention overrides, compilation, clones, block patches."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.comfy.graphs import STEPS, counts, ksampler, node, probe, prompt, sampler, show, text_to_image
from tests.comfy.models import DIT

TOLERANCE = 1e-4
LAYERS = ("transformer_blocks.0.attn.to_q", "transformer_blocks.1.img_mlp.proj", "img_in")


def patched(model, make=sampler, **nodes):
    """Text to image, sampled on the MODEL of node `model`."""
    return text_to_image(**nodes, sample=make(model=[model, 0]))


# --- LoRA ----------------------------------------------------------------------------------------------------------


def lora_keys(kind, layer):
    """Names of down and up in the forms that trainers write."""
    if kind == "lora_unet":
        stem = "lora_unet_" + layer.replace(".", "_")
        return f"{stem}.lora_down.weight", f"{stem}.lora_up.weight"
    prefix = {"bare": ""}.get(kind, f"{kind}.")
    return f"{prefix}{layer}.lora_A.weight", f"{prefix}{layer}.lora_B.weight"


@pytest.fixture(scope="module")
def loras(comfy):
    """The same change of three layers under four kinds of names, and the checkpoint it gives when merged."""
    model = load_file(comfy.models / "diffusion_models" / DIT)
    generator = torch.Generator().manual_seed(0)
    files = {kind: {} for kind in ("transformer", "diffusion_model", "bare", "lora_unet")}
    merged = dict(model)
    for layer in LAYERS:
        key = f"{layer}.weight" if f"{layer}.weight" in model else "transformer_blocks.1.img_mlp.gate_up.weight"
        rows, columns = model[key].shape
        rows = rows // 2 if "gate_up" in key else rows
        down, up = (0.2 * torch.randn(shape, generator=generator) for shape in ((4, columns), (rows, 4)))
        weight = merged[key].clone()
        weight[-rows:] += up @ down  # the second half of gate_up is proj
        merged[key] = weight
        for kind, tensors in files.items():
            tensors.update(zip(lora_keys(kind, layer), (down, up), strict=True))
    folder = comfy.models / "loras"
    folder.mkdir(exist_ok=True)
    for kind, tensors in files.items():
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / f"{kind}.safetensors")
    save_file(merged, comfy.models / "diffusion_models" / "merged.safetensors")
    yield list(files)
    (comfy.models / "diffusion_models" / "merged.safetensors").unlink()


def with_lora(kind, strength=1.0, make=sampler):
    lora = node("LoraLoaderModelOnly", model=["dit", 0], lora_name=f"{kind}.safetensors", strength_model=strength)
    return patched("lora", make, lora=lora)


@pytest.mark.parametrize("make", [sampler, ksampler], ids=["ours", "ksampler"])
@pytest.mark.parametrize("kind", ["transformer", "diffusion_model", "bare", "lora_unet"])
def test_a_lora_equals_the_merged_checkpoint_and_leaves_nothing_behind(comfy, loras, kind, make):
    before = comfy.run(text_to_image(sample=make()))
    changed = comfy.latent(with_lora(kind, make=make))
    after = comfy.run(text_to_image(sample=make()))
    assert "sample" in after.executed and "dit" not in after.executed  # sampled again, on the very same weights
    assert torch.equal(after.latent, before.latent)
    loader = node("Qwen21LoadDiT", file="merged.safetensors", dtype="default")
    merged = comfy.latent(text_to_image(dit=loader, sample=make()))
    torch.testing.assert_close(changed, merged, atol=TOLERANCE, rtol=0)
    assert (changed - before.latent).abs().max() > 1000 * TOLERANCE


def test_a_lora_of_strength_zero_changes_nothing(comfy, loras):
    assert torch.equal(comfy.latent(with_lora("transformer", 0.0)), comfy.latent(text_to_image()))


def test_the_report_counts_patched_weights(comfy, loras):
    run = comfy.run(with_lora("bare") | {"report": show("sample", 1)})
    assert json.loads(run.shown("report"))["model"]["patched_weights"] == len(LAYERS)


# --- what wraps the transformer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["EasyCache", "LazyCache"])
def test_step_caches_skip_steps(comfy, name):
    if name not in comfy.server.object_info():
        pytest.skip(f"ComfyUI {comfy.server.installation} has no node {name}")
    cache = node(name, model=["probe", 0], reuse_threshold=3.0, start_percent=0.0, end_percent=1.0, verbose=False)
    graph = text_to_image(probe=probe(), cache=cache, sample=sampler(model=["cache", 0], steps=12), counts=counts())
    run = comfy.run(graph)
    assert 1 <= run.shown("counts")["denoise"] < 12
    assert bool(torch.isfinite(run.latent).all())
    off = cache | {"inputs": cache["inputs"] | {"reuse_threshold": 0.0}}
    whole = comfy.run(graph | {"probe": probe(), "cache": off})
    assert whole.shown("counts")["denoise"] == 12
    assert torch.equal(whole.latent, comfy.latent(text_to_image(sample=sampler(steps=12))))
    if name == "EasyCache":  # the same picture, a little off
        assert (run.latent - whole.latent).std() < 0.5 * whole.latent.std()


@pytest.mark.parametrize("make", [sampler, ksampler], ids=["ours", "ksampler"])
def test_a_wrapper_that_writes_into_what_it_is_given_changes_nothing(comfy, make):
    """In fp32 that would be the sampler's own tensor; EasyCache adds to it."""
    writes = node("ProbePatch", model=["dit", 0], patch="writes")
    graph = patched("writes", make, writes=writes, neg=prompt("dull"))
    graph["sample"]["inputs"] |= {"cfg": 2.0, "negative": ["neg", 0]}
    plain = graph | {"sample": {**graph["sample"], "inputs": graph["sample"]["inputs"] | {"model": ["dit", 0]}}}
    assert torch.equal(comfy.latent(graph), comfy.latent(plain))


@pytest.mark.parametrize("make", [sampler, ksampler], ids=["ours", "ksampler"])
def test_an_attention_override_is_called_in_every_block_of_every_step(comfy, make):
    run = comfy.run(patched("probe", make, probe=probe(override=True), counts=counts()))
    found = run.shown("counts")
    assert found["attention"] >= 2 * STEPS and found["denoise"] == STEPS
    assert torch.equal(run.latent, comfy.latent(text_to_image()))


def test_torch_compile_on_our_model(comfy):
    """It compiles what lies between the products, once: another size, prompt and batch find it ready."""
    logged = len(comfy.server.log())
    compiled = node("TorchCompileModel", model=["dit", 0], backend="inductor")
    for change in ({}, {"width": 160, "height": 96}, {"text": "quite another prompt"}):
        asked = {"pos": prompt(**change)}
        got, plain = comfy.latent(patched("compiled", compiled=compiled) | asked), comfy.latent(text_to_image(**asked))
        torch.testing.assert_close(got, plain, atol=TOLERANCE, rtol=0)
    log = comfy.server.log()[logged:]
    assert log.count("Qwen-Image 2.1: compiled in") == 1 and "recompile_limit" not in log


def require_deep_clone(comfy):
    source = (comfy.server.installation.path / "comfy" / "model_patcher.py").read_text()
    if "force_deepcopy" not in source:
        pytest.skip(f"ComfyUI {comfy.server.installation} knows no clone(force_deepcopy=True)")


@pytest.mark.parametrize("make", [sampler, ksampler], ids=["ours", "ksampler"])
def test_a_clone_with_weights_of_its_own_samples_the_same(comfy, make):
    require_deep_clone(comfy)
    graph = patched("clone", make, clone=node("ProbeClone", model=["dit", 0]))
    assert torch.equal(comfy.latent(graph), comfy.latent(text_to_image()))


def test_a_lora_on_such_a_clone_stays_there(comfy, loras):
    require_deep_clone(comfy)
    before = comfy.latent(text_to_image())
    lora = node("LoraLoaderModelOnly", model=["clone", 0], lora_name="bare.safetensors", strength_model=1.0)
    graph = patched("lora", clone=node("ProbeClone", model=["dit", 0]), lora=lora)
    torch.testing.assert_close(comfy.latent(graph), comfy.latent(with_lora("bare")), atol=TOLERANCE, rtol=0)
    assert torch.equal(comfy.latent(text_to_image()), before)


@pytest.mark.parametrize("patch", ["dit_replace", "attn1_patch", "double_block"])
def test_nodes_that_patch_blocks_are_refused_by_name(comfy, patch):
    node_id, message = comfy.error(patched("patch", patch=node("ProbePatch", model=["dit", 0], patch=patch)))
    assert node_id == "sample" and "\n" not in message
    assert ("patches_replace.dit" if patch == "dit_replace" else patch) in message and "remove that node" in message


def test_renorm_cfg_scales_the_guided_velocity_down(comfy):
    """At one step from 1: the guided velocity, no longer than the positive's."""
    graph = text_to_image(
        neg=prompt("dull"), renorm=node("RenormCFG", model=["dit", 0], cfg_trunc=100.0, renorm_cfg=1.0)
    )

    def one_step(**inputs):
        return comfy.latent(graph | {"sample": sampler(negative=["neg", 0], steps=1, **inputs)})

    asked = one_step(model=["renorm", 0], cfg=6.0)
    assert bool(torch.isfinite(asked).all()) and not torch.equal(asked, one_step(cfg=6.0))


@pytest.mark.parametrize("name", ["FreeU", "FreeU_V2"])
def test_nodes_for_unets_are_refused_in_words(comfy, name):
    freeu = node(name, model=["dit", 0], b1=1.1, b2=1.2, s1=0.9, s2=0.2)
    node_id, message = comfy.error(patched("freeu", freeu=freeu))
    assert node_id == "freeu" and "U-Net" in message and "remove that node" in message


ACTS_ON_BLOCKS = {
    "PerturbedAttentionGuidance": {"scale": 3.0},
    "SelfAttentionGuidance": {"scale": 0.5, "blur_sigma": 2.0},
    "ScaleROPE": {f"{kind}_{axis}": kind == "scale" for axis in "xyt" for kind in ("scale", "shift")},
}


@pytest.mark.parametrize("name", ACTS_ON_BLOCKS)
def test_cores_nodes_that_act_on_blocks_are_refused(comfy, name):
    """Otherwise they would do nothing, in silence."""
    if name not in comfy.server.object_info():
        pytest.skip(f"ComfyUI {comfy.server.installation} has no node {name}")
    patch = node(name, model=["dit", 0], **(ACTS_ON_BLOCKS[name] | ({"scale_x": 1.5} if name == "ScaleROPE" else {})))
    graph = patched("patch", patch=patch, neg=prompt("dull"))
    graph["sample"]["inputs"] |= {"cfg": 2.0, "negative": ["neg", 0]}
    node_id, message = comfy.error(graph)
    assert node_id == "sample" and "remove that node" in message


# --- another sampling ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [sampler, ksampler], ids=["ours", "ksampler"])
def test_a_sampling_that_would_make_noise_is_refused(comfy, make):
    node_id, message = comfy.error(patched("other", make, other=node("ModelSamplingSD3", model=["dit", 0], shift=3.0)))
    assert node_id == "sample" and "ModelSamplingAuraFlow" in message and "\n" not in message


def test_another_shift_is_for_grids_that_use_it(comfy):
    shifted = node("ModelSamplingAuraFlow", model=["dit", 0], shift=6.0)
    graph = patched("shifted", shifted=shifted, report=show("sample", 1))
    ran, plain = comfy.run(graph), comfy.latent(text_to_image())
    assert torch.equal(ran.latent, plain)
    assert "another shift" in json.loads(ran.shown("report"))["warnings"][0]
    assert not torch.allclose(comfy.latent(patched("shifted", ksampler, shifted=shifted)), plain, atol=0.01)
